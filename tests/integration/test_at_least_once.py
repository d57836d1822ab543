"""A plain handler runs at least once, and more often only where its run left no trace.

What is claimed is listed in its lane and named to every later claim until its end is confirmed, so
one worker never claims it twice; and a worker keeps its lanes whatever its handlers do. It runs
again after a failure, or where the worker's lease ran out between the effect and the completion.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, func, select, text
from sqlalchemy.orm import Session

from sqlalchemy_relaybus import Context, Event, RelayBus
from tests.support.application import QUICK, application_bus, noted, suspects
from tests.support.effects import INSERT, written
from tests.support.stores import Bench, key_on, new_event
from tests.support.workers import (
    LIMIT,
    Runs,
    drained,
    eventually,
    held_lanes,
    publish,
    ready,
    worker_process,
    working,
)

LANE = 7
KEY, OTHER_KEY = key_on(LANE), key_on(LANE, 1)


@pytest.fixture
def bus() -> RelayBus:
    """It publishes to the application, too."""
    return application_bus()


# -- one worker claims it once ---------------------------------------------------------------------


def test_what_is_kept_is_not_claimed_again(bench: Bench) -> None:
    holder = bench.holder()
    bench.publish(*(new_event(KEY) for _ in range(4)))
    holder.take(LANE)
    reply = holder.exchange(limit=3, room=2)
    started, prefetched = reply.startable, reply.prefetched
    assert (len(started), len(prefetched)) == (2, 1)
    [last] = holder.exchange(started=started, prefetched=prefetched).startable
    assert last.id > prefetched[0].id


def test_what_just_finished_is_not_claimed_again(bench: Bench) -> None:
    """The statement's snapshot still shows what it deletes."""
    holder = bench.holder()
    bench.publish(new_event(KEY))
    holder.take(LANE)
    [delivery] = holder.claim()
    reply = holder.exchange(finished=[delivery])
    assert reply.deleted == {delivery.id}
    assert reply.startable == reply.prefetched == []


def test_every_kind_of_handler_runs_once(bus: RelayBus, effects: Engine) -> None:
    runs = Runs()

    @bus.handler("made", name="coroutine")
    async def coroutine(event: Event, context: Context) -> None:
        await asyncio.sleep(0)
        runs.add("coroutine", event.payload["n"], context.attempt, context.handler)

    @bus.handler("made", name="plain")
    def plain(event: Event, context: Context) -> None:
        runs.add("plain", event.payload["n"], context.attempt, context.handler)

    @bus.handler("made", name="session", mode="transactional")
    def with_session(event: Event, session: Session) -> None:
        session.execute(INSERT, {"n": event.payload["n"], "what": "session"})

    @bus.handler("made", name="connection", mode="transactional")
    def with_connection(event: Event, connection: Connection) -> None:
        connection.execute(INSERT, {"n": event.payload["n"], "what": "connection"})

    for n in range(40):
        publish(bus, effects, "made", {"n": n}, key=f"k{n % 7}" if n % 2 else None)
    with working(bus, effects):
        drained(bus, effects)
    for name in ("coroutine", "plain"):
        mine = sorted(row for row in runs.rows if row[0] == name)
        assert mine == [(name, n, 1, name) for n in range(40)]
    assert written(effects) == [(n, what) for n in range(40) for what in ("connection", "session")]


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


# -- a worker that is gone -------------------------------------------------------------------------


def test_a_killed_worker_is_replaced(
    app: Path, bus: RelayBus, engine: Engine, database_url: str
) -> None:
    """After its lease, and no attempt is counted for what it had started."""
    publish(bus, engine, "slow", 600)
    publish(bus, engine, "slow", *[0.3] * 5, key="k")
    options = (*QUICK, "--concurrency", "3")
    with worker_process(app, *options, url=database_url) as first:
        first.until(lambda: noted(app, "began", 600) and noted(app, "began", 0.3))
        first.signal(signal.SIGKILL)
        first.wait()
        killed = time.monotonic()
        with worker_process(app, *options, url=database_url) as second:
            second.until(lambda: len(noted(app, "began", 600, 1)) == 2)
            assert time.monotonic() - killed < 2 + 10
            second.until(lambda: ready(bus, engine) == 1)
            assert "took over lane" in second.output
            pid = str(second.process.pid)
    mine = [int(row[2]) for row in noted(app, "began", 0.3) if row[-1] == pid]
    assert 4 <= len(mine) <= 5
    assert set(mine) == {1}
    eventually(lambda: not suspects(bus, engine) - {"slow:600"})  # what ended is suspect no more
