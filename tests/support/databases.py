"""The server that the tests use, and databases on it.

``TEST_DATABASE_URL`` names a server on which databases may be created, as a superuser; without it
a private one is started.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Engine, create_engine

import alembic_relaybus
from sqlalchemy_relaybus.testing.server import PostgresServer, PrivatePostgres, private_postgres

# As a production server where it matters to the tests (WAL contents, plans), but for the disk:
# nothing here survives a crash anyway. Tests of crashes start a server of their own.
SETTINGS = {
    "fsync": "off",
    "wal_level": "replica",
    "max_connections": "200",
    "shared_buffers": "128MB",
    "max_wal_size": "4GB",
    "checkpoint_timeout": "1h",
    "jit": "off",
}

#: Each test makes and drops a database of 300 files, and a disk's file system may look long for an
#: unused inode among those just given back: up to half of the time of a run.
_MEMORY = Path("/dev/shm")
_ENOUGH = 6 << 30

_counter = itertools.count()


def server_in_memory() -> PrivatePostgres:
    """Start a private server whose files are in memory, where there is enough of it for files."""
    in_memory = os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _ENOUGH
    return private_postgres(SETTINGS, _MEMORY if in_memory else None)


@contextmanager
def test_server() -> Iterator[PostgresServer]:
    """The server for the length of the block."""
    if url := os.environ.get("TEST_DATABASE_URL"):
        yield PostgresServer(url)
        return
    with server_in_memory() as server:
        yield server


@contextmanager
def scratch_database(server: PostgresServer, template: str | None = None) -> Iterator[str]:
    """A new database for the length of the block; its name."""
    name = f"relaybus_test_{os.getpid()}_{next(_counter)}"
    server.create_database(name, template)
    try:
        yield name
    finally:
        server.drop_database(name)


@contextmanager
def migrated_template(server: PostgresServer) -> Iterator[str]:
    """The name of a migrated database, with nobody connected to it, to be copied."""
    with scratch_database(server) as name:
        with open_engine(server.url(name)) as engine:
            alembic_relaybus.migrate(engine)
        yield name


@contextmanager
def open_engine(url: str) -> Iterator[Engine]:
    """An engine for the length of the block."""
    engine = create_engine(url)
    try:
        yield engine
    finally:
        engine.dispose()
