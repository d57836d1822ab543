"""Handlers that leave no time for anything else in their process.

Elsewhere heartbeats shared the thread or the event loop with handlers, so a worker that was only
busy looked dead, and its work was run a second time beside it.

Right is: a handler that sleeps, computes in Python or blocks the event loop costs no lease,
however long. One that holds the interpreter's lock in a C function stops every thread, the
renewing one too. Then the lease may be lost; but what the worker reports too late is refused and
told, and the event is delivered again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from sqlalchemy_relaybus import RelayBus
from tests.support.ledger import NOTE, ledger
from tests.support.workers import (
    dead,
    drained,
    eventually,
    held_lanes,
    publish,
    ready,
    terminated,
    worker_process,
)

APP = """
import ctypes

def until(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass

@bus.handler("sleeping", name="sleeping")
def sleeping(event: Event, context: Context):
    note("began", event, context)
    time.sleep(event.payload)
    note("ended", event, context)

@bus.handler("computing", name="computing")
def computing(event: Event, context: Context):
    note("began", event, context)
    until(event.payload)
    note("ended", event, context)

@bus.handler("blocking", name="blocking")
async def blocking(event: Event, context: Context):
    note("began", event, context)
    time.sleep(event.payload)
    note("ended", event, context)

@bus.handler("locking", name="locking")
def locking(event: Event, context: Context):
    note("began", event, context)
    if context.fence == 1:
        ctypes.PyDLL(None).sleep(event.payload)  # in contrast to CDLL it keeps the lock
    else:
        while not pathlib.Path("finish").exists():
            time.sleep(0.01)
    note("ended", event, context)

@bus.handler("quick", name="quick")
def quick(event: Event, context: Context):
    note("quick", event, context)
"""
TYPES = ("sleeping", "computing", "blocking", "locking", "quick")

#: lease, and how long the handlers take, seconds
LENGTHS = [
    (3, 7),
    pytest.param(5, 20, marks=[pytest.mark.long, pytest.mark.timeout(300)]),
]


@pytest.fixture
def bus() -> RelayBus:
    bus = RelayBus()
    for type in TYPES:
        bus.route(type, to=[type])
    return bus


@pytest.fixture
def app(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "app.py").write_text(NOTE + APP)
    yield tmp_path
    (tmp_path / "finish").touch()


def options(lease: int) -> tuple[str, ...]:
    return (
        *("--poll-interval", "0.01", "--max-poll-interval", "0.1", "--grace", "10"),
        *("--lease-duration", str(lease), "--lane-linger", "0"),
    )


@pytest.mark.parametrize(("lease", "length"), LENGTHS)
def test_a_busy_worker_keeps_its_leases(
    app: Path, bus: RelayBus, engine: Engine, database_url: str, lease: int, length: int
) -> None:
    """All three kinds at once, beside a worker that has nothing to do but to take over."""
    kinds = ("sleeping", "computing", "blocking")
    with worker_process(app, *options(lease), url=database_url) as first:
        first.until_started()
        for kind in kinds:
            publish(bus, engine, kind, length)
        first.until(lambda: len(ledger(app, "began")) == 3)
        with worker_process(app, *options(lease), url=database_url) as second:
            second.until_started()
            second.until(lambda: len(ledger(app, "ended")) == 3, limit=length + 30)
            drained(bus, engine)
            for worker in (first, second):
                assert terminated(worker) == 0
                assert "lost the lease" not in worker.output
                assert "took over" not in worker.output
    assert sorted(row.handler for row in ledger(app, "began")) == sorted(kinds)
    assert {row.pid for row in ledger(app)} == {first.process.pid}
    assert {row.attempt for row in ledger(app)} == {1}


@pytest.mark.parametrize(("lease", "length"), LENGTHS)
def test_a_worker_that_stood_still_is_refused(
    app: Path, bus: RelayBus, engine: Engine, database_url: str, lease: int, length: int
) -> None:
    with worker_process(app, *options(lease), url=database_url) as first:
        first.until_started()
        publish(bus, engine, "locking", length)
        first.until(lambda: ledger(app, "began"))
        with worker_process(app, *options(lease), url=database_url) as second:
            second.until(lambda: len(ledger(app, "began")) == 2, limit=length + 30)
            assert "took over lane" in second.output
            # the first returns while the second is at it, and reports
            first.until(lambda: ledger(app, "ended"), limit=length + 30)
            first.until(lambda: "lost the lease" in first.output)
            publish(bus, engine, "quick", 1)
            eventually(lambda: ledger(app, "quick") and ready(bus, engine) == 1)
            (app / "finish").touch()
            second.until(lambda: len(ledger(app, "ended")) == 2)
            drained(bus, engine)
            eventually(lambda: not held_lanes(bus, engine))
            for worker in (first, second):
                assert terminated(worker) == 0
    began = ledger(app, "began")
    assert [row.pid for row in began] == [first.process.pid, second.process.pid]
    assert [row.attempt for row in began] == [1, 1]  # a lost lease is no attempt
    assert not dead(bus, engine)
