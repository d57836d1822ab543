"""How handlers run and how their deliveries end, by a worker in this process."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from typing import Any

import pytest
from sqlalchemy import (
    JSON,
    Connection,
    Engine,
    cast,
    create_engine,
    delete,
    func,
    literal,
    select,
    text,
    update,
)
from sqlalchemy.orm import Session, sessionmaker

from sqlalchemy_relaybus import (
    Bury,
    Context,
    Event,
    Exponential,
    Fixed,
    NoRetry,
    RelayBus,
    RelayBusError,
    Retry,
    Snooze,
)
from sqlalchemy_relaybus.lanes import lane_of
from sqlalchemy_relaybus.stores import store_for
from tests.support.workers import (
    Runs,
    dead,
    drained,
    eventually,
    held_lanes,
    publish,
    ready,
    waiting,
    working,
)

SOON = Fixed(wait=0.02, max_attempts=3)


@pytest.fixture
def bus() -> RelayBus:
    return RelayBus()


@pytest.fixture
def effects(engine: Engine) -> Engine:
    """The engine, with a table for what transactional handlers write."""
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE effects (n int, what text)"))
    return engine


def payloads(bus: RelayBus, engine: Engine, status: str) -> list[Any]:
    """The payloads of the parked deliveries with *status*."""
    parked, events = bus.tables.parked, bus.tables.events
    query = select(cast(events.c.payload, JSON).label("payload")).where(
        parked.c.event_id == events.c.id, parked.c.status == status
    )
    with engine.connect() as connection:
        return list(connection.execute(query))


def written(engine: Engine) -> list[tuple[Any, ...]]:
    with engine.connect() as connection:
        query = text("SELECT n, what FROM effects ORDER BY n, what")
        return [tuple(row) for row in connection.execute(query)]


INSERT = text("INSERT INTO effects VALUES (:n, :what)")


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


@pytest.mark.parametrize("kind", ["async", "plain", "transactional"])
def test_whatever_is_raised_is_one_failed_attempt(bus: RelayBus, engine: Engine, kind: str) -> None:
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
    else:

        @bus.handler("step", name="h", retry=NoRetry(), mode="transactional")
        def transactional(event: Event, session: Session) -> None:
            fail(event)

    publish(bus, engine, "step", *range(len(ERRORS)))
    with working(bus, engine) as worker:
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

    class Policy:
        max_attempts = 3

        def delay(self, attempt: int, jitter: float) -> float:
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

    publish(bus, engine, "policy", 1)
    publish(bus, engine, "far", 0, 1)
    publish(bus, engine, "bury", 1)
    publish(bus, engine, "lost", 1)
    with working(bus, engine):
        eventually(lambda: waiting(bus, engine) == 3 and ready(bus, engine) == 0)
        eventually(lambda: len(dead(bus, engine)) == 2)
    reasons = sorted(row.last_error for row in dead(bus, engine))
    assert reasons[0] == "None"
    assert "returned a coroutine" in reasons[1]
    with engine.connect() as connection:
        attempts = connection.scalar(
            select(bus.tables.parked.c.attempts).where(bus.tables.parked.c.handler == "policy")
        )
    assert attempts == 2


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
        eventually(lambda: waiting(bus, engine) == 1)
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


@pytest.mark.parametrize("kind", ["session", "connection"])
def test_a_transactional_handler_past_its_time_limit(
    bus: RelayBus, effects: Engine, kind: str
) -> None:
    """Its late commit is refused with everything that it wrote."""
    runs, release = Runs(), threading.Event()

    def write(event: Event, context: Context, connection: Any) -> None:
        connection.execute(INSERT, {"n": context.attempt, "what": "first"})
        runs.add("began", context.attempt)
        if context.attempt == 1:
            release.wait(30)
        connection.execute(INSERT, {"n": context.attempt, "what": "second"})
        runs.add("ended", context.attempt)

    if kind == "session":

        @bus.handler("step", name="h", mode="transactional", retry=SOON, timeout=0.2)
        def with_session(event: Event, context: Context, session: Session) -> None:
            write(event, context, session)

    else:

        @bus.handler("step", name="h", mode="transactional", retry=SOON, timeout=0.2)
        def with_connection(event: Event, context: Context, connection: Connection) -> None:
            write(event, context, connection)

    publish(bus, effects, "step", 1)
    with working(bus, effects, pool_size=1):
        drained(bus, effects)
        assert written(effects) == [(2, "first"), (2, "second")]
        release.set()
        runs.wait(4)
        eventually(lambda: _idle_in_transaction(effects) == 0)
    assert written(effects) == [(2, "first"), (2, "second")]
    assert not dead(bus, effects)


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


def _idle_in_transaction(engine: Engine) -> int:
    query = text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
        "AND state LIKE 'idle in transaction%'"
    )
    with engine.connect() as connection:
        return connection.scalar(query) or 0


# -- transactional ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:transaction already deassociated")
@pytest.mark.parametrize(
    "how",
    [
        "commit",
        "hidden commit",
        "rollback",
        "close",
        "below",
        "text: COMMIT",
        "text: -- that is it\n /* all */ ; rollback",
        "text: COMMIT AND CHAIN",
        "text: SELECT 1; COMMIT",
        "hidden text: END",
        "connection text: COMMIT",
        "connection commit",
        "connection rollback",
        "hidden connection commit",
    ],
)
def test_a_handler_that_ends_its_own_transaction(bus: RelayBus, effects: Engine, how: str) -> None:
    runs = Runs()

    def end(event: Event, given: Any) -> None:
        runs.add(event.payload)
        given.execute(INSERT, {"n": 1, "what": "half"})
        with given.begin_nested():  # a savepoint is the handler's own affair
            given.execute(INSERT, {"n": 2, "what": "nested"})
        if event.payload == "good":
            return
        if how == "below":
            given.connection().commit()
        elif "text: " in how and not how.startswith("hidden"):
            given.execute(text(how.partition("text: ")[2]))
        elif how.startswith("hidden"):
            try:
                if "text" in how:
                    given.execute(text(how.partition("text: ")[2]))
                else:
                    given.commit()
            except RelayBusError as error:
                runs.add(type(error).__name__)
        else:
            getattr(given, how.removeprefix("connection "))()

    if "connection" in how:

        @bus.handler("step", name="h", mode="transactional", retry=NoRetry())
        def with_connection(event: Event, connection: Connection) -> None:
            end(event, connection)

    else:

        @bus.handler("step", name="h", mode="transactional", retry=NoRetry())
        def with_session(event: Event, session: Session) -> None:
            end(event, session)

    publish(bus, effects, "step", "bad")
    with working(bus, effects):
        (letter,) = eventually(lambda: dead(bus, effects))
        if how == "text: SELECT 1; COMMIT":  # seen afterwards only
            with effects.begin() as connection:
                connection.execute(text("DELETE FROM effects"))
        assert written(effects) == []
        publish(bus, effects, "step", "good")
        drained(bus, effects)
    assert letter.last_error.startswith("TransactionEndedError: handler 'h' ended the transaction")
    assert written(effects) == [(1, "half"), (2, "nested")]


def test_a_failed_transactional_handler_leaves_nothing(bus: RelayBus, effects: Engine) -> None:
    @bus.handler("step", name="h", mode="transactional", retry=SOON)
    def h(event: Event, context: Context, session: Session) -> None:
        session.execute(INSERT, {"n": context.attempt, "what": "x"})
        if context.attempt == 1:
            raise RuntimeError("after the write")
        if context.attempt == 2:
            session.execute(text("SELECT 1 / 0"))

    publish(bus, effects, "step", 1)
    with working(bus, effects):
        drained(bus, effects)
    assert written(effects) == [(3, "x")]


@pytest.mark.parametrize("kind", ["session", "connection"])
def test_no_transaction_no_transactional_handler(effects: Engine, kind: str) -> None:
    """On an AUTOCOMMIT engine a failure would keep what the handler wrote: it does not run."""
    engine = create_engine(effects.url, isolation_level="AUTOCOMMIT")
    bus = RelayBus(session_factory=sessionmaker(engine))

    if kind == "session":

        @bus.handler("step", name="h", mode="transactional", retry=NoRetry())
        def with_session(event: Event, session: Session) -> None:
            session.execute(INSERT, {"n": 1, "what": "stays"})

    else:

        @bus.handler("step", name="h", mode="transactional", retry=NoRetry())
        def with_connection(event: Event, connection: Connection) -> None:
            connection.execute(INSERT, {"n": 1, "what": "stays"})

    publish(bus, effects, "step", 1)
    try:
        with working(bus, engine if kind == "connection" else effects):
            (letter,) = eventually(lambda: dead(bus, effects))
    finally:
        engine.dispose()
    assert "AUTOCOMMIT" in letter.last_error
    assert written(effects) == []


def test_publishing_in_a_transactional_handler(bus: RelayBus, effects: Engine) -> None:
    """What it publishes commits with its effect, or not at all."""
    runs = Runs()

    @bus.handler("first", name="first", mode="transactional", retry=SOON)
    def first(event: Event, context: Context, session: Session) -> None:
        bus.publish(session, "second", context.attempt)
        if context.attempt == 1:
            session.flush()
            raise RuntimeError("takes the published event along")

    @bus.handler("first", name="on-connection", mode="transactional")
    def on_connection(event: Event, connection: Connection) -> None:
        bus.publish(connection, "second", "connection", key="k")

    @bus.handler("second", name="second")
    async def second(event: Event) -> None:
        runs.add(event.payload)

    publish(bus, effects, "first", 1)
    with working(bus, effects):
        runs.wait(2)
        drained(bus, effects)
    assert sorted(map(str, (row[0] for row in runs.rows))) == ["2", "connection"]


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

    with Session(engine) as session, session.begin():
        begun = session.scalar(text("SELECT clock_timestamp()"))
        for delay in (0.8, 0.4):
            bus.publish(session, "step", delay, delay=delay)
        # later ones of the key wait for the delayed one
        bus.publish(session, "step", 0.6, key="k", delay=0.6)
        bus.publish(session, "step", "behind", key="k")
        bus.publish(session, "step", 0)
    assert begun is not None
    with working(bus, engine):
        runs.wait(5)
    order = [row[0] for row in runs.rows]
    assert [o for o in order if o != "behind"] == [0, 0.4, 0.6, 0.8]
    assert order.index("behind") > order.index(0.6)
    for delay, at in runs.rows:
        late = (at - begun).total_seconds() - (0.6 if delay == "behind" else delay)
        assert 0 <= late < 5, (delay, late)


def test_publishing_an_id_again_after_completion(bus: RelayBus, engine: Engine) -> None:
    runs = Runs()

    @bus.handler("step", name="h")
    async def h(event: Event) -> None:
        runs.add("h", event.payload)

    publish(bus, engine, "step", 1, id="order-7", key="k")
    with working(bus, engine):
        drained(bus, engine)
        publish(bus, engine, "step", 2, id="order-7", key="k")
        publish(bus, engine, "step", 3, key="k")
        drained(bus, engine)
    assert runs.rows == [("h", 1), ("h", 3)]

    @bus.handler("step", name="later")
    async def later(event: Event) -> None:
        runs.add("later", event.payload)

    publish(bus, engine, "step", 4, id="order-7", key="k")
    with working(bus, engine):
        drained(bus, engine)
    assert runs.rows == [("h", 1), ("h", 3), ("later", 1)]


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


def test_an_orphan_is_buried(bus: RelayBus, engine: Engine) -> None:
    runs = Runs()

    @bus.handler("step", name="h")
    async def h(event: Event) -> None:
        runs.add(event.payload)

    first, *_ = publish(bus, engine, "step", 1, 2, 3, key="k")
    with engine.begin() as connection:
        connection.execute(delete(bus.tables.events).where(bus.tables.events.c.id == first.id))
    with working(bus, engine):
        drained(bus, engine)
        (letter,) = eventually(lambda: dead(bus, engine))
    assert (letter.attempts, letter.last_error) == (0, "its event is gone from the events table")
    assert runs.rows == [(2,), (3,)]


def test_used_up_attempts_are_not_run_once_more(bus: RelayBus, engine: Engine) -> None:
    """As after a handler that killed its worker each time: nothing was written but the charge."""

    @bus.handler("step", name="h", retry=SOON)
    async def h(event: Event) -> None:
        raise AssertionError("must not run")

    publish(bus, engine, "step", 1)
    with engine.begin() as connection:
        connection.execute(update(bus.tables.deliveries).values(attempts=3))
    with working(bus, engine):
        (letter,) = eventually(lambda: dead(bus, engine))
    assert letter.attempts == 3
    assert letter.last_error.startswith("3 attempts are used up")


def test_suspects_of_two_crashes_run_apart(bus: RelayBus, engine: Engine) -> None:
    """Half as many as in the last crash, and nothing beside them; then everything goes on."""
    running: set[str] = set()
    seen: list[set[str]] = []

    @bus.handler("step", name="h")
    async def h(event: Event) -> None:
        running.add(event.payload)
        seen.append(set(running))
        await asyncio.sleep(0.05)
        running.discard(event.payload)

    suspects = [f"suspect {n}" for n in range(8)]
    one_lane = (key for key in map(str, itertools.count()) if lane_of(key) == 7)
    for suspect, key in zip(suspects, one_lane, strict=False):
        publish(bus, engine, "step", suspect, key=key)
    table, deliveries = bus.tables.suspects, bus.tables.deliveries
    crashed = select(deliveries.c.id, deliveries.c.lane, literal(2), literal(8))
    with engine.begin() as connection:
        connection.execute(
            table.insert().from_select(["id", "lane", "crashes", "company"], crashed)
        )
    publish(bus, engine, "step", *[f"other {n}" for n in range(40)])
    with working(bus, engine):
        drained(bus, engine)
        eventually(lambda: suspects_left(bus, engine) == 0)
    apart = [each for each in seen if any(name.startswith("suspect") for name in each)]
    assert all(name.startswith("suspect") for each in apart for name in each)
    assert max(map(len, apart)) == 4
    assert max(map(len, seen)) > 10
    assert set().union(*seen) == {*suspects, *(f"other {n}" for n in range(40))}


def suspects_left(bus: RelayBus, engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.scalar(select(func.count()).select_from(bus.tables.suspects)) or 0


@pytest.mark.parametrize(("crashes", "company"), [(3, 1), (3, 2), (2, 1)])
def test_only_the_proven_culprit_is_buried_unrun(
    bus: RelayBus, engine: Engine, crashes: int, company: int
) -> None:
    runs = Runs()

    @bus.handler("step", name="h")
    def h(event: Event) -> None:
        runs.add(event.payload)

    publish(bus, engine, "step", 1, key="k")
    table, deliveries = bus.tables.suspects, bus.tables.deliveries
    crashed = select(deliveries.c.id, deliveries.c.lane, literal(crashes), literal(company))
    with engine.begin() as connection:
        connection.execute(
            table.insert().from_select(["id", "lane", "crashes", "company"], crashed)
        )
    publish(bus, engine, "step", 2, key="k")
    with working(bus, engine):
        drained(bus, engine)
    if (crashes, company) == (3, 1):
        (letter,) = dead(bus, engine)
        assert letter.last_error.startswith("its worker died 3 times while it ran")
        assert runs.rows == [(2,)]
    else:
        assert runs.rows == [(1,), (2,)]


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
