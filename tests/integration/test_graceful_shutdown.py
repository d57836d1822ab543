"""A stopping worker hands its work over at once.

It claims nothing more, gives back uncharged what has not begun, hands back every lane on which
nothing runs, and lets what runs end within its grace. Then coroutines are cancelled, the rest of
the lanes is handed back and its entry among the live workers removed: nobody waits for a lease.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from sqlalchemy_relaybus import Context, Event, RelayBus
from sqlalchemy_relaybus.lanes import lane_of
from sqlalchemy_relaybus.testing.server import PrivatePostgres, private_postgres
from tests.support.application import QUICK, application_bus, listed, noted
from tests.support.databases import SETTINGS
from tests.support.proxy import proxy_to
from tests.support.stores import Bench, key_on
from tests.support.workers import (
    Runs,
    drained,
    eventually,
    held_lanes,
    publish,
    ready,
    terminated,
    worker_process,
    working,
)

LANE = 7
KEY, OTHER_KEY = key_on(LANE), key_on(LANE, 1)


@pytest.fixture
def bus() -> RelayBus:
    """It publishes to the application, too."""
    return application_bus()


@pytest.fixture
def own_server() -> Iterator[PrivatePostgres]:
    """A server that may be stopped."""
    with private_postgres(SETTINGS) as server:
        yield server


# -- what has not begun ----------------------------------------------------------------------------


def test_stop_gives_back_what_has_not_begun(
    bus: RelayBus, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    runs, release = Runs(), threading.Event()
    caplog.set_level(logging.INFO)

    @bus.handler("step", name="h")
    def h(event: Event, context: Context) -> None:
        runs.add(event.payload, context.attempt)
        release.wait(30)

    publish(bus, engine, "step", *range(20))
    publish(bus, engine, "step", *range(20, 40), key="k")
    with working(bus, engine, threads=2, concurrency=10) as worker:
        runs.wait(2)
        worker.worker.stop()
        threading.Timer(0.3, release.set).start()
        assert worker.stop() is True
    assert len(runs) == 2
    assert ready(bus, engine) == 38
    release.set()
    with working(bus, engine):
        drained(bus, engine)
    assert sorted(runs.rows) == [(n, 1) for n in range(40)]
    keyed = [n for n, _ in runs.rows if n >= 20]
    assert keyed == sorted(keyed)


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


def test_handing_back_steps_over_a_lane_that_somebody_has_locked(bench: Bench) -> None:
    holder = bench.holder()
    holder.take(1, 2)
    with bench.connect() as other:
        bench.lock_lane(other, 1)
        back = bench.store.relinquish(holder.connection, holder.id, list(holder.leases.values()))
    assert back == {2}
    assert bench.lane(1).holder == holder.id


# -- processes and signals -------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(
    app: Path, bus: RelayBus, engine: Engine, database_url: str, number: signal.Signals
) -> None:
    publish(bus, engine, "quick", *range(20))
    with worker_process(app, *QUICK, url=database_url) as worker:
        worker.until(lambda: len(noted(app, "quick")) == 20)
        publish(bus, engine, "slow", 1)
        worker.until(lambda: noted(app, "began", 1))
        worker.signal(number)
        assert worker.wait() == 0
        assert "Traceback" not in worker.output
    assert noted(app, "ended", 1, 1)  # what ran was let end, and is completed
    assert ready(bus, engine) == 0
    assert not held_lanes(bus, engine)
    assert listed(bus, engine) == 0


def test_a_stuck_plain_handler(app: Path, bus: RelayBus, engine: Engine, database_url: str) -> None:
    """Gone within the grace, with code 3; the delivery and its lane are free for others."""
    publish(bus, engine, "stuck", 1)
    publish(bus, engine, "slow", 0.5)
    with worker_process(app, *QUICK, "--grace", "3", url=database_url) as worker:
        worker.until(lambda: noted(app, "stuck") and noted(app, "began"))
        began = time.monotonic()
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 3
        assert 1.5 < time.monotonic() - began < 3.5
        assert "1 handlers still running" in worker.output
    assert noted(app, "ended")
    assert ready(bus, engine) == 1
    assert not held_lanes(bus, engine)
    assert listed(bus, engine) == 0
    with worker_process(app, *QUICK, url=database_url) as worker:  # uncharged, and at once
        worker.until(lambda: noted(app, "stuck", 1, 1)[1:])


def test_stuck_coroutines(app: Path, bus: RelayBus, engine: Engine, database_url: str) -> None:
    """One is cancelled and given back: code 0. One that ignores that is left behind: code 3."""
    publish(bus, engine, "slow", 600)
    with worker_process(app, *QUICK, "--grace", "1", url=database_url) as worker:
        worker.until(lambda: noted(app, "began"))
        assert terminated(worker) == 0
        assert "Traceback" not in worker.output
    assert ready(bus, engine) == 1
    assert not held_lanes(bus, engine)
    publish(bus, engine, "stubborn", 1)
    with worker_process(app, *QUICK, "--grace", "1", url=database_url) as worker:
        worker.until(lambda: noted(app, "stubborn") and noted(app, "began", 600, 1)[1:])
        assert terminated(worker) == 3
        assert "Traceback" not in worker.output
    assert ready(bus, engine) == 2
    assert not held_lanes(bus, engine)


def test_a_second_signal_ends_at_once(
    app: Path, bus: RelayBus, engine: Engine, database_url: str
) -> None:
    publish(bus, engine, "stuck", 1)
    with worker_process(app, *QUICK, "--grace", "60", url=database_url) as worker:
        worker.until(lambda: noted(app, "stuck"))
        worker.signal(signal.SIGTERM)
        eventually(lambda: listed(bus, engine) == 1)
        time.sleep(0.2)
        assert worker.process.poll() is None
        worker.signal(signal.SIGINT)
        assert worker.wait(5) == 128 + signal.SIGINT


def test_a_thread_that_a_handler_left(
    app: Path, bus: RelayBus, engine: Engine, database_url: str
) -> None:
    publish(bus, engine, "thread", 1)
    with worker_process(app, *QUICK, url=database_url) as worker:
        worker.until(lambda: noted(app, "thread"))
        drained(bus, engine)
        assert terminated(worker) == 0


# -- a database that does not answer ---------------------------------------------------------------


def test_stopped_while_the_database_is_away(app: Path, own_server: PrivatePostgres) -> None:
    url = own_server.create_database("shop")
    with worker_process(app, *QUICK, "--grace", "2", "--setup", url=url) as worker:
        worker.until_started()
        own_server.stop("immediate")
        worker.until(lambda: "the database failed" in worker.output)
        began = time.monotonic()
        assert terminated(worker) == 3
        assert time.monotonic() - began < 5
        assert "Traceback" not in worker.output


def test_a_network_that_swallows_everything(
    app: Path, bus: RelayBus, engine: Engine, database_url: str, short_path: Path
) -> None:
    """The pump hangs in a statement; the process is gone soon after its grace all the same."""
    with (
        proxy_to(database_url, short_path) as proxy,
        worker_process(app, *QUICK, "--grace", "1", url=proxy.url) as worker,
    ):
        publish(bus, engine, "quick", 1)
        worker.until(lambda: noted(app, "quick"))
        proxy.stall()
        began = time.monotonic()
        assert terminated(worker) == 3
        assert time.monotonic() - began < 4
        assert "does not end within its grace" in worker.output
