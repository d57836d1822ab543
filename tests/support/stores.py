"""A store on a real database, driven statement by statement and connection by connection."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, Self, TypeVar
from uuid import UUID, uuid4

from sqlalchemy import Connection, Engine, Select, func, select, text, update
from sqlalchemy.exc import DBAPIError

from sqlalchemy_relaybus.codec import new_event_id
from sqlalchemy_relaybus.event import Event
from sqlalchemy_relaybus.lanes import lane_of
from sqlalchemy_relaybus.stores import store_for
from sqlalchemy_relaybus.stores.base import (
    Delivery,
    Exchange,
    Exchanged,
    LaneRequest,
    Lease,
    NewEvent,
    Pair,
    Park,
    ParkedStatus,
    Suspect,
    Taken,
)
from sqlalchemy_relaybus.stores.postgresql.lanes import take
from sqlalchemy_relaybus.stores.postgresql.sql import array_literal
from sqlalchemy_relaybus.stores.postgresql.store import RowHint
from sqlalchemy_relaybus.tables import DEFAULT_PREFIX, tables_for

T = TypeVar("T")

#: A lease that has run out as soon as it is written: nothing has to wait for the clock.
EXPIRED = -3600.0
#: Seconds after which a statement that waits for a lock fails, unless told otherwise.
LOCK_TIMEOUT = 20.0
STATEMENT_TIMEOUT = 60.0
_GATE = 7_265_761


def keys_on(lane: int) -> Iterator[str]:
    """Ordering keys of *lane*, always the same ones."""
    return (key for n in itertools.count() if lane_of(key := f"key-{n}") == lane)


def key_on(lane: int, n: int = 0) -> str:
    """The *n*th ordering key of *lane*."""
    return next(itertools.islice(keys_on(lane), n, None))


def new_event(
    key: str | None = None,
    *,
    handlers: Sequence[str] = ("a",),
    id: UUID | None = None,
    delay: float | None = None,
    payload: str = "{}",
) -> NewEvent:
    """An event as the bus hands it to the store."""
    event = Event(id or new_event_id(), "test.happened", payload, key)
    return NewEvent(event, handlers, delay, given_id=id is not None)


def parked(
    delivery: Delivery,
    status: ParkedStatus = "retrying",
    *,
    delay: float | None = 3600,
    charge: int = 1,
    blocks: bool = True,
) -> Park:
    """How a failed delivery is parked."""
    return Park(delivery, status, delay, charge, "it failed", blocks)


class Bench:
    """A migrated database, the store on it, and connections that are closed in the end."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tables = tables_for(None, DEFAULT_PREFIX)
        self.store = store_for("postgresql", self.tables)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def connect(self, isolation: Any = "READ COMMITTED") -> Connection:
        """A connection of its own, on which no lock is waited for endlessly."""
        connection = self._stack.enter_context(self.engine.connect())
        connection.execute(text(f"SET lock_timeout = '{LOCK_TIMEOUT:g}s'"))
        connection.commit()
        return connection.execution_options(isolation_level=isolation)

    def holder(self, *handlers: str) -> Holder:
        """A worker process that handles *handlers* (by default ``a`` and ``b``)."""
        return Holder(self, handlers or ("a", "b"))

    def publish(self, *events: NewEvent) -> None:
        """Publish in one flush and commit."""
        with self.engine.begin() as connection:
            self.store.publish(connection, events)

    def read(self, statement: Select[Any]) -> list[tuple[Any, ...]]:
        """What is committed now."""
        with self.engine.connect() as connection:
            return [tuple(row) for row in connection.execute(statement)]

    def deliveries(self) -> list[int]:
        """The ids of the deliveries that are ready or running, in order."""
        return [id for (id,) in self.read(select(self.tables.deliveries.c.id).order_by("id"))]

    def parked(self) -> list[int]:
        """The ids of the parked deliveries, in order."""
        return [id for (id,) in self.read(select(self.tables.parked.c.id).order_by("id"))]

    def events(self) -> list[tuple[Any, ...]]:
        """Id and handlers of every event."""
        return self.read(select(self.tables.events.c.id, self.tables.events.c.handlers))

    def handlers_of(self, id: UUID) -> list[str]:
        """The handlers of the deliveries of event *id*, in the order of the deliveries."""
        table = self.tables.deliveries
        query = select(table.c.handler).where(table.c.event_id == id).order_by(table.c.id)
        return [handler for (handler,) in self.read(query)]

    def unhandled(self) -> list[tuple[int, str]]:
        """Id and handler of the deliveries that are set aside since no worker has their handler."""
        table = self.tables.parked
        query = select(table.c.id, table.c.handler).where(table.c.status == "unhandled")
        return [(id, handler) for id, handler in self.read(query.order_by(table.c.id))]

    def suspects(self) -> dict[int, Suspect]:
        """The suspects by id."""
        suspects = self.tables.suspects
        query = select(suspects.c.id, suspects.c.crashes, suspects.c.company).order_by("id")
        return {id: Suspect(crashes, company) for id, crashes, company in self.read(query)}

    def lane(self, lane: int) -> Any:
        """The lane's row."""
        lanes = self.tables.lanes
        with self.engine.connect() as connection:
            return connection.execute(select(lanes).where(lanes.c.lane == lane)).one()

    def contents(self) -> dict[str, list[str]]:
        """Every row that a worker's writes change, with its physical address."""
        return {
            table.name: [
                str(row)
                for row in self.read(select(text("ctid::text, xmin::text"), table).order_by("lane"))
            ]
            for table in (
                self.tables.deliveries,
                self.tables.parked,
                self.tables.lanes,
                self.tables.suspects,
            )
        }

    def lock_lane(self, connection: Connection, lane: int, strength: str = "UPDATE") -> None:
        """Lock the lane's row as somebody else would, until *connection* ends its transaction."""
        connection.execute(
            text(f"SELECT FROM {self.tables.lanes.name} WHERE lane = :lane FOR {strength}"),
            {"lane": lane},
        )

    def lock_delivery(self, connection: Connection, id: int) -> None:
        """Lock a delivery's row as somebody else would."""
        deliveries = self.tables.deliveries
        connection.execute(select(deliveries.c.id).where(deliveries.c.id == id).with_for_update())

    def lock_parked(self, connection: Connection, id: int) -> None:
        """Lock a parked row as somebody else would."""
        parked = self.tables.parked
        connection.execute(select(parked.c.id).where(parked.c.id == id).with_for_update())

    @contextmanager
    def gate(self, connection: Connection) -> Iterator[Connection]:
        """Stop *connection*'s statements where they read the clock, thus after their snapshot.

        Gives the connection that keeps the gate closed: its rollback opens the gate.
        """
        # volatile: a stable function is called by the planner too, before the snapshot
        with self.engine.begin() as setup:
            setup.execute(text("CREATE SCHEMA gate"))
            setup.execute(
                text(
                    f"""
                    CREATE FUNCTION gate.statement_timestamp() RETURNS timestamptz
                    LANGUAGE plpgsql VOLATILE AS $$ BEGIN
                      PERFORM pg_advisory_xact_lock_shared({_GATE});
                      RETURN pg_catalog.statement_timestamp();
                    END $$
                    """
                )
            )
        connection.execute(text("SET search_path = gate, pg_catalog, public"))
        connection.commit()
        keeper = self.connect()
        keeper.execute(select(func.pg_advisory_xact_lock(_GATE)))
        yield keeper


class Holder:
    """A worker's side of the store without its loops: what it believes of its lanes."""

    def __init__(self, bench: Bench, handlers: Sequence[str]) -> None:
        self.id = uuid4()
        self.bench = bench
        self.handlers = handlers
        self.leases: dict[int, Lease] = {}
        #: for single statements, and for the takeover's transaction
        self.connection = bench.connect("AUTOCOMMIT")
        self.taker = bench.connect()
        for connection in (self.connection, self.taker):
            bench.store.prepare(connection, lock_timeout=LOCK_TIMEOUT, timeout=STATEMENT_TIMEOUT)
            connection.commit()

    def place(self, lane: int) -> RowHint:
        """Where it believes the lane's row to be."""
        hint = self.leases[lane].hint
        assert isinstance(hint, RowHint)
        return hint

    def take(self, *lanes: int, limit: int = 256, lease: float = 60) -> dict[int, Taken]:
        """Take what is free of *lanes*."""
        taken = self.bench.store.take(self.taker, self.id, lanes, limit, lease)
        self.leases.update({each.lease.lane: each.lease for each in taken})
        return {each.lease.lane: each for each in taken}

    def expire(self, lane: int) -> None:
        """Let its lease on the lane run out."""
        lanes = self.bench.tables.lanes
        with self.bench.engine.begin() as connection:
            connection.execute(
                update(lanes)
                .where(lanes.c.lane == lane, lanes.c.holder == self.id)
                .values(lease_expires_at=func.clock_timestamp() - timedelta(seconds=1))
            )

    def begin_take(self, connection: Connection, lane: int) -> None:
        """The takeover's first statement, in a transaction that is left open."""
        parameters = {
            "lanes": array_literal([lane]),
            "limit": 1,
            "holder": self.id,
            "lease_duration": 60.0,
        }
        take(self.bench.tables)(connection, parameters)

    def exchange(
        self,
        *lanes: int,
        finished: Sequence[Delivery] = (),
        started: Sequence[Delivery] = (),
        prefetched: Sequence[Delivery] = (),
        claim: bool = True,
        write: bool = True,
        limit: int = 1000,
        per_lane: int = 1000,
        room: int = 1000,
        lease: float = 60,
        company: int | None = None,
        careful: bool = False,
    ) -> Exchanged:
        """One round of the pump over *lanes* (by default all)."""
        request = Exchange(
            [LaneRequest(self.leases[lane], claim, write) for lane in lanes or self.leases],
            finished,
            started,
            prefetched,
            self.handlers,
            limit,
            per_lane,
            room,
            lease,
            min(room, limit) + len(started) if company is None else company,
            careful,
        )
        reply = self.bench.store.exchange(self.connection, self.id, request)
        self.leases.update(reply.leases)
        return reply

    def claim(self, lease: float = 60) -> list[Delivery]:
        """Claim all there is, to run it."""
        return self.exchange(lease=lease).startable

    def complete(self, delivery: Delivery, connection: Connection | None = None) -> bool:
        """Complete in the transaction of *connection*; without one, at once."""
        return self.bench.store.complete(connection or self.connection, self.id, delivery)

    def park(self, *parks: Park) -> set[int]:
        """Park; the ids that were."""
        return self.bench.store.park(self.connection, self.id, parks).parked

    def absolve(self, *deliveries: Delivery) -> None:
        """Tell that they have ended."""
        self.bench.store.absolve(self.connection, self.id, deliveries)

    def survived(self, *deliveries: Delivery) -> None:
        """Tell that it lives, although their lanes were taken over."""
        self.bench.store.survived(self.connection, deliveries)

    def renew(self, lease: float = 60) -> set[int]:
        """Renew the leases and do nothing else; the lanes that it has still."""
        leases = list(self.leases.values())
        renewed = self.bench.store.renew(self.connection, self.id, leases, lease)
        self.leases.update(renewed)
        return set(renewed)

    def relinquish(self, connection: Connection | None = None) -> set[int]:
        """Hand all lanes back; those that were."""
        leases = list(self.leases.values())
        return self.bench.store.relinquish(connection or self.connection, self.id, leases)

    def set_aside(self, limit: int = 1000) -> int:
        """Set aside what it has no handler for; how many were."""
        leases = list(self.leases.values())
        known = list(self.handlers)
        return self.bench.store.set_aside(self.connection, self.id, leases, known, limit)

    def hold_back(
        self, *, beyond: int = 0, limit: int = 1000, parking: Sequence[str] = ()
    ) -> set[tuple[int, Pair]]:
        """Set followers of blocked keys aside; those of which there were some."""
        return self.bench.store.hold_back(
            self.connection,
            self.id,
            list(self.leases.values()),
            parking=parking,
            beyond=beyond,
            limit=limit,
        )

    def thin_out(
        self, hot: Iterable[tuple[int, Pair]], kept: Sequence[Delivery] = (), limit: int = 1000
    ) -> set[tuple[int, Pair]]:
        """Set deliveries of hot keys aside; those of which there were some."""
        return self.bench.store.thin_out(
            self.connection,
            self.id,
            list(self.leases.values()),
            hot=set(hot),
            kept=kept,
            limit=limit,
        )

    def promote(self) -> list[int]:
        """Move what is due of all lanes back to the ready ones."""
        return self.bench.store.promote(self.connection, self.id, self.leases.values(), 1000)


def eventually(condition: Callable[[], object], what: str, timeout: float = 60) -> None:
    """Poll until *condition* holds; fail with *what* after *timeout* seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"still not so after {timeout:g} s: {what}")
        time.sleep(0.005)


def backend(connection: Connection) -> int:
    """The process of the server that serves *connection*."""
    driver_connection: Any = connection.connection.driver_connection
    pid: int = driver_connection.info.backend_pid
    return pid


@contextmanager
def waiting(connection: Connection, run: Callable[[], T]) -> Iterator[Future[T]]:
    """Run *run*, which uses *connection*, in a thread; go on once it waits for a lock.

    It fails if *run* ends without having waited. The block lets it go on, and asks for its result.
    """
    pid = backend(connection)
    with connection.engine.connect() as watcher, ThreadPoolExecutor(1) as pool:
        watcher = watcher.execution_options(isolation_level="AUTOCOMMIT")
        blockers = select(func.cardinality(func.pg_blocking_pids(pid)))
        future = pool.submit(run)
        try:
            eventually(lambda: future.done() or watcher.scalar(blockers), "it waits for a lock")
            if future.done():
                raise AssertionError(f"it did not wait, but gave {future.result()!r}")
            yield future
        except BaseException:
            watcher.execute(select(func.pg_cancel_backend(pid)))
            raise


def sqlstate(error: DBAPIError) -> str | None:
    """The SQLSTATE of a driver's error."""
    return getattr(error.orig, "sqlstate", None)


def ids(deliveries: Iterable[Delivery]) -> list[int]:
    """Their ids, in their order."""
    return [delivery.id for delivery in deliveries]
