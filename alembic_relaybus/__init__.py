"""The migrations of the relaybus tables, to be run from code.

The same revisions run by ``alembic upgrade head`` in a checkout, by ``relaybus migrate upgrade``
anywhere, and by the functions here. They keep their own version table,
``relaybus_alembic_version``, so that they never meet the revisions of the application.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, overload

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.script.revision import RevisionError
from alembic.util import CommandError
from sqlalchemy import Connection, Engine

from alembic_relaybus.environment import LOCK_TIMEOUT, Report, Request, require_dialect
from alembic_relaybus.inside import refuse_nested, run_down, run_up
from alembic_relaybus.options import DEFAULT_PREFIX, Options
from sqlalchemy_relaybus.exc import ConfigurationError

__all__ = [
    "current",
    "downgrade",
    "head",
    "include_name",
    "include_object",
    "migrate",
    "upgrade",
    "upgrade_sql",
]

# Alembic keeps the migration that runs in the globals of its modules
_one_at_a_time = threading.Lock()

# of every version up to now; by their full names, since a table of the application may begin
# with the prefix too
_TABLES = tuple(
    DEFAULT_PREFIX + name
    for name in (
        "alembic_version",
        "completed",
        "deliveries",
        "events",
        "keys",
        "lanes",
        "ordering_keys",
        "parked",
        "suspects",
        "schema_version",
        "workers",
    )
)


@overload
def upgrade(
    connection: Connection,
    to: str = "head",
    *,
    schema: str | None = None,
    prefix: str = DEFAULT_PREFIX,
    lock_timeout: float = LOCK_TIMEOUT,
    report: Report | None = None,
) -> None: ...


@overload
def upgrade(
    *,
    to: str,
    from_: str | None = None,
    schema: str | None = None,
    prefix: str = DEFAULT_PREFIX,
) -> None: ...


def upgrade(
    connection: Connection | None = None,
    to: str = "head",
    *,
    from_: str | None = None,
    schema: str | None = None,
    prefix: str = DEFAULT_PREFIX,
    lock_timeout: float = LOCK_TIMEOUT,
    report: Report | None = None,
) -> None:
    """Bring the tables up to revision *to*; nothing if they are there already.

    In a transaction that *connection* is in, this is part of it, and the caller commits. Without
    one, all revisions run in one transaction that is committed here. A *schema* that does not
    exist is created, of which *report* is told as of every step.

    Other migrations of the same database are kept out by an advisory lock for the length of the
    transaction; after *lock_timeout* seconds of waiting for it ``SchemaError`` is raised, also
    where the database is at a revision that this release does not know. An unknown *to* is a
    ``ConfigurationError``. Errors of the database pass through.

    Without a connection, this is for a revision of the application's own Alembic project::

        def upgrade() -> None:
            alembic_relaybus.upgrade(to="relaybus_0002")

    What our revisions after *from_* (by default: all) up to *to* do is then part of that one, also
    where it is written to a script. The application's version table is the only one. Which
    revision the tables are at is not looked at: *from_* is the *to* of the call before.
    """
    options = Options(schema, prefix)
    if connection is None:
        with _errors():
            run_up(_scripts(), to, from_, options)
        return
    _refuse_from(from_)
    request = Request(options, connection, lock_timeout, report)
    _command(lambda config: command.upgrade(config, to), request)


@overload
def downgrade(
    connection: Connection,
    to: str,
    *,
    schema: str | None = None,
    prefix: str = DEFAULT_PREFIX,
    lock_timeout: float = LOCK_TIMEOUT,
    report: Report | None = None,
) -> None: ...


@overload
def downgrade(
    *,
    to: str,
    from_: str,
    schema: str | None = None,
    prefix: str = DEFAULT_PREFIX,
) -> None: ...


def downgrade(
    connection: Connection | None = None,
    to: str = "",
    *,
    from_: str | None = None,
    schema: str | None = None,
    prefix: str = DEFAULT_PREFIX,
    lock_timeout: float = LOCK_TIMEOUT,
    report: Report | None = None,
) -> None:
    """Take the tables back to revision *to*, ``"base"`` for none at all.

    ``relaybus_0001`` gives a 0.1 database again: work in flight is pending, what was completed
    and deleted stays deleted. ``base`` drops every table with all that is in it. Transactions,
    lock and errors are those of :func:`upgrade`, and so is the use without a connection, inside a
    revision of the application's, where *from_* has to be given.
    """
    options = Options(schema, prefix)
    if not to:
        raise ConfigurationError("a downgrade needs the revision to go to, 'base' for none at all")
    if connection is None:
        if from_ is None:
            raise ConfigurationError("without a connection, a downgrade needs from_=... as well")
        with _errors():
            run_down(_scripts(), to, from_, options)
        return
    _refuse_from(from_)
    request = Request(options, connection, lock_timeout, report, creates=False)
    _command(lambda config: command.downgrade(config, to), request)


def current(
    connection: Connection, *, schema: str | None = None, prefix: str = DEFAULT_PREFIX
) -> str | None:
    """The revision that the tables are at, ``None`` where there are none. Changes nothing."""
    options = Options(schema, prefix)
    context = MigrationContext.configure(
        connection,
        opts={"version_table": options.version_table, "version_table_schema": options.schema},
    )
    return context.get_current_revision()


def head() -> str:
    """The newest revision that this release has."""
    revision = _scripts().get_current_head()
    assert revision is not None  # there are revisions, and they are linear
    return revision


def upgrade_sql(
    to: str = "head",
    *,
    from_: str | None = None,
    schema: str | None = None,
    prefix: str = DEFAULT_PREFIX,
) -> str:
    """The SQL of an upgrade, as one script in one transaction for ``psql``.

    It begins at revision *from_*, or at an empty database. Nothing is connected to.
    """
    output = io.StringIO()
    request = Request(Options(schema, prefix))
    span = to if from_ is None else f"{from_}:{to}"
    _command(lambda config: command.upgrade(config, span, sql=True), request, output)
    return output.getvalue()


def migrate(
    engine: Engine,
    to: str = "head",
    *,
    schema: str | None = None,
    prefix: str = DEFAULT_PREFIX,
    lock_timeout: float = LOCK_TIMEOUT,
    report: Report | None = None,
) -> None:
    """:func:`upgrade` on a connection of its own, committed. May be repeated and run at once.

    This is what ``--setup`` of the worker does at its start.
    """
    require_dialect(engine.dialect.name)
    with engine.connect() as connection:
        # whatever the engine's default: the revision is read after the lock was waited for
        connection = connection.execution_options(isolation_level="READ COMMITTED")
        upgrade(
            connection, to, schema=schema, prefix=prefix, lock_timeout=lock_timeout, report=report
        )


def include_object(
    object: Any, name: str | None, type_: str, reflected: bool, compare_to: Any
) -> bool:
    """For ``context.configure(include_object=...)`` of the application's own ``env.py``.

    Keeps the application's autogenerate off the relaybus tables under the default prefix, in
    whatever schema: they are not part of its metadata, so that it would propose to drop them.
    """
    return type_ != "table" or name not in _TABLES


def include_name(name: str | None, type_: str, parent_names: Any) -> bool:
    """For ``context.configure(include_name=...)``: as :func:`include_object`, before reflection.

    Saves reading the tables at all. Either of the two is enough.
    """
    return type_ != "table" or name not in _TABLES


def _config(request: Request, output: io.StringIO | None = None) -> Config:
    config = Config(output_buffer=output)
    config.set_main_option("script_location", "alembic_relaybus:")
    config.attributes["relaybus"] = request
    return config


def _scripts() -> ScriptDirectory:
    return ScriptDirectory.from_config(_config(Request()))


def _refuse_from(from_: str | None) -> None:
    if from_ is not None:
        raise ConfigurationError("from_ goes without a connection: a database knows where it is")


def _command(
    run: Callable[[Config], None], request: Request, output: io.StringIO | None = None
) -> None:
    with _errors(), _one_at_a_time:
        refuse_nested()
        run(_config(request, output))


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except (CommandError, RevisionError) as error:
        raise ConfigurationError(str(error)) from error
