"""Fixtures for every test: one server a session, one database a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine

from sqlalchemy_relaybus.testing.server import PostgresServer
from tests.support.databases import migrated_template, open_engine, scratch_database, test_server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what runs the application in processes of its own."""
    for item in items:
        if "app" in getattr(item, "fixturenames", ()):
            item.add_marker("processes")


@pytest.fixture(scope="session")
def server() -> Iterator[PostgresServer]:
    """The PostgreSQL server of this run."""
    with test_server() as server:
        yield server


@pytest.fixture(scope="session")
def template_database(server: PostgresServer) -> Iterator[str]:
    """The name of a database with the newest tables, to be copied, never connected to."""
    with migrated_template(server) as name:
        yield name


@pytest.fixture
def database_url(server: PostgresServer, template_database: str) -> Iterator[str]:
    """The URL of a database of the test's own, with the newest tables and nothing in them."""
    with scratch_database(server, template_database) as name:
        yield server.url(name)


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    """An engine on ``database_url``."""
    with open_engine(database_url) as engine:
        yield engine


@pytest.fixture
def empty_database_url(server: PostgresServer) -> Iterator[str]:
    """The URL of a database of the test's own with no tables at all."""
    with scratch_database(server) as name:
        yield server.url(name)


@pytest.fixture
def empty_engine(empty_database_url: str) -> Iterator[Engine]:
    """An engine on ``empty_database_url``."""
    with open_engine(empty_database_url) as engine:
        yield engine
