"""A failing handler is tried again, with growing pauses; in the end its event is a dead letter.

Whatever a handler raises is one failed attempt. The write that reschedules the delivery counts it
and moves the row to the parked ones, in one statement; one that is due is moved back with its id.
Requeueing a dead letter gives it a whole budget once, whoever does it at the same time.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from typing import Any

import pytest
from sqlalchemy import Engine, select, text, union_all, update
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from sqlalchemy_relaybus import (
    Bury,
    Context,
    Event,
    Exponential,
    Fixed,
    NoRetry,
    RelayBus,
    Retry,
    Snooze,
)
from sqlalchemy_relaybus.stores import store_for
from sqlalchemy_relaybus.worker import dispatch
from tests.support.stores import Bench, ids, key_on, new_event, parked, waiting
from tests.support.workers import (
    Runs,
    dead,
    drained,
    eventually,
    publish,
    steal,
    working,
)
from tests.support.workers import waiting as scheduled

LANE = 7
KEY, OTHER_KEY = key_on(LANE), key_on(LANE, 1)
SOON = Fixed(wait=0.02, max_attempts=3)


@pytest.fixture
def bus() -> RelayBus:
    return RelayBus()


# -- with the store --------------------------------------------------------------------------------


def test_what_is_not_due_is_not_moved(bench: Bench) -> None:
    holder = bench.holder()
    bench.publish(new_event(KEY), new_event(OTHER_KEY))
    holder.take(LANE)
    later, never = holder.claim()
    holder.park(parked(later, delay=3600), parked(never, "dead", delay=None))
    assert holder.promote() == []
    assert bench.parked() == ids([later, never])


def test_requeueing_twice_at_once_has_one_effect(bench: Bench) -> None:
    holder = bench.holder()
    bench.publish(new_event(KEY), new_event(OTHER_KEY))
    holder.take(LANE)
    dead, waits = holder.claim()
    holder.park(parked(dead, "dead", delay=None), parked(waits))
    first, second = bench.connect(), bench.connect()
    both = ids([dead, waits])
    assert bench.store.requeue(first, both) == {dead.id}
    with waiting(second, lambda: bench.store.requeue(second, both)) as late:
        first.commit()
        assert late.result() == set()
    second.commit()
    [again] = holder.claim()
    assert (again.id, again.attempts) == (dead.id, 0)
    assert again.claims == dead.claims + 2  # parked once, requeued once


def test_parking_steps_over_a_locked_delivery_and_says_so(bench: Bench) -> None:
    holder = bench.holder()
    bench.publish(new_event(KEY), new_event(OTHER_KEY))
    holder.take(LANE)
    locked, free = holder.claim()
    with bench.connect() as other:
        bench.lock_delivery(other, locked.id)
        reply = bench.store.park(holder.connection, holder.id, [parked(locked), parked(free)])
        assert reply == ({free.id}, {locked.id})


def test_promoting_steps_over_a_row_that_an_operator_has_locked(bench: Bench) -> None:
    holder = bench.holder()
    bench.publish(new_event(KEY), new_event(OTHER_KEY))
    holder.take(LANE)
    first, second = holder.claim()
    holder.park(parked(first, delay=0), parked(second, delay=0))
    rows = bench.tables.parked
    with bench.connect() as other:
        other.execute(select(rows.c.id).where(rows.c.id == first.id).with_for_update())
        assert holder.promote() == [LANE]
    assert bench.parked() == [first.id]


# -- what handlers raise ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["async", "plain", "transactional"])
def test_retry_snooze_and_bury(bus: RelayBus, engine: Engine, kind: str) -> None:
    runs = Runs()

    def step(event: Event, context: Context) -> None:
        what = event.payload
        mine = [row for row in runs.rows if row[0] == what]
        runs.add(what, context.attempt, context.idempotency_key, time.monotonic())
        if what == "retry" and not mine:
            raise Retry(0.3)
        if what == "snooze" and len(mine) < 2:
            raise Snooze(0.15)
        if what == "bury":
            raise Bury("no such\x00customer \ud800")
        if what == "error" and len(mine) < 2:
            raise RuntimeError("once more")

    if kind == "async":

        @bus.handler("step", name="h", retry=SOON)
        async def coroutine(event: Event, context: Context) -> None:
            step(event, context)

    elif kind == "plain":
        bus.handler("step", name="h", retry=SOON)(step)
    else:

        @bus.handler("step", name="h", retry=SOON, mode="transactional")
        def transactional(event: Event, context: Context, session: Session) -> None:
            session.execute(text("SELECT 1"))
            step(event, context)

    publish(bus, engine, "step", "retry", "snooze", "bury", "error", "good")
    with working(bus, engine):
        drained(bus, engine)
    attempts = {
        what: [row[1] for row in runs.rows if row[0] == what]
        for what in ("retry", "snooze", "bury", "error", "good")
    }
    assert attempts == {
        "retry": [1, 2],
        "snooze": [1, 1, 1],
        "bury": [1],
        "error": [1, 2, 3],
        "good": [1],
    }
    assert len({row[2] for row in runs.rows}) == 5  # one idempotency key a delivery
    for what, least in (("retry", 0.3), ("snooze", 0.15), ("error", 0.02)):
        times = [row[3] for row in runs.rows if row[0] == what]
        assert all(later - earlier >= least for earlier, later in itertools.pairwise(times))
    (letter,) = dead(bus, engine)
    assert (letter.attempts, letter.last_error) == (1, "no such\\x00customer \\ud800")


def test_the_waits_between_attempts_grow(bus: RelayBus, engine: Engine) -> None:
    runs = Runs()

    @bus.handler("step", name="h", retry=Exponential(base=0.1, factor=3, max_attempts=4, jitter=0))
    def h(event: Event) -> None:
        runs.add(time.monotonic())
        raise RuntimeError("never")

    publish(bus, engine, "step", 1)
    with working(bus, engine):
        eventually(lambda: dead(bus, engine))
    times = [row[0] for row in runs.rows]
    waits = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert len(times) == 4
    assert all(wait >= least for wait, least in zip(waits, (0.1, 0.3, 0.9), strict=True)), waits
    (letter,) = dead(bus, engine)
    assert (letter.attempts, letter.last_error) == (4, "RuntimeError: never")


class Broken(Exception):
    """An error whose text cannot be made."""

    def __str__(self) -> str:
        raise self.args[0]


ERRORS = [
    SystemExit(3),
    KeyboardInterrupt(),
    asyncio.CancelledError(),
    GeneratorExit(),
    Broken(ValueError("no text")),
    Broken(SystemExit(4)),
    RuntimeError("nul \x00 and surrogate \udfff"),
    RuntimeError("x" * 100_000),
    StopIteration(),
    TimeoutError("of the handler's own"),
]


@pytest.mark.parametrize("kind", ["async", "plain", "transactional", "async transactional"])
def test_whatever_is_raised_is_one_failed_attempt(
    bus: RelayBus, engine: Engine, database_url: str, kind: str
) -> None:
    runs = Runs()

    def fail(event: Event) -> None:
        runs.add(event.payload)
        if event.payload < len(ERRORS):
            raise ERRORS[event.payload]

    if kind == "async":

        @bus.handler("step", name="h", retry=NoRetry(), timeout=20)
        async def coroutine(event: Event) -> None:
            fail(event)

    elif kind == "plain":
        bus.handler("step", name="h", retry=NoRetry())(fail)
    elif kind == "async transactional":

        @bus.handler("step", name="h", retry=NoRetry(), mode="transactional")
        async def async_transactional(event: Event, session: AsyncSession) -> None:
            await session.execute(text("SELECT 1"))
            fail(event)

    else:

        @bus.handler("step", name="h", retry=NoRetry(), mode="transactional")
        def transactional(event: Event, session: Session) -> None:
            fail(event)

    publish(bus, engine, "step", *range(len(ERRORS)))
    with working(bus, engine, async_engine=create_async_engine(database_url)) as worker:
        letters = eventually(
            lambda: (rows := dead(bus, engine)) and len(rows) == len(ERRORS) and rows
        )
        publish(bus, engine, "step", 100)
        drained(bus, engine)
        assert worker.alive
    assert sorted(row[0] for row in runs.rows) == [*range(len(ERRORS)), 100]
    errors = [row.last_error for row in letters]
    assert errors[0] == "SystemExit: 3"
    assert errors[4] == "Broken (its text raised ValueError)"
    assert errors[5] == "Broken (its text raised SystemExit)"
    assert errors[6] == "RuntimeError: nul \\x00 and surrogate \\udfff"
    assert 1_900 < len(errors[7]) <= 2_000
    assert all(row.attempts == 1 for row in letters)


def test_a_task_of_a_handler_that_raises_systemexit(bus: RelayBus, engine: Engine) -> None:
    """It goes through the event loop, which has to go on for the others."""
    runs = Runs()

    async def leave() -> None:
        raise SystemExit(1)

    @bus.handler("step", name="h", retry=NoRetry())
    async def h(event: Event) -> None:
        if event.payload == 0:
            await asyncio.create_task(leave())
        await asyncio.sleep(0.01)
        runs.add(event.payload)

    publish(bus, engine, "step", *range(5))
    with working(bus, engine):
        eventually(lambda: len(dead(bus, engine)) == 1)
        drained(bus, engine)
        publish(bus, engine, "step", 5)
        drained(bus, engine)
    assert sorted(row[0] for row in runs.rows) == [1, 2, 3, 4, 5]


def test_outcomes_that_make_no_sense(bus: RelayBus, engine: Engine) -> None:
    """A policy that fails, a delay that no database holds, a reason that is no text."""
    asked: list[int] = []

    class Policy:
        max_attempts = 3

        def delay(self, attempt: int, jitter: float) -> float:
            asked.append(attempt)
            if attempt == 1:
                return float("nan")
            raise ZeroDivisionError("a policy of the application's own")

    @bus.handler("policy", name="policy", retry=Policy())
    def policy(event: Event) -> None:
        raise RuntimeError("fails")

    @bus.handler("far", name="far")
    async def far(event: Event) -> None:
        raise (Retry if event.payload else Snooze)(1e300)

    @bus.handler("bury", name="bury")
    async def bury(event: Event) -> None:
        raise Bury(None)  # type: ignore[arg-type]

    @bus.handler("lost", name="lost", retry=NoRetry())
    def lost(event: Event) -> Any:
        async def never() -> None:
            raise AssertionError

        return never()

    def attempts(handler: str) -> list[int]:
        """Of its deliveries, so far."""
        with engine.connect() as connection:
            rows = connection.execute(
                union_all(
                    *(
                        select(table.c.attempts).where(table.c.handler == handler)
                        for table in (bus.tables.deliveries, bus.tables.parked)
                    )
                )
            )
            return [attempts for (attempts,) in rows]

    publish(bus, engine, "policy", 1)
    publish(bus, engine, "far", 0, 1)
    publish(bus, engine, "bury", 1)
    publish(bus, engine, "lost", 1)
    with working(bus, engine):
        eventually(lambda: len(dead(bus, engine)) == 2)
        # where it waits for a minute
        eventually(lambda: attempts("policy") == [2])
        assert len(attempts("far")) == 2
    reasons = sorted(row.last_error for row in dead(bus, engine))
    assert reasons[0] == "None"
    assert "returned a coroutine" in reasons[1]
    assert asked == [1, 2]


def test_a_policy_that_cannot_tell_its_budget(bus: RelayBus, engine: Engine) -> None:
    """The failure is recorded all the same, and so is what comes after it."""
    broken = False
    runs = Runs()

    class Policy:
        @property
        def max_attempts(self) -> int:
            if broken:
                raise ZeroDivisionError("a policy of the application's own")
            return 5

        def delay(self, attempt: int, jitter: float) -> float:
            return 0

    @bus.handler("step", name="h", retry=Policy())
    def h(event: Event, context: Context) -> None:
        nonlocal broken
        broken = True
        runs.add(context.attempt)
        if context.attempt == 1:
            raise RuntimeError("fails")

    publish(bus, engine, "step", 1)
    with working(bus, engine) as worker:
        eventually(lambda: scheduled(bus, engine) == 1)
        parked = bus.tables.parked
        with engine.begin() as connection:
            connection.execute(update(parked).values(available_at=text("clock_timestamp()")))
        drained(bus, engine)
        assert worker.alive
    assert runs.rows == [(1,), (2,)]
    assert not dead(bus, engine)


# -- time limits -----------------------------------------------------------------------------------


def test_a_coroutine_past_its_time_limit(bus: RelayBus, engine: Engine) -> None:
    runs = Runs()

    @bus.handler("step", name="h", retry=SOON, timeout=0.2)
    async def h(event: Event, context: Context) -> None:
        assert context.deadline is not None
        assert 0 < context.deadline - time.monotonic() <= 0.2
        runs.add("began", context.attempt)
        if context.attempt == 1:
            await asyncio.sleep(30)
        runs.add("ended", context.attempt)

    publish(bus, engine, "step", 1)
    with working(bus, engine):
        drained(bus, engine)
    assert runs.rows == [("began", 1), ("began", 2), ("ended", 2)]


def test_a_plain_handler_past_its_time_limit(
    bus: RelayBus, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """Its thread is left behind; what it returns in the end counts for nothing."""
    runs, release = Runs(), threading.Event()

    @bus.handler("step", name="h", retry=SOON, timeout=0.2)
    def h(event: Event, context: Context) -> None:
        runs.add("began", event.payload, context.attempt)
        if event.payload == "slow" and context.attempt == 1:
            release.wait(30)
            runs.add("returned late")

    with working(bus, engine, threads=1):
        publish(bus, engine, "step", "slow", key="k")
        runs.wait(1)
        publish(bus, engine, "step", "other", "third", key="k")
        drained(bus, engine)
        release.set()
        eventually(lambda: ("returned late",) in runs.rows)
        # the only thread's place has been filled, and is there after the late return as well
        publish(bus, engine, "step", "last")
        drained(bus, engine)
    began = [row[1:] for row in runs.rows if row[0] == "began"]
    assert began == [("slow", 1), ("slow", 2), ("other", 1), ("third", 1), ("last", 1)]
    assert "its thread is left behind" in caplog.text


@pytest.mark.parametrize("how", ["fails", "dies", "takes too long", "fails its policy", "is lost"])
def test_a_logging_filter_that_raises_loses_no_outcome(
    bus: RelayBus, engine: Engine, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """What ended is told to the worker whether or not it can be logged."""
    runs, release, seen = Runs(), threading.Event(), list[str]()

    class Broken(Exponential):
        def delay(self, attempt: int, draw: float) -> float:
            raise ZeroDivisionError("a policy of the application's own")

    class Filter(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            if record.module != "dispatch":
                return True
            seen.append(record.getMessage())
            raise ValueError("a filter of the application's own")

    def plain(event: Event, context: Context) -> None:
        if runs.add(context.attempt) > 1:
            return
        if how == "is lost":
            steal(bus, engine, {LANE}, seconds=0.2)
        elif how == "takes too long":
            release.wait(30)
        else:
            raise RuntimeError("once")

    def transactional(event: Event, context: Context, session: Session) -> None:
        session.execute(text("SELECT 1"))
        plain(event, context)

    monkeypatch.setattr(dispatch, "_FALLBACK_DELAY", 0.02)
    if how == "is lost":
        bus.handler("step", name="h", mode="transactional")(transactional)
    else:
        policies: dict[str, Any] = {"dies": NoRetry(), "fails its policy": Broken()}
        bus.handler("step", name="h", retry=policies.get(how, SOON), timeout=0.2)(plain)
    filter = Filter()
    dispatch.log.addFilter(filter)
    try:
        publish(bus, engine, "step", 1, key=KEY)
        with working(bus, engine):
            drained(bus, engine)
            release.set()
    finally:
        dispatch.log.removeFilter(filter)
    assert seen
    second = 1 if how == "is lost" else 2
    assert runs.rows == ([(1,)] if how == "dies" else [(1,), (second,)])
    assert len(dead(bus, engine)) == (how == "dies")


# -- dead letters ----------------------------------------------------------------------------------


def test_a_buried_delivery_is_told_in_one_line_and_a_failed_one_with_its_traceback(
    bus: RelayBus, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    @bus.handler("step", name="h", retry=NoRetry())
    def h(event: Event) -> None:
        raise Bury("no address") if event.payload == "bury" else RuntimeError("broken")

    publish(bus, engine, "step", "bury", "fail")
    with working(bus, engine):
        eventually(lambda: len(dead(bus, engine)) == 2)
    told = {record.getMessage().partition(": ")[2]: record.exc_info for record in caplog.records}
    assert told["no address"] is None
    assert told["RuntimeError: broken"] is not None


def test_a_requeued_dead_letter_runs_again(bus: RelayBus, engine: Engine) -> None:
    runs, fixed = Runs(), threading.Event()

    @bus.handler("step", name="h", retry=Fixed(wait=0, max_attempts=2))
    def h(event: Event, context: Context) -> None:
        runs.add(event.payload, context.attempt)
        if not fixed.is_set():
            raise RuntimeError("broken")

    store = store_for("postgresql", bus.tables)
    publish(bus, engine, "step", 1, 2, key="k")
    with working(bus, engine):
        eventually(lambda: len(dead(bus, engine)) == 2)
        assert runs.rows == [(1, 1), (1, 2), (2, 1), (2, 2)]
        with engine.begin() as connection:  # still broken: it gets its whole budget again
            ids = [row.id for row in dead(bus, engine)]
            assert store.requeue(connection, ids[:1]) == set(ids[:1])
        runs.wait(6)
        eventually(lambda: len(dead(bus, engine)) == 2)
        fixed.set()
        with engine.begin() as connection:
            assert store.requeue(connection, ids) == set(ids)
        drained(bus, engine)
        eventually(lambda: not dead(bus, engine))
    assert runs.rows[4:] == [(1, 1), (1, 2), (1, 1), (2, 1)]
