"""What a transactional handler does to its transaction, all of it is kept or nothing.

The completion is the worker's, after the handler has returned and in the same transaction: an
error, a time limit, a commit of the handler's own or a lost lease leaves no effect and one attempt
or none; savepoints are the handler's own affair.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, func, select, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlalchemy_relaybus import Context, Event, Fixed, NoRetry, RelayBus, RelayBusError
from tests.support.effects import INSERT, written
from tests.support.stores import key_on
from tests.support.workers import LIMIT, Runs, dead, drained, eventually, publish, steal, working
from tests.support.workers import waiting as scheduled

LANE = 7
KEY = key_on(LANE)
SOON = Fixed(wait=0.02, max_attempts=3)


class Rows(DeclarativeBase):
    pass


class Row(Rows):
    __tablename__ = "rows_of_the_application"
    id: Mapped[int] = mapped_column(primary_key=True)
    n: Mapped[int] = mapped_column(unique=True)


@pytest.fixture
def bus() -> RelayBus:
    return RelayBus()


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


def _idle_in_transaction(engine: Engine) -> int:
    query = text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
        "AND state LIKE 'idle in transaction%'"
    )
    with engine.connect() as connection:
        return connection.scalar(query) or 0


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
        "text: SELECT ';'; COMMIT; BEGIN",
        "driver",
        "driver, and goes on",
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
        elif how.startswith("driver"):
            given.connection().connection.dbapi_connection.commit()
            if "goes on" in how:
                given.execute(INSERT, {"n": 3, "what": "after it"})
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
        if how.startswith("driver"):  # seen afterwards only
            with effects.begin() as connection:
                connection.execute(text("DELETE FROM effects"))
        assert written(effects) == []
        publish(bus, effects, "step", "good")
        drained(bus, effects)
    assert letter.last_error.startswith("TransactionEndedError: handler 'h' ended the transaction")
    assert written(effects) == [(1, "half"), (2, "nested")]


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


# -- errors and savepoints of the handler's own ----------------------------------------------------


#: What a transactional handler may be given.
KINDS = ["session", "connection", "async session"]


def register(bus: RelayBus, kind: str, run: Callable[[Context, Any], None], **options: Any) -> None:
    """A handler that does *run* with what it is given."""
    handler = bus.handler("step", name="h", mode="transactional", **options)
    if kind == "session":

        @handler
        def with_session(event: Event, context: Context, session: Session) -> None:
            run(context, session)

    elif kind == "connection":

        @handler
        def with_connection(event: Event, context: Context, connection: Connection) -> None:
            run(context, connection)

    else:

        @handler
        async def with_async(event: Event, context: Context, session: AsyncSession) -> None:
            await session.run_sync(lambda session: run(context, session))


@pytest.fixture
def async_engine(database_url: str) -> AsyncEngine:
    return create_async_engine(database_url)


def swallow_statement(given: Any) -> None:
    with contextlib.suppress(DBAPIError):
        given.execute(text("SELECT 1 / 0"))


def swallow_flush(given: Any) -> None:
    given.add(Row(n=1))
    given.add(Row(n=1))
    with contextlib.suppress(DBAPIError):
        given.flush()


def swallow_in_an_open_savepoint(given: Any) -> None:
    given.begin_nested()
    swallow_statement(given)


@pytest.mark.parametrize(
    ("kind", "swallow", "cause"),
    [
        *(
            (kind, swallow, "current transaction is aborted")
            for kind in KINDS
            for swallow in (swallow_statement, swallow_in_an_open_savepoint)
        ),
        # SQLAlchemy has rolled the session's transaction back
        ("session", swallow_flush, "TransactionEndedError: handler 'h' ended the transaction"),
    ],
)
def test_a_database_error_that_the_handler_swallowed(
    bus: RelayBus,
    effects: Engine,
    async_engine: AsyncEngine,
    kind: str,
    swallow: Callable[[Any], None],
    cause: str,
) -> None:
    """The database has given its transaction up: nothing of it is kept, and it is not done."""
    Rows.metadata.create_all(effects)
    seen: list[int] = []

    def run(context: Context, given: Any) -> None:
        seen.append(context.attempt)
        given.execute(INSERT, {"n": context.attempt, "what": "x"})
        if context.attempt == 1:
            swallow(given)

    register(bus, kind, run, retry=Fixed(wait=3600))
    publish(bus, effects, "step", 1)
    parked = bus.tables.parked
    with working(bus, effects, async_engine=async_engine):
        eventually(lambda: scheduled(bus, effects) == 1)
        with effects.begin() as connection:
            [(attempts, error)] = connection.execute(
                select(parked.c.attempts, parked.c.last_error)
            ).all()
            connection.execute(update(parked).values(available_at=func.clock_timestamp()))
        drained(bus, effects)
    assert attempts == 1
    assert cause in error
    assert seen == [1, 2]
    assert written(effects) == [(2, "x")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fails", [True, False])
def test_a_savepoint_that_the_handler_left_open(
    bus: RelayBus, effects: Engine, async_engine: AsyncEngine, kind: str, fails: bool
) -> None:
    """What is written in it is part of the transaction: it commits with the rest, or nothing does.

    A failure counts one attempt and names its cause.
    """
    seen: list[int] = []

    def run(context: Context, given: Any) -> None:
        seen.append(context.attempt)
        given.execute(INSERT, {"n": context.attempt, "what": "before"})
        given.begin_nested()
        given.execute(INSERT, {"n": context.attempt, "what": "inside"})
        given.begin_nested()
        given.execute(INSERT, {"n": context.attempt, "what": "inside both"})
        if fails and context.attempt == 1:
            raise RuntimeError("with two savepoints open")

    register(bus, kind, run, retry=Fixed(wait=0.02, max_attempts=2))
    publish(bus, effects, "step", 1)
    with working(bus, effects, async_engine=async_engine):
        drained(bus, effects)
    done = 2 if fails else 1
    assert seen == list(range(1, done + 1))
    assert written(effects) == [(done, what) for what in ("before", "inside", "inside both")]
    assert not dead(bus, effects)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ends", ["released", "left open", "swallows everything"])
def test_a_lease_that_is_lost_inside_a_savepoint(
    bus: RelayBus,
    effects: Engine,
    async_engine: AsyncEngine,
    kind: str,
    ends: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The fence is checked in the completion, after the handler: no savepoint can swallow it."""
    runs, go_on = Runs(), threading.Event()

    def run(context: Context, given: Any) -> None:
        given.execute(INSERT, {"n": context.fence, "what": "outside"})
        savepoint = given.begin_nested()
        with contextlib.suppress(BaseException):
            given.execute(INSERT, {"n": context.fence, "what": "inside"})
            runs.add(context.fence, context.attempt)
            assert go_on.wait(LIMIT)
            if ends == "swallows everything":
                raise RuntimeError("swallowed")
        if ends == "released":
            savepoint.commit()
        elif ends == "swallows everything":
            savepoint.rollback()

    register(bus, kind, run)
    publish(bus, effects, "step", 1, key=KEY)
    with working(bus, effects, async_engine=async_engine) as worker:
        runs.wait(1)
        steal(bus, effects, {LANE})
        go_on.set()
        eventually(lambda: "was refused" in caplog.text)
        assert written(effects) == []
        with effects.begin() as connection:  # the thief dies
            connection.execute(
                update(bus.tables.lanes)
                .where(bus.tables.lanes.c.lane == LANE)
                .values(lease_expires_at=func.clock_timestamp())
            )
        drained(bus, effects)
        assert worker.alive
    assert runs.rows == [(1, 1), (3, 1)]
    inside = [] if ends == "swallows everything" else [(3, "inside")]
    assert written(effects) == [*inside, (3, "outside")]
    assert not dead(bus, effects)
