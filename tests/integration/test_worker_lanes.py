"""Order, leases and lost replies: what a worker keeps to while things go wrong around it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine, func, select, text, update
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from sqlalchemy_relaybus import Context, Event, Fixed, NoRetry, RelayBus, SchemaMissingError
from sqlalchemy_relaybus.lanes import lane_of, lane_of_event
from sqlalchemy_relaybus.stores.postgresql.store import PostgreSQLStore
from sqlalchemy_relaybus.worker import Worker
from sqlalchemy_relaybus.worker.takeover import Holds
from tests.support.databases import open_engine
from tests.support.proxy import proxy_to
from tests.support.stores import Bench
from tests.support.workers import (
    LIMIT,
    QUICK,
    Running,
    Runs,
    dead,
    drained,
    eventually,
    held_lanes,
    holders,
    publish,
    ready,
    steal,
    waiting,
    working,
)


@pytest.fixture
def bus() -> RelayBus:
    return RelayBus()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory for a Unix socket, whose path may not be long."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="rb-") as directory:
        yield Path(directory)


def event_ids(bus: RelayBus, engine: Engine) -> list[UUID]:
    with engine.connect() as connection:
        return list(connection.scalars(select(bus.tables.events.c.id)))


def increasing(rows: list[Any]) -> bool:
    return all(a < b for a, b in itertools.pairwise(rows))


# -- order -----------------------------------------------------------------------------------------


@pytest.mark.timeout(150)
def test_order_and_exclusion_per_key_with_three_workers(bus: RelayBus, engine: Engine) -> None:
    """With failures, time limits, hand-overs and late joiners: no overlap, no inversion."""
    ledger = Runs()
    chance = random.Random(7)
    lock = threading.Lock()
    current: dict[tuple[str, str], int] = {}
    overlaps: list[Any] = []
    completed: set[tuple[str, str, int]] = set()

    def begin(handler: str, event: Event) -> None:
        assert event.key is not None
        with lock:
            if (handler, event.key) in current:
                overlaps.append((handler, event.key, event.payload))
            current[handler, event.key] = event.payload
            fails = chance.random() < 0.05 and (handler, event.key, event.payload) not in completed
        if fails:
            end(handler, event)
            raise RuntimeError("now and then")

    def end(handler: str, event: Event, *, done: bool = False) -> None:
        assert event.key is not None
        with lock:
            current.pop((handler, event.key), None)
            if done:
                completed.add((handler, event.key, event.payload))
                ledger.add(handler, event.key, event.payload)

    retry = Fixed(wait=0.02, max_attempts=50)

    @bus.handler("step", name="coroutine", retry=retry)
    async def coroutine(event: Event) -> None:
        begin("coroutine", event)
        await asyncio.sleep(0.001)
        end("coroutine", event, done=True)

    @bus.handler("step", name="plain", retry=retry)
    def plain(event: Event) -> None:
        begin("plain", event)
        time.sleep(0.0005)
        end("plain", event, done=True)

    @bus.handler("step", name="transactional", retry=retry, mode="transactional")
    def transactional(event: Event, session: Session) -> None:
        begin("transactional", event)
        session.execute(text("SELECT 1"))
        end("transactional", event, done=True)

    keys, each = 20, 40
    with contextlib.ExitStack() as stack:
        settings = {"lane_linger": 0.2, "lease_duration": 2.0, "concurrency": 20, "prefetch": 20}
        stack.enter_context(working(bus, engine, **settings))
        leaver = None
        for n in range(each):
            with Session(engine) as session, session.begin():
                for key in range(keys):
                    bus.publish(session, "step", n, key=f"k{key}")
            if n == 10:
                leaver = stack.enter_context(working(bus, engine, **settings))
            if n == 20:
                stack.enter_context(working(bus, engine, **settings))
            if n == 30 and leaver is not None:
                assert leaver.stop() is True
        drained(bus, engine, 90)
    assert not overlaps
    assert not dead(bus, engine)
    for handler in ("coroutine", "plain", "transactional"):
        for key in range(keys):
            mine = [n for h, k, n in ledger.rows if (h, k) == (handler, f"k{key}")]
            assert mine == list(range(each)), (handler, key, mine)


@pytest.mark.parametrize("kind", ["async", "plain"])
def test_followers_wait_for_a_failed_head(bus: RelayBus, engine: Engine, kind: str) -> None:
    """They wait through its retries, uncharged, while other keys of the same lane flow."""
    runs = Runs()

    def step(event: Event, context: Context) -> None:
        runs.add(event.key, event.payload, context.attempt)
        if (event.key, event.payload) == ("a", 3) and context.attempt < 3:
            raise RuntimeError("not yet")

    if kind == "async":

        @bus.handler("step", name="h", retry=Fixed(wait=0.3))
        async def coroutine(event: Event, context: Context) -> None:
            step(event, context)

    else:
        bus.handler("step", name="h", retry=Fixed(wait=0.3))(step)

    others = same_lane("a", 5)
    with Session(engine) as session, session.begin():
        for n in range(20):
            for key in ("a", *others):
                bus.publish(session, "step", n, key=key)
    with working(bus, engine, concurrency=8, prefetch=8):
        eventually(lambda: sum(row[0] != "a" for row in runs.rows) == 100)
        assert len([row for row in runs.rows if row[0] == "a"]) < 20 + 2
        publish(bus, engine, "step", 20, key="a")
        drained(bus, engine)
    mine = [row[1:] for row in runs.rows if row[0] == "a"]
    assert mine == [(0, 1), (1, 1), (2, 1), (3, 1), (3, 2), (3, 3), *((n, 1) for n in range(4, 21))]
    for key in others:
        assert [row[1] for row in runs.rows if row[0] == key] == list(range(20))


def same_lane(key: str, count: int) -> list[str]:
    from sqlalchemy_relaybus.lanes import lane_of

    found = (f"{key}{n}" for n in range(100_000) if lane_of(f"{key}{n}") == lane_of(key))
    return [next(found) for _ in range(count)]


def test_a_dead_head_lets_its_followers_pass(bus: RelayBus, engine: Engine) -> None:
    runs = Runs()

    @bus.handler("step", name="h", retry=Fixed(wait=0.05, max_attempts=2))
    async def h(event: Event, context: Context) -> None:
        runs.add(event.payload, context.attempt)
        if event.payload == 1:
            raise RuntimeError("never")

    publish(bus, engine, "step", *range(6), key="k")
    with working(bus, engine):
        drained(bus, engine)
    assert runs.rows == [(0, 1), (1, 1), (1, 2), (2, 1), (3, 1), (4, 1), (5, 1)]
    assert len(dead(bus, engine)) == 1


def test_a_failure_that_cannot_be_recorded_holds_its_followers(
    bus: RelayBus, engine: Engine
) -> None:
    """Somebody has the failed row locked: nothing of its key runs before it is parked."""
    runs, locked = Runs(), threading.Event()

    @bus.handler("step", name="h", retry=Fixed(wait=0.05))
    def h(event: Event, context: Context) -> None:
        runs.add(event.key, event.payload, context.attempt)
        if (event.key, event.payload, context.attempt) == ("a", 0, 1):
            assert locked.wait(30)
            raise RuntimeError("once")

    (other,) = same_lane("a", 1)
    publish(bus, engine, "step", *range(5), key="a")
    with working(bus, engine, lease_duration=2.0):
        runs.wait(1)
        with lock_rows(bus, engine, 1):
            locked.set()
            publish(bus, engine, "step", *range(5), key=other)
            publish(bus, engine, "step", 5, key="a")
            eventually(lambda: sum(row[0] == other for row in runs.rows) == 5)
            before = _calls(engine)
            time.sleep(0.7)
            assert _calls(engine) - before < 150  # no hot loop either
            assert [row[1:] for row in runs.rows if row[0] == "a"] == [(0, 1)]
        drained(bus, engine)
    assert [row[1:] for row in runs.rows if row[0] == "a"] == [
        (0, 1),
        (0, 2),
        *((n, 1) for n in range(1, 6)),
    ]


@contextlib.contextmanager
def lock_rows(bus: RelayBus, engine: Engine, count: int) -> Iterator[list[Any]]:
    """Somebody else's transaction that locks the first deliveries."""
    table = bus.tables.deliveries
    with engine.connect() as connection, connection.begin():
        query = select(table).order_by(table.c.id).limit(count).with_for_update()
        yield list(connection.execute(query))


def _calls(engine: Engine) -> int:
    query = text(
        "SELECT xact_commit + xact_rollback FROM pg_stat_database "
        "WHERE datname = current_database()"
    )
    with engine.connect() as connection:
        return connection.scalar(query) or 0


# -- locks of others -------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["delivery", "lane"])
def test_somebody_elses_lock_beside_a_steady_flow(
    bus: RelayBus, engine: Engine, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The others flow, the leases stay, and after the release the row goes as well."""
    runs, begun, go = Runs(), threading.Event(), threading.Event()

    @bus.handler("step", name="h")
    def h(event: Event) -> None:
        if event.payload == "locked":
            begun.set()
            assert go.wait(30)
        runs.add(event.payload)

    publish(bus, engine, "step", "locked")
    with working(bus, engine, lease_duration=1.5) as worker:
        assert begun.wait(30)
        with engine.connect() as connection, connection.begin():
            table = bus.tables.deliveries if what == "delivery" else bus.tables.lanes
            query = select(table.c.lane).with_for_update()
            if what == "lane":
                query = query.where(table.c.holder.is_not(None))
            lane = connection.scalar(query)
            go.set()
            # longer than the lease where the lane itself can be renewed
            end = time.monotonic() + (2.0 if what == "delivery" else 0.8)
            n, keys = 0, map(str, itertools.count())
            while time.monotonic() < end:
                key = next(key for key in keys if lane_of(key) != lane)
                publish(bus, engine, "step", n, key=key)
                n += 1
                time.sleep(0.01)
            eventually(lambda: ready(bus, engine) == 1)
            assert lane in held_lanes(bus, engine, worker.holder)
        drained(bus, engine)
    assert sorted(map(str, (row[0] for row in runs.rows))) == sorted(
        [*map(str, range(n)), "locked"]
    )
    assert "lost the lease" not in caplog.text
    assert "refused" not in caplog.text
    assert caplog.text.count("holds a lock") <= 3


# -- leases ----------------------------------------------------------------------------------------


def test_a_hot_key_does_not_hold_up_the_others(bus: RelayBus, engine: Engine) -> None:
    """Its deliveries run one at a time, so they take one slot, however many there are."""
    runs, go_on = Runs(), threading.Event()

    @bus.handler("step", name="h")
    def h(event: Event) -> None:
        if event.key == "hot":
            go_on.wait(LIMIT)
        else:
            runs.add(event.key)

    publish(bus, engine, "step", *range(500), key="hot")
    with working(bus, engine, concurrency=4, prefetch=8) as running:
        eventually(lambda: held_lanes(bus, engine, running.holder))
        for key in range(40):
            publish(bus, engine, "step", 1, key=f"cold-{key}")
        elsewhere = {f"cold-{key}" for key in range(40)}
        elsewhere -= {key for key in elsewhere if lane_of(key) == lane_of("hot")}
        eventually(lambda: elsewhere <= {key for (key,) in runs.rows}, lambda: runs.rows)
        go_on.set()
        drained(bus, engine)


def test_a_locked_table_does_not_cost_the_leases(bus: RelayBus, engine: Engine) -> None:
    runs, go_on = Runs(), threading.Event()

    @bus.handler("step", name="h")
    def h(event: Event) -> None:
        runs.add(event.payload)
        go_on.wait(LIMIT)

    lanes = bus.tables.lanes
    publish(bus, engine, "step", 1)
    with working(bus, engine, lease_duration=2.0) as running:
        runs.wait(1)
        (lane,) = held_lanes(bus, engine, running.holder)
        query = select(lanes.c.version, lanes.c.lease_expires_at > func.clock_timestamp()).where(
            lanes.c.lane == lane, lanes.c.holder == running.holder
        )
        with engine.begin() as locking:
            locking.execute(text("LOCK TABLE relaybus_deliveries IN ACCESS EXCLUSIVE MODE"))
            with engine.connect() as connection:
                first = connection.execute(query).one().version
            go_on.set()  # its completion now waits for the lock

            def renewals() -> int:
                with engine.connect() as connection:
                    version, live = connection.execute(query).one()
                assert live
                return int(version) - int(first)

            eventually(lambda: renewals() >= 6)  # longer than the lease
        drained(bus, engine)
    assert len(runs) == 1


def test_a_blocked_event_loop_keeps_its_lanes(bus: RelayBus, engine: Engine) -> None:
    runs = Runs()

    @bus.handler("step", name="h")
    async def h(event: Event, context: Context) -> None:
        runs.add("began", context.attempt, context.fence)
        time.sleep(4)
        runs.add("ended")

    publish(bus, engine, "step", 1)
    with working(bus, engine, lease_duration=1.0) as first:
        runs.wait(1)
        with working(bus, engine, lease_duration=1.0) as second:
            runs.wait(2)
            drained(bus, engine)
            assert not held_lanes(bus, engine, second.holder)
        assert first.alive
    assert runs.rows == [("began", 1, 1), ("ended",)]


def test_a_stolen_lane(bus: RelayBus, engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever is reported late is refused, nothing crashes, and the new holder has it all."""
    runs, go = Runs(), threading.Event()

    @bus.handler("step", name="plain")
    def plain(event: Event, context: Context) -> None:
        runs.add("plain", event.payload, context.fence)
        assert go.wait(30)

    @bus.handler("step", name="failing")
    def failing(event: Event, context: Context) -> None:
        runs.add("failing", event.payload, context.fence)
        assert go.wait(30)
        if context.fence == 1:
            raise RuntimeError("too late to count")

    @bus.handler("step", name="transactional", mode="transactional")
    def transactional(event: Event, context: Context, session: Session) -> None:
        runs.add("transactional", event.payload, context.fence)
        session.execute(text("INSERT INTO effects VALUES (:n)"), {"n": context.fence})
        assert go.wait(30)

    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE effects (n int)"))
    publish(bus, engine, "step", 1, 2, key="k")
    with working(bus, engine, lease_duration=2.0) as worker:
        runs.wait(3)
        lanes = held_lanes(bus, engine, worker.holder)
        steal(bus, engine, lanes)
        eventually(lambda: "lost the lease" in caplog.text)
        go.set()
        eventually(lambda: caplog.text.count("was refused") >= 2)
        with engine.connect() as connection:
            assert connection.scalar(text("SELECT count(*) FROM effects")) == 0
        with engine.begin() as connection:  # the thief dies
            connection.execute(
                update(bus.tables.lanes).values(lease_expires_at=text("clock_timestamp()"))
            )
        drained(bus, engine)
        assert worker.alive
    with engine.connect() as connection:
        assert list(connection.scalars(text("SELECT n FROM effects"))) == [3, 3]
    assert not dead(bus, engine)
    for name in ("plain", "failing", "transactional"):
        mine = [row[1:] for row in runs.rows if row[0] == name]
        assert mine == [(1, 1), (1, 3), (2, 3)], name


def test_a_worker_that_lost_its_lanes_and_lives_takes_the_crash_back(
    bus: RelayBus, engine: Engine
) -> None:
    """What ran while it was cut off, or stopped, did not kill it."""
    runs, release = Runs(), threading.Event()

    @bus.handler("step", name="h")
    def h(event: Event) -> None:
        runs.add(event.payload)
        release.wait(30)

    suspects = select(bus.tables.suspects.c.crashes)
    publish(bus, engine, "step", 1, key="k")
    with Bench(engine) as bench, working(bus, engine, lease_duration=60.0):
        runs.wait(1)
        with engine.begin() as connection:
            connection.execute(
                update(bus.tables.lanes).values(lease_expires_at=text("clock_timestamp()"))
            )
        taker = bench.holder("h")
        assert len(taker.take(lane_of("k"))[lane_of("k")].suspects) == 1
        assert bench.read(suspects) == [(1,)]
        release.set()  # what it reports is refused, and so it comes to know
        eventually(lambda: bench.read(suspects) == [(0,)])


def test_two_workers_share_the_lanes(bus: RelayBus, engine: Engine) -> None:
    """One that joins late gets its share within about a third of a lease."""

    @bus.handler("step", name="h")
    async def h(event: Event) -> None:
        await asyncio.sleep(0.01)

    stop = threading.Event()

    def load() -> None:
        n = 0
        while not stop.is_set():
            publish(bus, engine, "step", *range(n, n + 100))
            n += 100
            eventually(lambda: ready(bus, engine) < 2_000)

    publisher = threading.Thread(target=load)
    with working(bus, engine, lease_duration=2.0, concurrency=10, prefetch=10) as first:
        publisher.start()
        try:
            eventually(lambda: holders(bus, engine).get(first.holder, 0) > 200)
            with working(bus, engine, lease_duration=2.0, concurrency=10, prefetch=10) as second:
                began = time.monotonic()
                eventually(
                    lambda: (
                        100 <= holders(bus, engine).get(first.holder, 0) <= 140
                        and 100 <= holders(bus, engine).get(second.holder, 0) <= 140
                    ),
                    lambda: holders(bus, engine),
                )
                assert time.monotonic() - began < 15
            # it handed all back: the first has them again
            eventually(lambda: holders(bus, engine).get(first.holder, 0) > 200)
        finally:
            stop.set()
            publisher.join()
    assert not held_lanes(bus, engine)


def test_workers_with_other_handlers_take_no_share(engine: Engine) -> None:
    """Whoever cannot serve a lane does not keep others from it, however many they are."""
    ours, others = RelayBus(), RelayBus()
    begun, go_on = Runs(), threading.Event()

    @ours.handler("mine", name="mine")
    def mine(event: Event) -> None:
        begun.add(event.payload)
        go_on.wait(LIMIT)

    @others.handler("theirs", name="theirs")
    def theirs(event: Event) -> None: ...

    publish(ours, engine, "mine", *range(1500))
    with_work = {lane_of_event(id) for id in event_ids(ours, engine)}
    with working(others, engine), working(others, engine), working(others, engine):
        with working(ours, engine, concurrency=2, prefetch=2) as running:
            begun.wait(1)
            eventually(lambda: held_lanes(ours, engine, running.holder) == with_work)
            go_on.set()
            drained(ours, engine)


def test_lanes_without_work_are_handed_back(bus: RelayBus, engine: Engine) -> None:
    @bus.handler("step", name="h")
    async def h(event: Event) -> None:
        pass

    publish(bus, engine, "step", *range(50))
    with working(bus, engine, lane_linger=0.1):
        drained(bus, engine)
        eventually(lambda: not held_lanes(bus, engine))
        publish(bus, engine, "step", 1)
        drained(bus, engine)


def test_a_stopping_worker_keeps_only_the_lanes_of_what_runs(bus: RelayBus, engine: Engine) -> None:
    """Others need not wait for the end of its grace."""
    runs, release = Runs(), threading.Event()

    @bus.handler("step", name="h")
    def h(event: Event) -> None:
        runs.add(event.payload)
        if event.payload == "stuck":
            release.wait(30)

    publish(bus, engine, "step", "stuck", key="a")
    publish(bus, engine, "step", 1, key="b")
    with working(bus, engine, lane_linger=60, lease_duration=60.0) as stopping:
        runs.wait(2)
        eventually(lambda: ready(bus, engine) == 1)
        stopping.worker.stop(grace=25)
        try:
            eventually(lambda: held_lanes(bus, engine, stopping.holder) == {lane_of("a")}, limit=15)
            with working(bus, engine):
                publish(bus, engine, "step", 2, key="b")
                runs.wait(3)
            assert stopping.alive
        finally:
            release.set()
        eventually(lambda: not stopping.alive)
    assert not held_lanes(bus, engine)


def test_two_services_on_one_bus(engine: Engine) -> None:
    """Neither holds on to a lane whose first delivery only the other can run."""
    runs = Runs()
    both = RelayBus()
    services = [RelayBus(), RelayBus()]
    for n, service in enumerate(services):
        for bus in (both, service):

            @bus.handler("step", name=f"h{n}")
            async def h(event: Event, context: Context) -> None:
                runs.add(context.handler, event.key, event.payload)

    for n in range(10):
        for key in range(10):
            publish(both, engine, "step", n, key=f"k{key}")
    with (
        working(services[0], engine, lease_duration=1.0),
        working(services[1], engine, lease_duration=1.0),
    ):
        drained(both, engine, 60)
    assert len(runs) == 200
    for name in ("h0", "h1"):
        for key in range(10):
            assert [r[2] for r in runs.rows if r[:2] == (name, f"k{key}")] == list(range(10))


# -- lost replies ----------------------------------------------------------------------------------


class Cut:
    """Loses replies of one of the store's calls, with what they did committed or not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, *, committed: bool) -> None:
        self.left = 0
        self.cuts = 0
        self.on = threading.Lock()
        call = getattr(PostgreSQLStore, name)

        def cut(store: Any, connection: Any, *arguments: Any, **options: Any) -> Any:
            with self.on:
                now = self.left > 0
                if now:
                    self.left -= 1
                    self.cuts += 1
            if not now:
                return call(store, connection, *arguments, **options)
            if committed:
                call(store, connection, *arguments, **options)
            connection.connection.driver_connection.close()
            connection.invalidate()
            raise OperationalError(
                name, None, Exception("the reply is lost"), connection_invalidated=True
            )

        monkeypatch.setattr(PostgreSQLStore, name, cut)


@pytest.mark.parametrize("committed", [True, False], ids=["committed", "not committed"])
@pytest.mark.parametrize("name", ["exchange", "park", "promote", "take", "relinquish", "enlist"])
def test_lost_replies(
    bus: RelayBus,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    committed: bool,
) -> None:
    """Nothing lost, nothing run twice, the order of keys kept, by one worker alone."""
    cut = Cut(monkeypatch, name, committed=committed)
    ledger, attempts = Runs(), Runs()

    @bus.handler("step", name="coroutine", retry=Fixed(wait=0.01))
    async def coroutine(event: Event, context: Context) -> None:
        attempts.add("coroutine", event.key, event.payload, context.attempt)
        if event.payload % 7 == 3 and context.attempt == 1:
            raise RuntimeError("once")
        await asyncio.sleep(0.002)
        ledger.add("coroutine", event.key, event.payload)

    @bus.handler("step", name="plain")
    def plain(event: Event, context: Context) -> None:
        attempts.add("plain", event.key, event.payload, context.attempt)
        ledger.add("plain", event.key, event.payload)

    settings = {"concurrency": 10, "prefetch": 10, "batch": 10, "lease_duration": 1.0}
    with working(bus, engine, lane_linger=0.05, **settings) as worker:
        for n in range(12):
            with Session(engine) as session, session.begin():
                for key in range(8):
                    bus.publish(session, "step", n, key=f"k{key}")
                bus.publish(session, "step", n)
            if n in (0, 7):
                with cut.on:
                    cut.left = 1 if n else 2
            if n % 4 == 1:
                eventually(lambda: ready(bus, engine) == 0)
                eventually(lambda: not held_lanes(bus, engine))
        drained(bus, engine)
        with cut.on:
            cut.left = 0
        assert worker.alive
        eventually(lambda: not held_lanes(bus, engine))
    assert cut.cuts >= 1, cut.cuts
    assert not dead(bus, engine)
    assert len(ledger) == len(set(ledger.rows)) == 2 * 12 * 9
    for handler in ("coroutine", "plain"):
        for key in range(8):
            mine = [row[2] for row in ledger.rows if row[:2] == (handler, f"k{key}")]
            assert mine == list(range(12)), (handler, key, mine)
        assert sorted(r[2] for r in ledger.rows if r[:2] == (handler, None)) == list(range(12))
    # a lost reply charges nobody
    assert {row[3] for row in attempts.rows if row[0] == "plain"} == {1}


def test_the_pumps_connection_is_killed(
    bus: RelayBus, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """Again and again, as a restart of a proxy does, and with it the listener's."""
    runs = Runs()
    caplog.set_level(logging.INFO)

    @bus.handler("step", name="h")
    async def h(event: Event) -> None:
        await asyncio.sleep(0.001)
        runs.add(event.key, event.payload)

    separate = create_engine(engine.url.update_query_dict({"application_name": "under test"}))
    kill = text(
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
        "WHERE application_name = 'under test'"
    )
    total, killed = 0, 0
    with working(bus, separate) as worker:
        for n in range(60):
            publish(bus, engine, "step", n, key=f"k{n % 3}")
            total += 1
            if n % 12 == 5:
                with engine.connect() as connection:
                    killed += connection.scalar(kill) or 0
            time.sleep(0.01)
        drained(bus, engine)
        assert killed >= 5
        # listening again: noticed at once although polling is slow
        eventually(lambda: _listeners(engine) == 1)
        assert worker.alive
    separate.dispose()
    assert sorted(row[1] for row in runs.rows) == list(range(60))
    for key in range(3):
        assert increasing([n for k, n in runs.rows if k == f"k{key}"])
    assert "Traceback" not in caplog.text


def _listeners(engine: Engine) -> int:
    query = text(
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE application_name = 'under test' AND query LIKE 'LISTEN%'"
    )
    with engine.connect() as connection:
        return connection.scalar(query) or 0


def test_a_wake_up_is_noticed_at_once(bus: RelayBus, engine: Engine) -> None:
    runs = Runs()

    @bus.handler("step", name="h")
    async def h(event: Event) -> None:
        runs.add(time.monotonic())

    with working(bus, engine, poll_interval=20, max_poll_interval=20, lease_duration=120):
        eventually(lambda: _listening(engine))
        for n in range(5):
            sent = time.monotonic()
            publish(bus, engine, "step", n)
            runs.wait(n + 1, limit=10)
            assert runs.rows[n][0] - sent < 5
            drained(bus, engine)


def _listening(engine: Engine) -> int:
    query = text(
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE datname = current_database() AND query LIKE 'LISTEN%'"
    )
    with engine.connect() as connection:
        return connection.scalar(query) or 0


def test_tables_that_are_gone_end_the_worker(bus: RelayBus, engine: Engine) -> None:
    runs = Runs()

    @bus.handler("step", name="h")
    async def h(event: Event) -> None:
        runs.add(event.payload)

    running = Running(Worker(bus, engine, **QUICK))
    publish(bus, engine, "step", 1)
    runs.wait(1)
    with engine.begin() as connection:
        bus.tables.metadata.drop_all(connection)
    eventually(lambda: not running.alive)
    assert isinstance(running.error, SchemaMissingError)
    assert "relaybus migrate upgrade" in str(running.error)


def test_a_defect_of_the_worker_hands_back_what_runs_nothing(
    bus: RelayBus, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others need not wait for its leases to run out, but never run beside what it has begun."""
    runs, release = Runs(), threading.Event()

    @bus.handler("step", name="h")
    def h(event: Event) -> None:
        runs.add(event.payload)
        if event.payload == "stuck":
            release.wait(30)

    running = Running(Worker(bus, engine, **{**QUICK, "lane_linger": 60}))
    publish(bus, engine, "step", "stuck", *range(20))
    runs.wait(21)
    eventually(lambda: ready(bus, engine) == 1)
    assert len(held_lanes(bus, engine, running.holder)) > 1

    def defect(*arguments: object, **options: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(Holds, "look", defect)
    try:
        eventually(lambda: not running.alive)
        assert isinstance(running.error, ZeroDivisionError)
        assert len(held_lanes(bus, engine)) == 1
    finally:
        release.set()


def test_a_lane_that_could_only_be_claimed_from_and_is_lost_is_noticed_at_once(
    bus: RelayBus, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """Not at its next renewal, which is far away."""
    runs = Runs()

    @bus.handler("step", name="h")
    async def h(event: Event) -> None:
        runs.add(event.payload)

    with working(bus, engine, lease_duration=600.0, lane_linger=60) as worker:
        publish(bus, engine, "step", 1, key="k")
        runs.wait(1)
        drained(bus, engine)
        lanes = held_lanes(bus, engine, worker.holder)
        assert lane_of("k") in lanes
        steal(bus, engine, {lane_of("k")}, seconds=-1)
        publish(bus, engine, "step", 2, key="k")
        runs.wait(2)
        drained(bus, engine)
        assert f"lost the lease on lane {lane_of('k')} " in caplog.text


def test_a_broken_database_is_not_hammered(
    bus: RelayBus, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """Every statement fails, connecting does not: the tries get rarer, the worker lives."""
    runs = Runs()

    @bus.handler("step", name="h", retry=NoRetry())
    async def h(event: Event) -> None:
        runs.add(event.payload)

    with working(bus, engine) as worker:
        publish(bus, engine, "step", 1)
        drained(bus, engine)
        with engine.begin() as connection:
            connection.execute(text("ALTER TABLE relaybus_lanes RENAME TO relaybus_lanes_away"))
        eventually(lambda: caplog.text.count("the database failed") >= 2)
        before = caplog.text.count("the database failed")
        time.sleep(2)
        assert caplog.text.count("the database failed") - before <= 4
        with engine.begin() as connection:
            connection.execute(text("ALTER TABLE relaybus_lanes_away RENAME TO relaybus_lanes"))
        publish(bus, engine, "step", 2)
        drained(bus, engine)
        assert worker.alive
    assert sorted(row[0] for row in runs.rows) == [1, 2]
    assert not waiting(bus, engine)


def test_a_reply_cut_off_on_the_wire(bus: RelayBus, engine: Engine, short_path: Path) -> None:
    """The server commits an exchange whose answer never arrives, three times."""
    runs = Runs()

    @bus.handler("step", name="h")
    async def h(event: Event, context: Context) -> None:
        await asyncio.sleep(0.002)
        runs.add(event.key, event.payload, context.attempt)

    url = engine.url.render_as_string(hide_password=False)
    with proxy_to(url, short_path) as proxy, open_engine(proxy.url) as behind:
        with working(bus, behind, concurrency=5, prefetch=5, lane_linger=0.05, listen=False):
            for n in range(3):
                for each in range(20):
                    publish(bus, engine, "step", n * 20 + each, key=f"k{each % 4}")
                # a prepared statement is known by its name: its parameters hold the handler's
                proxy.cut_reply_to(b"{h}")
                drained(bus, engine)
                publish(bus, engine, "step", 1000 + n)
                drained(bus, engine)
        assert proxy.cuts >= 2
    assert sorted(row[1] for row in runs.rows) == [*range(60), 1000, 1001, 1002]
    assert {row[2] for row in runs.rows} == {1}
    for key in range(4):
        assert increasing([n for k, n, _ in runs.rows if k == f"k{key}"])
