"""Whether a database's tables fit this release: asked by workers and commands at their start."""

from __future__ import annotations

from sqlalchemy import Connection, func, inspect, select

from sqlalchemy_relaybus.exc import SchemaMissingError, SchemaVersionError
from sqlalchemy_relaybus.tables import SCHEMA_VERSION, Tables


def check_schema(connection: Connection, tables: Tables) -> None:
    """Raise unless the database has *tables* in the version that this release works with.

    ``SchemaMissingError`` where they are not there, ``SchemaVersionError`` where they are older or
    newer. The version is read from a table of the library's own, since Alembic's does not name
    its revisions when the application's project runs them.
    """
    table = tables.schema_version
    # asked first: a statement on a missing table would end the caller's transaction
    if not inspect(connection).has_table(table.name, schema=table.schema):
        raise SchemaMissingError(table.fullname)
    found = connection.scalar(select(func.max(table.c.version)))
    if found is None:
        raise SchemaMissingError(table.fullname)
    if found != SCHEMA_VERSION:
        raise SchemaVersionError(found, SCHEMA_VERSION)
