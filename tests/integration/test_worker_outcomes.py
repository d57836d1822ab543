"""How handlers run and how their deliveries end, by a worker in this process."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from sqlalchemy import JSON, Connection, Engine, cast, create_engine, select, text
from sqlalchemy.orm import Session, sessionmaker

from sqlalchemy_relaybus import Event, Fixed, NoRetry, RelayBus
from tests.support.effects import INSERT, written
from tests.support.workers import (
    Runs,
    drained,
    eventually,
    held_lanes,
    publish,
    ready,
    waiting,
    working,
)


@pytest.fixture
def bus() -> RelayBus:
    return RelayBus()


def payloads(bus: RelayBus, engine: Engine, status: str) -> list[Any]:
    """The payloads of the parked deliveries with *status*."""
    parked, events = bus.tables.parked, bus.tables.events
    query = select(cast(events.c.payload, JSON).label("payload")).where(
        parked.c.event_id == events.c.id, parked.c.status == status
    )
    with engine.connect() as connection:
        return list(connection.execute(query))


def test_a_session_factory_of_the_handlers_own(bus: RelayBus, effects: Engine) -> None:
    class Mine(Session):
        pass

    runs = Runs()
    by_bus = RelayBus(session_factory=sessionmaker(effects, class_=Mine))

    @by_bus.handler("made", name="a", mode="transactional")
    def a(event: Event, session: Session) -> None:
        runs.add(isinstance(session, Mine))

    @by_bus.handler(
        "made", name="b", mode="transactional", session_factory=sessionmaker(effects, info={"b": 1})
    )
    def b(event: Event, session: Session) -> None:
        runs.add(session.info.get("b"))

    publish(by_bus, effects, "made", 1)
    with working(by_bus, effects):
        drained(by_bus, effects)
    assert runs.rows == [(True,), (1,)] or runs.rows == [(1,), (True,)]


# -- time limits -----------------------------------------------------------------------------------


def test_more_stuck_handlers_than_threads_can_be_replaced_end_the_worker(
    bus: RelayBus, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of them has counted an attempt, and other workers can go on with their lanes."""
    runs, release = Runs(), threading.Event()

    @bus.handler("step", name="h", retry=NoRetry(), timeout=0.2)
    def h(event: Event) -> None:
        runs.add(event.payload)
        release.wait(30)

    publish(bus, engine, "step", 1, 2, 3)
    with working(bus, engine, threads=1) as worker:
        eventually(lambda: not worker.alive)
        assert worker.result is False
    try:
        # the first is replaced, with the second there are two for one thread's place
        assert sorted(runs.rows) == sorted((row.payload,) for row in payloads(bus, engine, "dead"))
        assert len(runs) == 2
        assert ready(bus, engine) == 1
        assert not held_lanes(bus, engine)
        assert caplog.text.count("this worker stops, for a new process to go on") == 1
    finally:
        release.set()


# -- transactional ---------------------------------------------------------------------------------


def test_more_transactional_deliveries_than_connections(bus: RelayBus, effects: Engine) -> None:
    most, now = Runs(), Runs()

    @bus.handler("step", name="h", mode="transactional")
    def h(event: Event, session: Session) -> None:
        now.add(1)
        session.execute(INSERT, {"n": event.payload, "what": "x"})
        most.add(len(now))
        now.rows.pop()

    publish(bus, effects, "step", *range(30))
    # an application may have given its engine very few connections
    engine = create_engine(effects.url, pool_size=1, max_overflow=0)
    try:
        with working(bus, engine, pool_size=1):
            drained(bus, effects)
    finally:
        engine.dispose()
    assert [row[0] for row in written(effects)] == list(range(30))
    assert {row[0] for row in most.rows} == {1}


def test_the_applications_connections_keep_their_settings(bus: RelayBus, engine: Engine) -> None:
    names = ("statement_timeout", "lock_timeout", "enable_seqscan", "jit", "plan_cache_mode")

    def shown() -> list[Any]:
        with engine.connect() as connection:
            return [connection.scalar(text(f"SHOW {name}")) for name in names]

    @bus.handler("step", name="h")
    def h(event: Event) -> None:
        pass

    before = shown()
    publish(bus, engine, "step", 1)
    with working(bus, engine):
        drained(bus, engine)
    assert [shown() for _ in range(5)] == [before] * 5


# -- delays, ids, dead letters ---------------------------------------------------------------------


def test_a_delayed_event_runs_after_its_delay(bus: RelayBus, engine: Engine) -> None:
    runs = Runs()

    @bus.handler("step", name="h", mode="transactional")
    def h(event: Event, connection: Connection) -> None:
        runs.add(event.payload, connection.scalar(text("SELECT clock_timestamp()")))

    # there before the events are: else all of them may be due by the time that it looks
    with working(bus, engine):
        publish(bus, engine, "step", "first")
        runs.wait(1)
        with Session(engine) as session, session.begin():
            begun = session.scalar(text("SELECT clock_timestamp()"))
            for delay in (2.4, 0.8):
                bus.publish(session, "step", delay, delay=delay)
            # later ones of the key wait for the delayed one
            bus.publish(session, "step", 1.6, key="k", delay=1.6)
            bus.publish(session, "step", "behind", key="k")
            bus.publish(session, "step", 0)
        runs.wait(6)
    del runs.rows[0]
    assert begun is not None
    order = [row[0] for row in runs.rows]
    assert [o for o in order if o != "behind"] == [0, 0.8, 1.6, 2.4]
    assert order.index("behind") > order.index(1.6)
    for delay, at in runs.rows:
        late = (at - begun).total_seconds() - (1.6 if delay == "behind" else delay)
        assert 0 <= late < 5, (delay, late)


def test_unknown_handlers_are_left_alone(
    bus: RelayBus, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows of a handler that this code does not have stay, cost nothing and hold nobody up."""
    runs = Runs()
    old = RelayBus()

    @old.handler("step", name="gone")
    async def gone(event: Event) -> None:
        raise AssertionError

    @old.handler("step", name="h")
    @bus.handler("step", name="h")
    async def h(event: Event) -> None:
        runs.add(event.payload)

    for n in range(20):
        publish(old, engine, "step", n, key=f"k{n % 3}")
    with working(bus, engine):
        eventually(lambda: len(runs) == 20)
        eventually(lambda: ready(bus, engine) == 20)
        with engine.connect() as connection:
            rows = connection.execute(select(bus.tables.deliveries)).all()
    assert {(row.handler, row.attempts, row.claims) for row in rows} == {("gone", 0, 0)}
    for key in range(3):
        mine = [row[0] for row in runs.rows if row[0] % 3 == key]
        assert mine == sorted(mine)
    back = Runs()
    again = RelayBus()

    @again.handler("step", name="gone")
    async def renamed(event: Event) -> None:
        back.add(event.payload)

    with working(again, engine):
        drained(again, engine)
    assert sorted(row[0] for row in back.rows) == list(range(20))


def _statements(engine: Engine) -> int:
    """Transactions of this database so far; an autocommit statement is one."""
    query = text(
        "SELECT xact_commit + xact_rollback FROM pg_stat_database "
        "WHERE datname = current_database()"
    )
    with engine.connect() as connection:
        connection.execute(text("SELECT pg_stat_force_next_flush()"))
        return connection.scalar(query) or 0


@pytest.mark.parametrize("what", ["nothing", "unknown handler", "behind a waiting head"])
def test_an_idle_worker_is_quiet(bus: RelayBus, engine: Engine, what: str) -> None:
    """Rows that nobody may run now must not make the worker turn in circles."""
    other = RelayBus()

    @other.handler("other", name="other")
    async def other_handler(event: Event) -> None:
        pass

    @bus.handler("step", name="h", retry=Fixed(wait=600))
    async def h(event: Event) -> None:
        raise RuntimeError("waits")

    if what == "unknown handler":
        for n in range(10):
            publish(other, engine, "other", n, key=f"k{n}")
    if what == "behind a waiting head":
        for n in range(10):
            publish(bus, engine, "step", 1, 2, 3, key=f"k{n}")
    with working(bus, engine, max_poll_interval=0.2, poll_interval=0.05, listen=False):
        if what == "behind a waiting head":
            eventually(lambda: waiting(bus, engine) == 10)
        time.sleep(0.5)  # let it come to rest
        before = _statements(engine)
        time.sleep(1.2)
        used = _statements(engine) - before
    # a look every 0.2 s and at most one claim each, with what was counted late; in circles: 1,000s
    assert used < 150, used


# -- edges of the settings -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"concurrency": 1, "batch": 1, "prefetch": 0},
        {"concurrency": 1, "batch": 1, "prefetch": 1, "threads": 1},
        {"concurrency": 3, "batch": 200, "prefetch": 0},
        {"concurrency": 1, "batch": 5, "prefetch": 200, "completion_window": 0},
        {"concurrency": 200, "batch": 1, "prefetch": 10, "lane_linger": 0},
    ],
)
def test_edges_of_the_settings(bus: RelayBus, engine: Engine, settings: dict[str, Any]) -> None:
    runs = Runs()
    lock, now, most = threading.Lock(), [0], [0]

    def enter() -> None:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])

    def leave() -> None:
        with lock:
            now[0] -= 1

    @bus.handler("step", name="coroutine")
    async def coroutine(event: Event) -> None:
        enter()
        await asyncio.sleep(0.001)
        runs.add("coroutine", event.key, event.payload)
        leave()

    @bus.handler("step", name="plain")
    def plain(event: Event) -> None:
        enter()
        time.sleep(0.001)
        runs.add("plain", event.key, event.payload)
        leave()

    for n in range(60):
        publish(bus, engine, "step", n, key=f"k{n % 5}" if n % 3 else None)
    with working(bus, engine, **settings):
        drained(bus, engine)
    assert len(runs) == 120
    assert most[0] <= settings["concurrency"]
    for name in ("coroutine", "plain"):
        for key in {row[1] for row in runs.rows} - {None}:
            mine = [row[2] for row in runs.rows if row[:2] == (name, key)]
            assert mine == sorted(mine)
