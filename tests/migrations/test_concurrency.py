"""Several migrations at once, and migrations inside the caller's transaction."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Engine, func, inspect, select, text

import alembic_relaybus
from alembic_relaybus.environment import LOCK_KEY
from sqlalchemy_relaybus.exc import ConfigurationError, SchemaError


def test_two_processes_at_once(empty_engine: Engine, empty_database_url: str) -> None:
    command = [sys.executable, "-m", "sqlalchemy_relaybus", "migrate", "upgrade"]
    environment = {**os.environ, "RELAYBUS_URL": empty_database_url}
    with empty_engine.begin() as holder:
        # both wait for the lock before either can begin
        holder.execute(select(func.pg_advisory_xact_lock(LOCK_KEY)))
        running = [
            subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for _ in range(2)
        ]
        wait_for_sessions(empty_engine, 2)
    output = [process.communicate(timeout=60)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], output
    assert sorted(text_.count("upgrade ") for text_ in output) == [0, 2]
    with empty_engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM relaybus_lanes")) == 256


def wait_for_sessions(engine: Engine, count: int) -> None:
    """Until *count* sessions of others have asked for the lock."""
    asked = text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
        "AND pid <> pg_backend_pid() AND query LIKE '%pg_try_advisory_xact_lock%'"
    )
    pause = threading.Event()
    for _ in range(600):
        with engine.connect() as connection:
            if connection.scalar(asked) == count:
                return
        pause.wait(0.05)
    raise AssertionError("nobody waited for the lock")


def test_repeated_by_many_threads(empty_engine: Engine) -> None:
    steps: list[str] = []
    with ThreadPoolExecutor(4) as threads:
        runs = [
            threads.submit(
                alembic_relaybus.migrate,
                empty_engine,
                report=lambda _, revision: steps.append(revision),
            )
            for _ in range(4)
        ]
        for run in runs:
            run.result(60)
    assert steps == ["relaybus_0001", "relaybus_0002"]


def test_gives_up_when_another_migration_takes_too_long(empty_engine: Engine) -> None:
    with empty_engine.begin() as holder:
        holder.execute(select(func.pg_advisory_xact_lock(LOCK_KEY)))
        with pytest.raises(SchemaError, match=r"another migration .* running for 0.2 s"):
            alembic_relaybus.migrate(empty_engine, lock_timeout=0.2)
    alembic_relaybus.migrate(empty_engine, lock_timeout=0)


def test_inside_the_callers_transaction(empty_engine: Engine) -> None:
    with empty_engine.connect() as connection:
        transaction = connection.begin()
        alembic_relaybus.upgrade(connection)
        assert alembic_relaybus.current(connection) == "relaybus_0002"
        assert transaction.is_active
        transaction.rollback()
        assert inspect(connection).get_table_names() == []


def test_autocommit_is_refused(empty_engine: Engine) -> None:
    with empty_engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT")
        with pytest.raises(ConfigurationError, match="autocommit"):
            alembic_relaybus.upgrade(connection)


def test_migrate_on_an_autocommit_engine(empty_engine: Engine) -> None:
    alembic_relaybus.migrate(empty_engine.execution_options(isolation_level="AUTOCOMMIT"))
    with empty_engine.connect() as connection:
        assert alembic_relaybus.current(connection) == "relaybus_0002"


def test_schema_that_exists_needs_no_right_to_create_it(empty_engine: Engine) -> None:
    with empty_engine.begin() as connection:
        connection.execute(text("CREATE ROLE relaybus_plain LOGIN"))
    try:
        with empty_engine.begin() as connection:
            connection.execute(text("CREATE SCHEMA shop AUTHORIZATION relaybus_plain"))
            connection.execute(text("SET LOCAL ROLE relaybus_plain"))
            alembic_relaybus.upgrade(connection, schema="shop")
    finally:
        with empty_engine.begin() as connection:
            connection.execute(text("DROP OWNED BY relaybus_plain CASCADE"))
            connection.execute(text("DROP ROLE relaybus_plain"))
