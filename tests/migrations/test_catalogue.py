"""The revisions give exactly the tables that the metadata describes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.schema import CreateSchema

import alembic_relaybus
from sqlalchemy_relaybus.tables import DEFAULT_PREFIX, tables_for
from sqlalchemy_relaybus.testing.server import PostgresServer
from tests.support.catalogue import catalogue
from tests.support.databases import open_engine, scratch_database

WHERE = [
    pytest.param(None, DEFAULT_PREFIX, id="default"),
    pytest.param("shop", "bus_", id="schema-and-prefix"),
    pytest.param("Wei\"rd: 100% 's", "Pre{0}:a %(x)s'", id="names-to-be-quoted"),
    pytest.param(None, "", id="no-prefix"),
]


@pytest.fixture
def other_engine(server: PostgresServer) -> Iterator[Engine]:
    with scratch_database(server) as name, open_engine(server.url(name)) as engine:
        yield engine


def from_metadata(
    engine: Engine, schema: str | None, prefix: str
) -> dict[str, list[tuple[Any, ...]]]:
    with engine.begin() as connection:
        if schema is not None:
            connection.execute(CreateSchema(schema))
        tables_for(schema, prefix).metadata.create_all(connection)
    with engine.connect() as connection:
        return catalogue(connection, schema or "public", prefix)


@pytest.mark.parametrize(("schema", "prefix"), WHERE)
def test_migrated_equals_metadata(
    empty_engine: Engine, other_engine: Engine, schema: str | None, prefix: str
) -> None:
    alembic_relaybus.migrate(empty_engine, schema=schema, prefix=prefix)
    with empty_engine.connect() as connection:
        migrated = catalogue(connection, schema or "public", prefix)
    assert migrated == from_metadata(other_engine, schema, prefix)
    assert len(migrated["relations"]) > 15


def test_migrated_down_and_up_equals_metadata(empty_engine: Engine, other_engine: Engine) -> None:
    alembic_relaybus.migrate(empty_engine)
    with empty_engine.connect() as connection:
        alembic_relaybus.downgrade(connection, "relaybus_0001")
    alembic_relaybus.migrate(empty_engine)
    with empty_engine.connect() as connection:
        migrated = catalogue(connection, "public", DEFAULT_PREFIX)
    assert migrated == from_metadata(other_engine, None, DEFAULT_PREFIX)


def test_downgraded_equals_0_1(empty_engine: Engine, other_engine: Engine) -> None:
    alembic_relaybus.migrate(empty_engine, "relaybus_0001")
    alembic_relaybus.migrate(other_engine)
    with other_engine.connect() as connection:
        alembic_relaybus.downgrade(connection, "relaybus_0001")
    with empty_engine.connect() as fresh, other_engine.connect() as downgraded:
        assert catalogue(fresh, "public", DEFAULT_PREFIX) == catalogue(
            downgraded, "public", DEFAULT_PREFIX
        )


@pytest.mark.parametrize(("schema", "prefix"), WHERE)
def test_base_leaves_nothing(empty_engine: Engine, schema: str | None, prefix: str) -> None:
    alembic_relaybus.migrate(empty_engine, schema=schema, prefix=prefix)
    with empty_engine.connect() as connection:
        alembic_relaybus.downgrade(connection, "base", schema=schema, prefix=prefix)
        connection.rollback()
        left = catalogue(connection, schema or "public", prefix)
    assert not any(left.values())


@pytest.mark.parametrize(("schema", "prefix"), WHERE)
def test_script_equals_online(
    empty_engine: Engine, other_engine: Engine, schema: str | None, prefix: str
) -> None:
    alembic_relaybus.migrate(empty_engine, schema=schema, prefix=prefix)
    script = alembic_relaybus.upgrade_sql(schema=schema, prefix=prefix)
    with other_engine.connect() as connection:
        cursor = connection.connection.cursor()
        cursor.execute(script.encode())
        connection.connection.commit()
    with empty_engine.connect() as online, other_engine.connect() as offline:
        assert catalogue(online, schema or "public", prefix) == catalogue(
            offline, schema or "public", prefix
        )
        assert alembic_relaybus.current(offline, schema=schema, prefix=prefix) == (
            alembic_relaybus.head()
        )


def test_two_prefixes_in_one_schema(empty_engine: Engine) -> None:
    alembic_relaybus.migrate(empty_engine, prefix="one_")
    alembic_relaybus.migrate(empty_engine, prefix="two_")
    with empty_engine.connect() as connection:
        alembic_relaybus.downgrade(connection, "base", prefix="one_")
        assert alembic_relaybus.current(connection, prefix="two_") == "relaybus_0002"
        assert connection.scalar(text("SELECT count(*) FROM two_lanes")) == 256
