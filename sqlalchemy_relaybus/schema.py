"""Whether a database's tables fit this release: asked by workers and commands at their start, and
by workers again when the database has failed."""

from __future__ import annotations

import shlex

from sqlalchemy import Connection, func, inspect, select

from sqlalchemy_relaybus.exc import SchemaMissingError, SchemaVersionError
from sqlalchemy_relaybus.tables import DEFAULT_PREFIX, SCHEMA_VERSION, Tables


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


def _where(tables: Tables) -> str:
    where = ""
    if tables.schema is not None:
        where += f" --schema {shlex.quote(tables.schema)}"
    if tables.prefix != DEFAULT_PREFIX:
        where += f" --prefix {shlex.quote(tables.prefix)}"
    return where
