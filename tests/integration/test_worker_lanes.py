"""Leases, shares of lanes and wake-ups: what a worker keeps to while things go wrong around it."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from uuid import UUID

import pytest
from sqlalchemy import Engine, select, text

from sqlalchemy_relaybus import Event, NoRetry, RelayBus, SchemaMissingError
from sqlalchemy_relaybus.lanes import lane_of, lane_of_event
from sqlalchemy_relaybus.worker import Worker
from sqlalchemy_relaybus.worker.takeover import Holds
from tests.support.workers import (
    LIMIT,
    QUICK,
    Running,
    Runs,
    drained,
    eventually,
    held_lanes,
    holders,
    publish,
    ready,
    waiting,
    working,
)


@pytest.fixture
def bus() -> RelayBus:
    return RelayBus()


def event_ids(bus: RelayBus, engine: Engine) -> list[UUID]:
    with engine.connect() as connection:
        return list(connection.scalars(select(bus.tables.events.c.id)))


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


# -- wake-ups, and what ends a worker --------------------------------------------------------------


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
