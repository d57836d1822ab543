"""What ``env.py`` does: find the database, take the lock, run the revisions.

Started by the plain ``alembic`` command, the URL comes from ``-x url=``, from ``RELAYBUS_URL`` or
from ``sqlalchemy.url`` in the configuration, schema and prefix from ``-x schema=`` and
``-x prefix=`` (or ``RELAYBUS_SCHEMA``, ``RELAYBUS_PREFIX``). Started by the functions of
:mod:`alembic_relaybus`, all of it comes with their :class:`Request`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from alembic import context
from alembic.runtime.migration import MigrationInfo
from alembic.util import CommandError
from sqlalchemy import Connection, func, inspect, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.schema import CreateSchema

from alembic_relaybus.options import DEFAULT_PREFIX, Options
from sqlalchemy_relaybus.engine import describe, open_engine
from sqlalchemy_relaybus.exc import ConfigurationError, RelayBusError, SchemaError

LOCK_KEY = 0x72656C6179627573  # "relaybus"
"""The advisory lock that one migration of a database holds against others."""

LOCK_TIMEOUT = 60.0
"""Seconds to wait for another migration of the same database before giving up."""

_LOCK_POLL = 0.1

Report = Callable[[str, str], None]
"""Called with ``"upgrade"`` or ``"downgrade"`` and the revision, after each step, and with
``"create schema"`` and its name where the schema was not there."""


@dataclass(frozen=True)
class Request:
    """What the functions of :mod:`alembic_relaybus` hand to ``env.py``."""

    options: Options = field(default_factory=Options)
    connection: Connection | None = None
    lock_timeout: float = LOCK_TIMEOUT
    report: Report | None = None
    dialect: str = "postgresql"
    #: whether a schema that is not there is made
    creates: bool = True


def run() -> None:
    """Run what Alembic was asked for. Called by ``env.py`` only."""
    request = context.config.attributes.get("relaybus")
    if isinstance(request, Request):
        _run(request)
        return
    try:
        _run_from_command_line()
    except (RelayBusError, SQLAlchemyError) as error:
        raise CommandError(describe(error)) from error


def _run_from_command_line() -> None:
    given = context.get_x_argument(as_dictionary=True)

    def setting(name: str) -> str | None:
        value = given.get(name) or os.environ.get(f"RELAYBUS_{name.upper()}")
        return value if isinstance(value, str) else None

    options = Options(setting("schema"), setting("prefix") or DEFAULT_PREFIX)
    if context.is_offline_mode():
        _run(Request(options))
        return
    url = setting("url") or context.config.get_alembic_option("sqlalchemy.url")
    if not url:
        raise ConfigurationError(
            "no database given: set RELAYBUS_URL or use -x url=URL, for example "
            "alembic -x url=postgresql+psycopg://user@host/database upgrade head"
        )
    engine = open_engine(url)
    require_dialect(engine.dialect.name)  # before SQLite makes a file
    try:
        with engine.connect() as connection:
            _run(Request(options, connection, report=_print))
    finally:
        engine.dispose()


def _print(what: str, name: str) -> None:
    context.config.print_stdout(f"relaybus: {what} {name}")


def _run(request: Request) -> None:
    connection, options = request.connection, request.options
    dialect = request.dialect if connection is None else connection.dialect.name
    require_dialect(dialect)

    def applied(step: MigrationInfo, **_: Any) -> None:
        if request.report is not None and not step.is_stamp:
            direction = "upgrade" if step.is_upgrade else "downgrade"
            for revision in step.up_revision_ids:
                request.report(direction, revision)

    common: dict[str, Any] = {
        "version_table": options.version_table,
        "version_table_schema": options.schema,
        "on_version_apply": applied,
        "relaybus_options": options,
    }
    if connection is None:
        context.configure(
            dialect_name=dialect,
            literal_binds=True,
            dialect_opts={"paramstyle": "named"},
            **common,
        )
        with context.begin_transaction():
            # one script, run by one client: it may simply wait
            context.execute(f"SELECT pg_advisory_xact_lock({LOCK_KEY})")
            if options.schema is not None:
                context.execute(CreateSchema(options.schema, if_not_exists=True))
            context.run_migrations()
        return
    if getattr(connection.connection.dbapi_connection, "autocommit", False):
        raise ConfigurationError(
            "the connection is in autocommit mode, in which a migration that fails half way "
            "stays half done; give one of an engine without isolation_level='AUTOCOMMIT'"
        )
    context.configure(connection=connection, **common)
    with context.begin_transaction():
        _lock(connection, request.lock_timeout)
        _require_schema(connection, request)
        _refuse_unknown_revision()
        _refuse_tables_of_others(connection, options)
        context.run_migrations()


def require_dialect(name: str) -> None:
    """Raise ``ConfigurationError`` for a database that the revisions do not know."""
    if name != "postgresql":
        raise ConfigurationError(
            f"the migrations know PostgreSQL, not {name!r}; use a URL that begins "
            "postgresql+psycopg://"
        )


def _require_schema(connection: Connection, request: Request) -> None:
    """Make the schema if it is not there, and tell: its name may have been misspelled."""
    schema = request.options.schema
    # not IF NOT EXISTS: that needs the privilege to create even where the schema exists
    if schema is None or inspect(connection).has_schema(schema):
        return
    if not request.creates or context.get_context().opts.get("dont_mutate"):  # alembic current
        raise SchemaError(f"the database has no schema {schema!r}")
    connection.execute(CreateSchema(schema))
    if request.report is not None:
        request.report("create schema", schema)


def _lock(connection: Connection, timeout: float) -> None:
    """Keep other migrations of this database out until the transaction ends.

    Polled, because a session that waits for a lock holds a snapshot, and an index built
    concurrently by the holder would wait for that in turn.
    """
    deadline = time.monotonic() + timeout
    while not connection.scalar(select(func.pg_try_advisory_xact_lock(LOCK_KEY))):
        if time.monotonic() >= deadline:
            raise SchemaError(
                f"another migration of this database has been running for {timeout:g} s; wait "
                "for its end and try again"
            )
        time.sleep(_LOCK_POLL)


def _refuse_tables_of_others(connection: Connection, options: Options) -> None:
    if context.get_context().get_current_heads():
        return
    if inspect(connection).has_table(options.name("schema_version"), schema=options.schema):
        raise SchemaError(
            f"the tables are there, but no {options.version_table}: revisions of the application "
            "made them, and those have to migrate them"
        )


def _refuse_unknown_revision() -> None:
    known = {script.revision for script in context.script.walk_revisions()}
    for revision in context.get_context().get_current_heads():
        if revision not in known:
            raise SchemaError(
                f"the database is at revision {revision!r}, which this release does not know; "
                "install the newer sqlalchemy-relaybus that made it"
            )
