"""Whether a database's tables fit this release: asked by workers and commands at their start, and
by workers again when one is missing."""

from __future__ import annotations

import shlex

from sqlalchemy import Connection, Engine, event, func, inspect, select
from sqlalchemy.engine import ExceptionContext

from sqlalchemy_relaybus.exc import SchemaMissingError, SchemaVersionError
from sqlalchemy_relaybus.tables import DEFAULT_PREFIX, SCHEMA_VERSION, Tables

#: SQLSTATEs of a statement on a table or column that does not exist.
_UNDEFINED = frozenset({"42P01", "42703"})


def check_schema(connection: Connection, tables: Tables) -> None:
    """Raise unless the database has *tables* in the version that this release works with.

    ``SchemaMissingError`` where they are not there, ``SchemaVersionError`` where they are older or
    newer. The version is read from a table of the library's own, since Alembic's does not name
    its revisions when the application's project runs them.
    """
    table, where = tables.schema_version, _where(tables)
    # asked first: a statement on a missing table would end the caller's transaction
    if not inspect(connection).has_table(table.name, schema=table.schema):
        raise SchemaMissingError(table.fullname, where)
    found = connection.scalar(select(func.max(table.c.version)))
    if found is None:
        raise SchemaMissingError(table.fullname, where)
    if found != SCHEMA_VERSION:
        raise SchemaVersionError(found, SCHEMA_VERSION, where)


def check_schema_when_undefined(engine: Engine, tables: Tables) -> None:
    """Let :func:`check_schema` speak for statements that find a table or column missing.

    So whoever tries again after errors of the database does not do so for ever where only a
    migration helps. Where the check finds nothing, the error is the database's as before.
    """

    @event.listens_for(engine, "handle_error")
    def check(context: ExceptionContext) -> None:
        if getattr(context.original_exception, "sqlstate", None) in _UNDEFINED:
            with engine.connect() as connection:  # the other one may be in a failed transaction
                check_schema(connection, tables)


def _where(tables: Tables) -> str:
    where = ""
    if tables.schema is not None:
        where += f" --schema {shlex.quote(tables.schema)}"
    if tables.prefix != DEFAULT_PREFIX:
        where += f" --prefix {shlex.quote(tables.prefix)}"
    return where
