"""Our revisions as part of a revision of the application's own Alembic project.

Alembic is at work already: with the application's version table, in its transaction, or writing a
script. The statements of our revisions go where those of the calling revision go.
"""

from __future__ import annotations

from alembic import context, op
from alembic.script import ScriptDirectory
from sqlalchemy import inspect
from sqlalchemy.schema import CreateSchema

from alembic_relaybus.environment import require_dialect
from alembic_relaybus.options import Options, using
from sqlalchemy_relaybus.exc import ConfigurationError

_USE = (
    "inside a revision of your Alembic project call alembic_relaybus.upgrade(to=...) without a "
    "connection, anywhere else with one"
)


def run_up(scripts: ScriptDirectory, to: str, from_: str | None, options: Options) -> None:
    """Run the revisions after *from_* (``None``: all) up to *to*."""
    steps = list(scripts.iterate_revisions(_fixed(to), from_ or "base"))
    _require_running()
    _make_schema(options)
    with using(options):
        for script in reversed(steps):
            script.module.upgrade()


def run_down(scripts: ScriptDirectory, to: str, from_: str, options: Options) -> None:
    """Take back the revisions from *from_* down to *to*, which stays."""
    steps = list(scripts.iterate_revisions(_fixed(from_), to))
    _require_running()
    with using(options):
        for script in steps:
            script.module.downgrade()


def refuse_nested() -> None:
    """Raise where Alembic runs in this process: it cannot run inside itself.

    It would take the outer migration's context away, which fails later and elsewhere.
    """
    if _runs():
        raise ConfigurationError(f"a migration is running already: {_USE}")


def _runs() -> bool:
    # not asked of op: that stays set when a migration fails
    try:
        context.is_offline_mode()
    except (NameError, AttributeError):  # before the first migration of the process, after one
        return False
    return True


def _fixed(revision: str) -> str:
    if revision in ("head", "heads"):
        raise ConfigurationError(
            f"{revision!r} is another revision in another release, and your revision must do the "
            "same for ever: name one, such as 'relaybus_0002'"
        )
    return revision


def _require_running() -> None:
    if not _runs():
        raise ConfigurationError(f"no migration runs: {_USE}")
    require_dialect(op.get_context().dialect.name)


def _make_schema(options: Options) -> None:
    if options.schema is None:
        return
    offline = op.get_context().as_sql
    # not IF NOT EXISTS: that needs the privilege to create even where the schema exists
    if offline or not inspect(op.get_bind()).has_schema(options.schema):
        op.execute(CreateSchema(options.schema, if_not_exists=offline))
