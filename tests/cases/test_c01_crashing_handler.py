"""A handler that takes its whole process down.

Elsewhere such a job was picked up again after every restart, far beyond its limit, since nobody
was left to count; or an error that is no `Exception` left the worker in an invalid state.

Right is: the one that does it goes to the dead letters after a bounded number of crashes, although
nothing is written when it is claimed; everything that ran beside it completes; and the exceptions
that end programs end no worker.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from sqlalchemy import Engine

from sqlalchemy_relaybus import RelayBus
from tests.support.workers import (
    WorkerProcess,
    dead,
    drained,
    eventually,
    publish,
    ready,
    terminated,
    worker_process,
)

APP = """
import asyncio, os, signal
from sqlalchemy_relaybus import Context, Event, Fixed, RelayBus

bus = RelayBus()

def note(event, context):
    with open("ledger", "a") as file:
        print(event.key, event.payload, context.attempt, os.getpid(), file=file)

@bus.handler("step", name="step", retry=Fixed(wait=0, max_attempts=3))
async def step(event: Event, context: Context):
    note(event, context)
    await asyncio.sleep(0.01)  # others run beside it
    match event.payload:
        case "exit":
            os._exit(139)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "SystemExit":
            raise SystemExit(3)
        case "KeyboardInterrupt":
            raise KeyboardInterrupt
        case "CancelledError":
            raise asyncio.CancelledError

@bus.handler("plain", name="plain", retry=Fixed(wait=0, max_attempts=3))
def plain(event: Event, context: Context):
    note(event, context)
    match event.payload:
        case "exit":
            os._exit(139)
        case "SystemExit":
            raise SystemExit(3)
        case "KeyboardInterrupt":
            raise KeyboardInterrupt
"""
QUICK = (
    *("--poll-interval", "0.01", "--max-poll-interval", "0.1"),
    *("--lease-duration", "1", "--grace", "10"),
)


@pytest.fixture
def bus() -> RelayBus:
    bus = RelayBus()
    for name in ("step", "plain"):
        bus.handler(name, name=name)(lambda event: None)
    return bus


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


def ledger(app: Path) -> list[list[str]]:
    return [line.split() for line in (app / "ledger").read_text().splitlines()]


def ended(worker: WorkerProcess) -> bool:
    return worker.process.poll() is not None


def restarted(app: Path, bus: RelayBus, engine: Engine, url: str, *options: str) -> int:
    """Start a worker again whenever it dies, until all is done; how often it died."""
    crashes = 0
    while True:
        with worker_process(app, *QUICK, *options, url=url) as worker:
            eventually(lambda: ended(worker) or not ready(bus, engine))
            if not ended(worker):
                drained(bus, engine)
                assert terminated(worker) == 0
                return crashes
            crashes += 1
            assert crashes < 20, "it goes on for ever"


@pytest.mark.parametrize(
    ("type", "how", "batch"),
    [
        ("step", "exit", 200),
        ("plain", "exit", 10),
        pytest.param("step", "exit", 1, marks=pytest.mark.long),
        pytest.param("step", "kill", 10, marks=pytest.mark.long),
        pytest.param("plain", "exit", 200, marks=pytest.mark.long),
    ],
)
def test_the_culprit_alone_is_dead(
    app: Path, bus: RelayBus, engine: Engine, database_url: str, type: str, how: str, batch: int
) -> None:
    publish(bus, engine, type, how, key="key-0")
    for n in range(200):
        publish(bus, engine, type, n, key=f"key-{n % 20}")

    crashes = restarted(app, bus, engine, database_url, "--batch", str(batch))

    (letter,) = dead(bus, engine)
    assert letter.last_error == (
        f"its worker died {crashes} times while it ran, in the end with nothing else running"
    )
    assert letter.attempts == 0
    runs = ledger(app)
    assert len([row for row in runs if row[1] == how]) == crashes
    # its 19 neighbours of other keys run beside it at most, and followers of any key after
    assert 3 <= crashes <= 2 + math.ceil(math.log2(200))
    completed: dict[str, list[int]] = {}
    for key, payload, attempt, _ in runs:
        assert attempt == "1"  # a crash is no attempt
        if payload != how:
            completed.setdefault(key, []).append(int(payload))
    for key, order in completed.items():
        last = dict.fromkeys(order)  # each once, where it ran first
        assert list(last) == sorted(last), key
        assert sorted(last) == list(range(int(key.removeprefix("key-")), 200, 20))


@pytest.mark.parametrize("type", ["step", "plain"])
def test_errors_that_end_programs_are_attempts(
    app: Path, bus: RelayBus, engine: Engine, database_url: str, type: str
) -> None:
    bad = ["SystemExit", "KeyboardInterrupt", *(["CancelledError"] if type == "step" else [])]
    publish(bus, engine, type, *bad)
    publish(bus, engine, type, *range(20))
    assert restarted(app, bus, engine, database_url) == 0
    letters = dead(bus, engine)
    assert sorted(letter.last_error.split(":")[0] for letter in letters) == sorted(bad)
    assert {letter.attempts for letter in letters} == {3}
    assert {row[1] for row in ledger(app)} == {*bad, *map(str, range(20))}
