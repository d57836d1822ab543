"""Where a store is tested: a bed gives it a database, connections and a clock that is moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol
from uuid import UUID

import pytest
from sqlalchemy import Connection, Engine, create_engine, text

from sqlalchemy_relaybus.stores import store_for
from sqlalchemy_relaybus.stores.base import Store, Suspect
from sqlalchemy_relaybus.tables import DEFAULT_PREFIX, tables_for

from .contents import Contents, LaneRow, ParkedRow, Row, StoredEvent, SuspectRow


class Bed(Protocol):
    """What the machine needs of a store's surroundings."""

    store: Store

    def begin(self) -> None:
        """Empty the store and set its clock to 0."""

    def connect(self, *, autocommit: bool) -> AbstractContextManager[Connection]:
        """A connection of its own, on which no lock is waited for endlessly."""

    def set_clock(self, seconds: float) -> None:
        """Let the store's clock show *seconds*.

        It may run on from there by itself: the machine sets it to whole minutes and lets
        everything last half a minute more or less.
        """

    def contents(self) -> Contents:
        """What is committed now, its times rounded to half minutes."""


#: How long anything waits for a lock, seconds. Nothing should: all is done in one thread.
LOCK_TIMEOUT = 2.0


class PostgreSQLBed:
    """A scratch database whose sessions read the time from a table.

    ``statement_timestamp()`` and ``clock_timestamp()`` are found in a schema in front of
    ``pg_catalog``. Column defaults were resolved when the tables were made, and are made anew.
    """

    def __init__(self, engine: Engine) -> None:
        self.tables = tables_for(None, DEFAULT_PREFIX)
        self.store = store_for("postgresql", self.tables)
        with engine.begin() as connection:
            connection.exec_driver_sql(_CLOCK)
            for table in self.tables.metadata.tables.values():
                for column in table.columns:
                    default: Any = column.server_default
                    if "clock_timestamp()" in str(getattr(default, "arg", "")):
                        connection.exec_driver_sql(
                            f"ALTER TABLE {table.name} ALTER COLUMN {column.name} "
                            "SET DEFAULT clock.clock_timestamp()"
                        )
        self._engine = create_engine(
            engine.url,
            connect_args={"options": "-c search_path=clock,pg_catalog,public"},
            pool_size=20,
        )
        self._idle: dict[bool, list[Connection]] = {True: [], False: []}
        self._watcher = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")

    def close(self) -> None:
        for connection in [self._watcher, *self._idle[True], *self._idle[False]]:
            connection.close()
        self._engine.dispose()

    def begin(self) -> None:
        self._watcher.exec_driver_sql(_RESET)

    @contextmanager
    def connect(self, *, autocommit: bool) -> Iterator[Connection]:
        idle = self._idle[autocommit]
        connection = idle.pop() if idle else self._connect(autocommit)
        try:
            yield connection
        finally:
            connection.rollback()
            idle.append(connection)

    def _connect(self, autocommit: bool) -> Connection:
        connection = self._engine.connect()
        self.store.prepare(connection, lock_timeout=LOCK_TIMEOUT, timeout=10 * LOCK_TIMEOUT)
        connection.commit()
        level: Any = "AUTOCOMMIT" if autocommit else "READ COMMITTED"
        return connection.execution_options(isolation_level=level)

    def set_clock(self, seconds: float) -> None:
        self._watcher.execute(
            text("UPDATE clock.face SET reading = timestamptz 'epoch' + make_interval(secs => :s)"),
            {"s": seconds},
        )

    def contents(self) -> Contents:
        [(events, ready, parked, lanes, suspects)] = self._watcher.exec_driver_sql(_CONTENTS)
        return Contents(
            events={
                UUID(id): StoredEvent(key, sequence, frozenset(handlers), created)
                for id, key, sequence, handlers, created in events
            },
            ready={id: _row(*rest) for id, *rest in ready},
            parked={
                id: ParkedRow(_row(*rest), status, due, blocks, since)
                for id, *rest, status, due, blocks, since in parked
            },
            lanes={
                lane: LaneRow(
                    epoch,
                    version,
                    holder and UUID(holder),
                    until,
                    company,
                    frozenset(started),
                    frozenset(prefetched),
                )
                for lane, epoch, version, holder, until, company, started, prefetched in lanes
            },
            suspects={
                id: SuspectRow(lane, Suspect(crashes, company))
                for id, lane, crashes, company in suspects
            },
        )


def _row(lane: int, event: str, handler: str, key: str | None, attempts: int, claims: int) -> Row:
    return Row(lane, UUID(event), handler, key, attempts, claims)


def _all(table: str, *columns: str) -> str:
    """A subquery: the rows of *table* as JSON."""
    rows = f"json_agg(json_build_array({', '.join(columns)}))"
    return f"(SELECT coalesce({rows}, '[]') FROM {DEFAULT_PREFIX}{table})"


def _seconds(column: str) -> str:
    return f"extract(epoch FROM {column})::float"


_DELIVERY = ("id", "lane", "event_id", "handler", "key", "attempts", "claims")
# in one statement: this is done after every step
_CONTENTS = "SELECT " + ", ".join(
    [
        _all("events", "id", "key", "sequence", "handlers", _seconds("created_at")),
        _all("deliveries", *_DELIVERY),
        _all(
            "parked",
            *_DELIVERY,
            "status",
            _seconds("available_at"),
            "blocks",
            _seconds("parked_at"),
        ),
        _all(
            "lanes WHERE epoch > 0",
            "lane",
            "epoch",
            "version",
            "holder",
            _seconds("lease_expires_at"),
            "company",
            "started",
            "prefetched",
        ),
        _all("suspects", "id", "lane", "crashes", "company"),
    ]
)

_CLOCK = """
CREATE SCHEMA clock;
CREATE TABLE clock.face (reading timestamptz NOT NULL);
INSERT INTO clock.face VALUES ('epoch');
CREATE FUNCTION clock.statement_timestamp() RETURNS timestamptz LANGUAGE sql STABLE
  AS 'SELECT reading FROM clock.face';
CREATE FUNCTION clock.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE
  AS 'SELECT reading FROM clock.face';
"""
# DELETE and not TRUNCATE, which makes new files
_RESET = """
DELETE FROM relaybus_events;
DELETE FROM relaybus_deliveries;
DELETE FROM relaybus_parked;
DELETE FROM relaybus_suspects;
DELETE FROM relaybus_keys;
DELETE FROM relaybus_workers;
UPDATE relaybus_lanes SET epoch = 0, version = 0, holder = NULL, lease_expires_at = NULL,
  company = 0, started = '{}', prefetched = '{}' WHERE epoch > 0;
UPDATE clock.face SET reading = 'epoch';
SELECT setval('relaybus_deliveries_id_seq', 1, false);
"""


@contextmanager
def _postgresql(request: pytest.FixtureRequest) -> Iterator[Bed]:
    bed = PostgreSQLBed(request.getfixturevalue("engine"))
    try:
        yield bed
    finally:
        bed.close()


#: The stores there are: each makes a bed, from the fixtures that it needs.
BEDS: dict[str, Callable[[pytest.FixtureRequest], AbstractContextManager[Bed]]] = {
    "postgresql": _postgresql,
}
