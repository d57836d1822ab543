"""A handler of the mode transactional has its effects once.

Its writes and the deletion of its delivery commit together, and the deletion comes last, under
``FOR KEY SHARE`` on the lane: until that commit no takeover gets the lane, and after a takeover
the deletion finds another epoch and the transaction is rolled back. A transaction that is ended by
anybody but the worker is refused, so nothing is kept without the completion.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, func, select, text, update
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlalchemy_relaybus import Context, Event, Fixed, NoRetry, RelayBus, RelayBusError
from sqlalchemy_relaybus.stores.base import Suspect
from tests.support.effects import INSERT, written
from tests.support.stores import EXPIRED, Bench, ids, key_on, new_event, sqlstate, waiting
from tests.support.workers import (
    LIMIT,
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


class Rows(DeclarativeBase):
    pass


class Row(Rows):
    __tablename__ = "rows_of_the_application"
    id: Mapped[int] = mapped_column(primary_key=True)
    n: Mapped[int] = mapped_column(unique=True)


@pytest.fixture
def bus() -> RelayBus:
    return RelayBus()


# -- completion against takeover -------------------------------------------------------------------


def test_a_lane_with_a_completion_in_progress_is_not_taken(bench: Bench) -> None:
    old, new = bench.holder(), bench.holder()
    bench.publish(new_event(KEY), new_event(KEY))
    old.take(LANE, lease=EXPIRED)
    first, second = old.claim(lease=EXPIRED)
    with bench.connect() as handler:
        assert old.complete(first, handler)
        assert new.take(LANE) == {}
        handler.commit()
    assert new.take(LANE).keys() == {LANE}
    assert ids(new.claim()) == [second.id]


def test_a_completion_that_begins_after_a_takeover_waits_and_deletes_nothing(bench: Bench) -> None:
    old, new = bench.holder(), bench.holder()
    bench.publish(new_event(KEY), new_event(KEY))
    old.take(LANE, lease=EXPIRED)
    reply = old.exchange(room=1, lease=EXPIRED)
    [started], [prefetched] = reply.startable, reply.prefetched
    with bench.connect() as taker, bench.connect() as handler:
        new.begin_take(taker, LANE)
        # nothing but the lane's epoch refuses it
        with waiting(handler, lambda: old.complete(prefetched, handler)) as completion:
            taker.commit()
            assert completion.result() is False
        handler.commit()
    assert bench.deliveries() == [started.id, prefetched.id]


@pytest.mark.parametrize("commits", [True, False])
def test_a_completion_that_began_before_a_takeover_keeps_it_away(
    bench: Bench, commits: bool
) -> None:
    """Also while its own statement is held up: the lane is locked first."""
    old, new = bench.holder(), bench.holder()
    bench.publish(new_event(KEY))
    old.take(LANE, lease=EXPIRED)
    [delivery] = old.claim(lease=EXPIRED)
    with bench.connect() as other, bench.connect() as handler:
        bench.lock_delivery(other, delivery.id)
        with waiting(handler, lambda: old.complete(delivery, handler)) as completion:
            assert new.take(LANE) == {}
            other.rollback()
            assert completion.result() is True
        assert new.take(LANE) == {}
        if commits:
            handler.commit()
        else:
            handler.rollback()
    taken = new.take(LANE)[LANE]
    assert taken.suspects.keys() == (set() if commits else {delivery.id})
    assert ids(new.claim()) == ([] if commits else [delivery.id])


def test_a_transaction_that_began_before_a_takeover_does_not_complete_after_it(
    effects: Engine, bench: Bench
) -> None:
    """Whatever the handler wrote and read meanwhile; what it wrote is rolled back."""
    old, new = bench.holder(), bench.holder()
    bench.publish(new_event(KEY))
    old.take(LANE, lease=EXPIRED)
    [delivery] = old.claim(lease=EXPIRED)
    with bench.connect() as handler:
        handler.execute(INSERT, {"n": 1, "what": "zombie"})
        handler.execute(select(bench.tables.lanes)).all()
        assert new.take(LANE).keys() == {LANE}
        before = bench.contents()
        assert old.complete(delivery, handler) is False
        handler.rollback()
    assert bench.contents() == before
    assert written(effects) == []
    with bench.connect() as handler:
        [again] = new.claim()
        handler.execute(INSERT, {"n": 1, "what": "successor"})
        assert new.complete(again, handler)
        handler.commit()
    assert written(effects) == [(1, "successor")]


def test_a_takeover_that_fails_lets_a_waiting_completion_go_on(bench: Bench) -> None:
    old, new = bench.holder(), bench.holder()
    bench.publish(new_event(KEY))
    old.take(LANE, lease=EXPIRED)
    [delivery] = old.claim(lease=EXPIRED)
    with bench.connect() as taker, bench.connect() as handler:
        new.begin_take(taker, LANE)
        with waiting(handler, lambda: old.complete(delivery, handler)) as completion:
            taker.rollback()
            assert completion.result() is True
        handler.commit()
    assert bench.deliveries() == []


def test_what_is_completed_after_a_takers_snapshot_is_not_claimed_again(bench: Bench) -> None:
    old, new = bench.holder(), bench.holder()
    bench.publish(new_event(KEY), new_event(KEY))
    old.take(LANE, lease=EXPIRED)
    first, second = old.claim(lease=EXPIRED)
    with bench.gate(new.taker) as gate:
        with waiting(new.taker, lambda: new.take(LANE)) as takeover:
            assert old.complete(first)
            gate.rollback()
            taken = takeover.result()[LANE]
    assert taken.started == [first.id, second.id]
    assert taken.suspects == {second.id: Suspect(1, 1000)}
    [again] = new.claim()
    assert (again.id, again.attempts) == (second.id, 0)


def test_taking_and_reading_in_one_statement_would_claim_it_again(bench: Bench) -> None:
    """Why taking returns no deliveries: a statement's snapshot is older than its locks."""
    old, new = bench.holder(), bench.holder()
    bench.publish(new_event(KEY))
    old.take(LANE, lease=EXPIRED)
    [delivery] = old.claim(lease=EXPIRED)
    both = """
        WITH free AS MATERIALIZED (
          SELECT lane FROM relaybus_lanes
          WHERE lane = %(lane)s AND lease_expires_at < statement_timestamp()
          FOR UPDATE SKIP LOCKED
        ), taken AS (
          UPDATE relaybus_lanes AS l SET epoch = epoch + 1, holder = %(holder)s
          FROM free WHERE l.lane = free.lane RETURNING l.lane
        )
        SELECT id FROM relaybus_deliveries JOIN taken USING (lane)
    """
    with bench.gate(new.taker) as gate:
        with waiting(
            new.taker,
            lambda: new.taker.exec_driver_sql(both, {"lane": LANE, "holder": new.id}).all(),
        ) as takeover:
            assert old.complete(delivery)
            gate.rollback()
            assert takeover.result() == [(delivery.id,)]
    assert bench.deliveries() == []


def test_under_repeatable_read_a_zombies_completion_fails_to_serialize(engine: Engine) -> None:
    with Bench(engine) as bench:
        old, new = bench.holder(), bench.holder()
        bench.publish(new_event(KEY))
        old.take(LANE, lease=EXPIRED)
        [delivery] = old.exchange(room=0, lease=EXPIRED).prefetched  # so that it is not charged
        with bench.connect("REPEATABLE READ") as handler:
            handler.exec_driver_sql("SELECT count(*) FROM relaybus_lanes")  # the snapshot
            assert new.take(LANE).keys() == {LANE}
            with pytest.raises(OperationalError) as caught:
                old.complete(delivery, handler)
        assert sqlstate(caught.value) == "40001"
        assert bench.deliveries() == [delivery.id]


# -- completion against the worker's own pump ------------------------------------------------------


@pytest.mark.parametrize("careful", [False, True])
def test_what_completes_after_the_snapshot_is_not_claimed_again(
    bench: Bench, careful: bool
) -> None:
    """Its transaction commits while the exchange, whose snapshot shows it, waits for a lock."""
    holder = bench.holder()
    bench.publish(new_event(KEY), new_event(KEY), new_event(OTHER_KEY))
    bench.publish(new_event(key_on(LANE + 1)))
    holder.take(LANE, LANE + 1)
    completing, finishing, *_ = kept = holder.claim()
    with bench.connect() as other:
        # with a strength that lets the completion's FOR KEY SHARE through
        if careful:  # it steps over rows: held up at the table that it joins last
            other.execute(text("LOCK relaybus_events IN ACCESS EXCLUSIVE MODE"))
        else:
            bench.lock_lane(other, LANE, "NO KEY UPDATE")
        with waiting(
            holder.connection,
            lambda: holder.exchange(
                finished=[finishing], started=[completing, *kept[2:]], careful=careful
            ),
        ) as exchange:
            assert holder.complete(completing, other)
            other.commit()
            reply = exchange.result()
    assert reply.deleted == {finishing.id}
    assert reply.startable == reply.prefetched == []
    assert bench.deliveries() == ids(kept[2:])


@pytest.mark.parametrize("careful", [False, True])
def test_a_renewal_does_not_wait_for_a_completion_in_progress(bench: Bench, careful: bool) -> None:
    holder = bench.holder()
    bench.publish(new_event(KEY))
    holder.take(LANE)
    [delivery] = holder.claim()
    with bench.connect() as handler:
        assert holder.complete(delivery, handler)
        assert holder.exchange(started=[delivery], careful=careful).leases.keys() == {LANE}
        handler.commit()
    assert bench.deliveries() == []


# -- all or nothing --------------------------------------------------------------------------------


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
            for kind in ("session", "connection")
            for swallow in (swallow_statement, swallow_in_an_open_savepoint)
        ),
        # SQLAlchemy has rolled the session's transaction back
        ("session", swallow_flush, "TransactionEndedError: handler 'h' ended the transaction"),
    ],
)
def test_a_database_error_that_the_handler_swallowed(
    bus: RelayBus, effects: Engine, kind: str, swallow: Callable[[Any], None], cause: str
) -> None:
    """The database has given its transaction up: nothing of it is kept, and it is not done."""
    Rows.metadata.create_all(effects)
    seen: list[int] = []

    def run(context: Context, given: Any) -> None:
        seen.append(context.attempt)
        given.execute(INSERT, {"n": context.attempt, "what": "x"})
        if context.attempt == 1:
            swallow(given)

    retry = Fixed(wait=3600)
    if kind == "session":

        @bus.handler("step", name="h", mode="transactional", retry=retry)
        def with_session(event: Event, context: Context, session: Session) -> None:
            run(context, session)

    else:

        @bus.handler("step", name="h", mode="transactional", retry=retry)
        def with_connection(event: Event, context: Context, connection: Connection) -> None:
            run(context, connection)

    publish(bus, effects, "step", 1)
    parked = bus.tables.parked
    with working(bus, effects):
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


@pytest.mark.parametrize("kind", ["session", "connection"])
@pytest.mark.parametrize("fails", [True, False])
def test_a_savepoint_that_the_handler_left_open(
    bus: RelayBus, effects: Engine, kind: str, fails: bool
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

    retry = Fixed(wait=0.02, max_attempts=2)
    if kind == "session":

        @bus.handler("step", name="h", mode="transactional", retry=retry)
        def with_session(event: Event, context: Context, session: Session) -> None:
            run(context, session)

    else:

        @bus.handler("step", name="h", mode="transactional", retry=retry)
        def with_connection(event: Event, context: Context, connection: Connection) -> None:
            run(context, connection)

    publish(bus, effects, "step", 1)
    with working(bus, effects):
        drained(bus, effects)
    done = 2 if fails else 1
    assert seen == list(range(1, done + 1))
    assert written(effects) == [(done, what) for what in ("before", "inside", "inside both")]
    assert not dead(bus, effects)


@pytest.mark.parametrize("kind", ["session", "connection"])
@pytest.mark.parametrize("ends", ["released", "left open", "swallows everything"])
def test_a_lease_that_is_lost_inside_a_savepoint(
    bus: RelayBus, effects: Engine, kind: str, ends: str, caplog: pytest.LogCaptureFixture
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

    if kind == "session":

        @bus.handler("step", name="h", mode="transactional")
        def with_session(event: Event, context: Context, session: Session) -> None:
            run(context, session)

    else:

        @bus.handler("step", name="h", mode="transactional")
        def with_connection(event: Event, context: Context, connection: Connection) -> None:
            run(context, connection)

    publish(bus, effects, "step", 1, key=KEY)
    with working(bus, effects) as worker:
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
