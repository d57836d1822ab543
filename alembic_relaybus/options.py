"""Where the tables are: the schema and prefix that a migration works with.

The revision files ask :func:`current` for them. They are known either from the call that runs the
revisions (:func:`using`) or, inside ``env.py``, from the context that Alembic configured.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from alembic import op

from sqlalchemy_relaybus.exc import ConfigurationError

DEFAULT_PREFIX = "relaybus_"

#: PostgreSQL cuts names after 63 bytes; the longest one after the prefix has 31.
MAX_PREFIX_BYTES = 32


@dataclass(frozen=True)
class Options:
    """*schema* (``None``: the first one on the search path) and *prefix* of the tables.

    A prefix that would make PostgreSQL cut the names of indexes is a ``ConfigurationError``.
    """

    schema: str | None = None
    prefix: str = DEFAULT_PREFIX

    def __post_init__(self) -> None:
        if self.schema is not None and not self.schema:
            raise ConfigurationError("the schema must not be empty; leave it out for the default")
        for what, value in (("schema", self.schema or ""), ("prefix", self.prefix)):
            if "\0" in value:
                raise ConfigurationError(f"the {what} {value!r} contains NUL")
        if len(os.fsencode(self.prefix)) > MAX_PREFIX_BYTES:
            raise ConfigurationError(
                f"the prefix {self.prefix!r} has more than {MAX_PREFIX_BYTES} bytes, so that "
                "the names of indexes would be cut"
            )

    @property
    def version_table(self) -> str:
        """The table in which Alembic notes the revision."""
        return self.prefix + "alembic_version"

    def name(self, suffix: str) -> str:
        """The bare name of a table, index, constraint or sequence."""
        return self.prefix + suffix

    def sql(self, statement: str) -> str:
        """*statement* with every ``{name}`` in braces as a quoted, qualified name.

        ``{name!r}`` stands for the bare quoted name, ``{name:literal}`` for a string literal that
        holds the qualified one. Ready for ``op.execute``: colons and percent signs in names do not
        become parameters. Doubled braces are braces.
        """
        return statement.format_map(_Names(self))


class _Names(dict[str, "_Name"]):
    def __init__(self, options: Options) -> None:
        self.options = options

    def __missing__(self, suffix: str) -> _Name:
        return _Name(self.options, suffix)


class _Name:
    def __init__(self, options: Options, suffix: str) -> None:
        self._options, self._suffix = options, suffix

    def __format__(self, spec: str) -> str:
        name = repr(self)
        if self._options.schema is not None:
            name = f"{_quoted(self._options.schema)}.{name}"
        return "'" + name.replace("'", "''") + "'" if spec == "literal" else name

    def __repr__(self) -> str:
        return _quoted(self._options.name(self._suffix))


def _quoted(name: str) -> str:
    # sqlalchemy.text() reads an escaped colon as a colon, and doubles percent signs where needed
    doubled = name.replace('"', '""').replace(":", "\\:")
    return f'"{doubled}"'


_current: ContextVar[Options | None] = ContextVar("alembic_relaybus_options", default=None)


@contextmanager
def using(options: Options) -> Iterator[None]:
    """Let revisions that run inside the block work with *options*."""
    token = _current.set(options)
    try:
        yield
    finally:
        _current.reset(token)


def current() -> Options:
    """The options of the migration that runs."""
    if (options := _current.get()) is not None:
        return options
    found = op.get_context().opts.get("relaybus_options")
    return found if isinstance(found, Options) else Options()
