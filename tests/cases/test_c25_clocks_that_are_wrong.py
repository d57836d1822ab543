"""Workers and publishers whose clocks are wrong, and jump.

Elsewhere times of the process's clock were compared with the database's, so pauses before a retry
shrank to nothing, or a lease that was alive looked run out.

Right is: the database's clock decides what is due, whose lease has run out, and how old something
is; a process only measures how long something took. So wrong clocks change nothing.

The clocks of the processes here are shifted in Python, by a ``sitecustomize`` that is loaded before
anything else: ``time.time``, ``time.time_ns`` and ``datetime.now`` and its kind. Nothing else in
these processes reads the calendar for the library, which is pure Python: what psycopg and libpq
measure are their own time-outs, and these are differences. The monotonic clock stays as it is, as
it does when a machine's time is set. One test makes sure that the shift reaches the library.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, func, select, text

from sqlalchemy_relaybus import RelayBus
from tests.support.ledger import NOTE, Row, ledger
from tests.support.workers import (
    ROOT,
    dead,
    drained,
    eventually,
    publish,
    terminated,
    waiting,
    worker_process,
)

SITECUSTOMIZE = """
import datetime, os, pathlib, time

import psycopg  # its C code wants the real type to be in its place

REAL, REAL_NS, REAL_DATETIME = time.time, time.time_ns, datetime.datetime
PATH = pathlib.Path(os.environ["SHIFT"])

def shift():
    return int(PATH.read_text())

class Kind(type):
    def __instancecheck__(cls, instance):
        return isinstance(instance, REAL_DATETIME)

    def __subclasscheck__(cls, other):
        return issubclass(other, REAL_DATETIME)

class Shifted(REAL_DATETIME, metaclass=Kind):
    @classmethod
    def now(cls, tz=None):
        return REAL_DATETIME.now(tz) + datetime.timedelta(seconds=shift())

    @classmethod
    def utcnow(cls):
        return cls.now(datetime.timezone.utc).replace(tzinfo=None)

    @classmethod
    def today(cls):
        return cls.now()

time.time = lambda: REAL() + shift()
time.time_ns = lambda: REAL_NS() + shift() * 1_000_000_000
datetime.datetime = Shifted
"""
APP = """
from datetime import datetime

@bus.handler("clock", name="clock")
async def clock(event: Event, context: Context):
    note(f"clock-{datetime.now().timestamp():.0f}-{time.time():.0f}", event, context)

@bus.handler("long", name="long")
async def long(event: Event, context: Context):
    note("began", event, context)
    await asyncio.sleep(event.payload)
    note("ended", event, context)

RETRY = Exponential(base=1, factor=2, max_attempts=3, jitter=0)

@bus.handler("failing", name="failing", retry=RETRY)
async def failing(event: Event, context: Context):
    note("tried", event, context)
    raise RuntimeError("always")

@bus.handler("quick", name="quick")
async def quick(event: Event, context: Context):
    note("quick", event, context)
"""
LEASE = 3.0
OPTIONS = (
    *("--poll-interval", "0.01", "--max-poll-interval", "0.1", "--grace", "10"),
    *("--lease-duration", f"{LEASE:g}"),
)
MINUTES = 60
#: What a busy machine may be late, seconds: far less than any clock here is wrong.
LATE = 20.0


class Clocks:
    """Directories in which processes have a clock of their own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "app.py").write_text(NOTE + APP)
        (directory / "sitecustomize.py").write_text(SITECUSTOMIZE)

    def set(self, name: str, minutes: float) -> dict[str, str]:
        """Set the clock *name*; the variables of a process that goes by it."""
        path = self.directory / f"shift-{name}"
        beside = self.directory / f"shift-{name}.new"
        beside.write_text(f"{minutes * MINUTES:.0f}")
        beside.replace(path)  # never empty
        return {"SHIFT": str(path), "PYTHONPATH": f"{self.directory}:{ROOT}"}

    def run(self, minutes: float, code: str, *arguments: str) -> str:
        """Run *code* by a clock that is so wrong; what it prints."""
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env={"PATH": "", **self.set("run", minutes)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def clocks(tmp_path: Path) -> Clocks:
    return Clocks(tmp_path)


@pytest.fixture
def bus() -> RelayBus:
    bus = RelayBus()
    for type in ("clock", "long", "failing", "quick"):
        bus.route(type, to=[type])
    return bus


def leases(engine: Engine) -> list[float]:
    """How long each lease has still to live, by the database's clock, seconds."""
    query = text(
        "SELECT extract(epoch FROM lease_expires_at - clock_timestamp())::float "
        "FROM relaybus_lanes WHERE holder IS NOT NULL"
    )
    with engine.connect() as connection:
        return list(connection.scalars(query))


def pauses(bus: RelayBus, engine: Engine) -> dict[UUID, float]:
    """From when each parked delivery was parked until it is due, seconds."""
    parked = bus.tables.parked
    pause = func.extract("epoch", parked.c.available_at - parked.c.parked_at)
    query = select(parked.c.event_id, pause).where(parked.c.available_at.is_not(None))
    with engine.connect() as connection:
        return {id: float(seconds) for id, seconds in connection.execute(query)}


def tries(rows: list[Row], id: UUID) -> list[float]:
    return [row.at for row in rows if row.event == id]


def test_the_shift_reaches_the_library(
    clocks: Clocks, bus: RelayBus, engine: Engine, database_url: str
) -> None:
    """The ids of events begin with a time, by which they are only spread; it is the wrong one."""
    code = "from sqlalchemy_relaybus.codec import new_event_id; print(new_event_id().int >> 80)"
    wrong = int(clocks.run(-10, code)) / 1000 - datetime.now(UTC).timestamp()
    assert abs(wrong + 10 * MINUTES) < 3 * LATE
    with worker_process(
        clocks.directory, *OPTIONS, url=database_url, environment=clocks.set("one", 10)
    ) as worker:
        publish(bus, engine, "clock", 1)
        worker.until(lambda: ledger(clocks.directory))
        _, *told = ledger(clocks.directory)[0].what.split("-")
        for each in told:
            assert int(each) - datetime.now(UTC).timestamp() > 10 * MINUTES - 3 * LATE
        assert terminated(worker) == 0


def test_leases_and_pauses_of_workers_with_wrong_clocks(
    clocks: Clocks, bus: RelayBus, engine: Engine, database_url: str
) -> None:
    """One is early and jumps back, one is late and jumps forward, while leases are renewed."""
    directory = clocks.directory
    with (
        worker_process(
            directory, *OPTIONS, url=database_url, environment=clocks.set("one", 10)
        ) as one,
        worker_process(
            directory, *OPTIONS, url=database_url, environment=clocks.set("two", -10)
        ) as two,
    ):
        for worker in (one, two):
            worker.until_started()
        long = publish(bus, engine, "long", *[2 * LEASE] * 10)
        failing = publish(bus, engine, "failing", *range(10))
        one.until(lambda: len(ledger(directory, "began")) == 10)
        seen: dict[UUID, set[float]] = {event.id: set() for event in failing}

        def watch() -> bool:
            assert all(left <= LEASE for left in leases(engine))
            for id, seconds in pauses(bus, engine).items():
                seen[id].add(seconds)
            return len(ledger(directory, "tried")) == 30

        eventually(lambda: watch() or len(ledger(directory, "tried")) >= 20)
        clocks.set("one", -10)
        clocks.set("two", 10)
        eventually(watch)
        one.until(lambda: len(ledger(directory, "ended")) == 10)
        drained(bus, engine)
        for worker in (one, two):
            assert terminated(worker) == 0
            assert "lost the lease" not in worker.output
            assert "took over" not in worker.output
    began = ledger(directory, "began")
    assert sorted(row.event for row in began) == sorted(event.id for event in long)  # each once
    tried = ledger(directory, "tried")
    for event in failing:
        first, second = (later - earlier for earlier, later in pairwise(tries(tried, event.id)))
        assert 1 <= first < 1 + LATE
        assert 2 <= second < 2 + LATE
    stored = {pause for found in seen.values() for pause in found}
    assert stored
    # both times are read from the database's clock, by one statement
    assert all(min(abs(pause - 1), abs(pause - 2)) < 0.5 for pause in stored)
    assert len(dead(bus, engine)) == 10
    with engine.connect() as connection:
        oldest = connection.scalar(
            text("SELECT max(abs(extract(epoch FROM now() - parked_at))) FROM relaybus_parked")
        )
    assert oldest is not None
    assert oldest < 5 * MINUTES


@pytest.mark.parametrize("minutes", [10, pytest.param(-10, marks=pytest.mark.long)])
def test_a_dead_worker_is_replaced_after_its_lease(
    clocks: Clocks, bus: RelayBus, engine: Engine, database_url: str, minutes: int
) -> None:
    """Its clock was right; that of the one which takes over is wrong."""
    directory = clocks.directory
    publish(bus, engine, "long", 600)
    environment = clocks.set("one", 0)
    with worker_process(directory, *OPTIONS, url=database_url, environment=environment) as one:
        one.until(lambda: ledger(directory, "began"))
        environment = clocks.set("two", minutes)
        with worker_process(directory, *OPTIONS, url=database_url, environment=environment) as two:
            two.until_started()
            # it has taken lanes, and so has looked at all of them
            two.until(
                lambda: (
                    publish(bus, engine, "quick", 1)
                    and any(row.pid == two.process.pid for row in ledger(directory, "quick"))
                )
            )
            assert len(ledger(directory, "began")) == 1
            assert one.process.poll() is None
            one.signal(signal.SIGKILL)
            one.wait()
            assert all(left <= LEASE for left in leases(engine))
            two.until(lambda: len(ledger(directory, "began")) == 2)
            assert terminated(two) == 0


PUBLISHER = """
import sys
from datetime import timedelta
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from sqlalchemy_relaybus import RelayBus, purge

url, what = sys.argv[1:]
bus = RelayBus()
bus.route("quick", to=["quick"])
engine = create_engine(url)
if what == "publish":
    with Session(engine) as session, session.begin():
        bus.publish(session, "quick", "now")
        bus.publish(session, "quick", "delayed", delay=timedelta(seconds=3))
        bus.publish(session, "quick", "later", delay=timedelta(hours=1))
else:
    age = timedelta(minutes=5)
    result = purge(engine, bus, events_older_than=age, dead_older_than=age)
    print(result.events, result.dead)
engine.dispose()
"""


@pytest.mark.parametrize(
    ("publishing", "working", "purging"),
    [
        (-10, -10, 10),  # where a mistake would do harm: run at once, purge too early
        pytest.param(10, 10, -10, marks=pytest.mark.long),
    ],
)
def test_delays_and_ages(
    clocks: Clocks,
    bus: RelayBus,
    engine: Engine,
    database_url: str,
    publishing: int,
    working: int,
    purging: int,
) -> None:
    """Of a publisher, and of a purge, whose clock is wrong by more than the ages asked for."""
    directory = clocks.directory
    clocks.run(publishing, PUBLISHER, database_url, "publish")
    delays = sorted(pauses(bus, engine).values())
    assert delays == [pytest.approx(3, abs=0.5), pytest.approx(3600, abs=0.5)]
    environment = clocks.set("one", working)
    with worker_process(directory, *OPTIONS, url=database_url, environment=environment) as worker:
        publish(bus, engine, "failing", 1)
        worker.until(lambda: len(ledger(directory, "quick")) == 2)
        eventually(lambda: dead(bus, engine))
        assert waiting(bus, engine) == 1
        assert terminated(worker) == 0
    assert [row.payload for row in ledger(directory, "quick")] == ["now", "delayed"]

    def purged() -> list[str]:
        return clocks.run(purging, PUBLISHER, database_url, "purge").split()

    assert purged() == ["0", "0"]
    _age(engine, "relaybus_events", "created_at", timedelta(minutes=4))
    _age(engine, "relaybus_parked", "parked_at", timedelta(minutes=4))
    assert purged() == ["0", "0"]
    _age(engine, "relaybus_events", "created_at", timedelta(minutes=2))
    _age(engine, "relaybus_parked", "parked_at", timedelta(minutes=2))
    assert purged() == ["3", "1"]  # all but what is still to come


def _age(engine: Engine, table: str, column: str, by: timedelta) -> Any:
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE {table} SET {column} = {column} - :by"), {"by": by})
