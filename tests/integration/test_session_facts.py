"""What SQLAlchemy's sessions do and do not do, as far as publishing rests on it.

Each fact is shown, and then what it means for an event. They must hold on every release of
SQLAlchemy that is supported. What is not here is in ``test_store_sessions`` (commits with only an
event, bulk and Core writes, ``clear_mappers``, AUTOCOMMIT) and ``test_session_faces`` (binds).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, func, insert, select, text
from sqlalchemy.exc import DBAPIError, InvalidRequestError, PendingRollbackError, SAWarning
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import alembic_relaybus
from sqlalchemy_relaybus import Event, RelayBus
from sqlalchemy_relaybus.notify import Waker
from sqlalchemy_relaybus.testing.server import private_postgres
from tests.support.databases import SETTINGS, open_engine
from tests.support.workers import Runs, drained, working

TYPE = "order.placed"


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture
def hints(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """The hints to workers that were given, instead of giving them."""
    given: list[Engine] = []
    monkeypatch.setattr(Waker, "wake", lambda self, engine: given.append(engine))
    return given


@pytest.fixture
def bus() -> RelayBus:
    return RelayBus(unrouted="store")


@pytest.fixture
def database(engine: Engine) -> Engine:
    Base.metadata.create_all(engine)
    return engine


def stored(engine: Engine, bus: RelayBus) -> list[str]:
    """The payloads of the committed events, in the order of their flushes."""
    events = bus.tables.events
    with engine.connect() as connection:
        payloads = connection.scalars(select(events.c.payload).order_by(events.c.created_at))
        return [payload.strip('"') for payload in payloads]


@contextmanager
def fired(session: Session, *names: str) -> Iterator[list[str]]:
    """The events of *session* among *names* that fire in the block."""
    seen: list[str] = []

    def listener(name: str) -> Callable[..., None]:
        return lambda *args: seen.append(name)

    listeners = {name: listener(name) for name in names}
    for name, listen in listeners.items():
        event.listen(session, name, listen)
    try:
        yield seen
    finally:
        for name, listen in listeners.items():
            event.remove(session, name, listen)


# -- commits that are none -------------------------------------------------------------------------


def test_the_release_of_a_savepoint_counts_as_a_commit(
    database: Engine, bus: RelayBus, hints: list[Engine]
) -> None:
    """Its events are not committed by that, and no worker is told of them before they are."""
    with Session(database) as session:
        with fired(session, "before_commit", "after_commit") as seen:
            with session.begin_nested():
                bus.publish(session, TYPE, "A")
        assert seen == ["before_commit", "after_commit"]
        assert stored(database, bus) == []
        assert hints == []
        session.commit()
    assert stored(database, bus) == ["A"]
    assert hints == [database]


def test_a_released_savepoint_goes_with_the_transaction(database: Engine, bus: RelayBus) -> None:
    with Session(database) as session:
        with session.begin_nested():
            bus.publish(session, TYPE, "A")
        session.rollback()
        session.commit()
    assert stored(database, bus) == []


@pytest.mark.parametrize("outcome", ["rollback", "commit"])
def test_a_commit_inside_a_tests_transaction(database: Engine, outcome: str) -> None:
    """The recipe for test suites: the session's commit is the release of a savepoint.

    Whatever hint it gives comes too early, so a worker must do without: this one does not listen.
    """
    bus, runs = RelayBus(), Runs()

    @bus.handler(TYPE, name="handle")
    def handle(event: Event) -> None:
        runs.add(event.payload)

    with working(bus, database, listen=False), database.connect() as connection:
        outer = connection.begin()
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            with fired(session, "after_commit") as seen:
                bus.publish(session, TYPE, "A")
                session.commit()
            assert seen == ["after_commit"]
            bus.publish(session, TYPE, "B")
            session.rollback()
            bus.publish(session, TYPE, "C")
            session.commit()
        assert stored(database, bus) == []
        getattr(outer, outcome)()
        drained(bus, database)
        expected = ["A", "C"] if outcome == "commit" else []
        runs.wait(len(expected))
        assert sorted(payload for (payload,) in runs.rows) == expected
    assert stored(database, bus) == expected


# -- ends that are not told ------------------------------------------------------------------------


@pytest.mark.parametrize("flushed", [True, False])
def test_a_session_that_is_closed_does_not_say_that_it_rolls_back(
    database: Engine, bus: RelayBus, flushed: bool
) -> None:
    """Its events are gone all the same, and none of them turns up when it is used again."""
    session = Session(database)
    bus.publish(session, TYPE, "A")
    if flushed:
        session.flush()
    with fired(session, "after_rollback") as seen:
        session.close()
    assert seen == []
    assert not session.new
    session.add(Order(id=1))
    session.commit()
    bus.publish(session, TYPE, "B")
    session.commit()
    session.close()
    assert stored(database, bus) == ["B"]


def test_a_closed_session_forgets_what_waited_for_the_end_of_its_flush(
    database: Engine, bus: RelayBus
) -> None:
    session = Session(database)
    order = Order(id=1)
    session.add(order)
    bus.record(order, TYPE, lambda order: {"id": order.id / 0})
    with pytest.raises(ZeroDivisionError):
        session.commit()
    session.close()
    session.add(Order(id=2))
    bus.publish(session, TYPE, "B")
    session.commit()
    session.close()
    assert stored(database, bus) == ["B"]


def test_what_is_expunged_is_not_stored(database: Engine, bus: RelayBus) -> None:
    """An event waits among the session's new objects until the flush; ``publish()`` says so."""
    with Session(database) as session:
        bus.publish(session, TYPE, "flushed")
        session.flush()
        bus.publish(session, TYPE, "waiting")
        session.add(Order(id=1))
        session.expunge_all()
        bus.publish(session, TYPE, "later")
        session.commit()
        assert session.scalar(select(func.count()).select_from(Order)) == 0
    assert stored(database, bus) == ["flushed", "later"]


def test_a_session_that_must_be_rolled_back(database: Engine, bus: RelayBus) -> None:
    """After a flush that failed: what is published goes with the rollback that it asks for."""
    with Session(database) as session:
        session.add(Order(id=1))
        session.commit()
        bus.publish(session, TYPE, "A")
        session.execute(insert(Order).values(id=2))
        session.add(Order(id=1))
        with pytest.raises(DBAPIError):
            session.flush()
        bus.publish(session, TYPE, "B")
        with pytest.raises(PendingRollbackError):
            session.commit()
        with pytest.warns(SAWarning, match="this state will be discarded"):  # "B", that is
            session.rollback()
        bus.publish(session, TYPE, "C")
        session.commit()
    assert stored(database, bus) == ["C"]


def test_info_outlives_rollback_and_close(database: Engine, bus: RelayBus) -> None:
    """So nothing of a transaction is kept in it; it is the application's alone."""
    session = Session(database, info={"tenant": 7})
    bus.publish(session, TYPE, "A")
    session.flush()
    assert session.info == {"tenant": 7}
    session.rollback()
    session.close()
    assert session.info == {"tenant": 7}


# -- flushes ---------------------------------------------------------------------------------------


def test_a_flush_with_nothing_left_to_do_does_not_end(database: Engine, bus: RelayBus) -> None:
    """Events are taken out before the flush, and if there is nothing else there is no end of it.

    So they are written at its beginning, unless one waits for the key of an object: that is
    something to flush.
    """
    names = "before_flush", "after_flush"
    with Session(database) as session:
        bus.publish(session, TYPE, "alone")
        with fired(session, *names) as seen:
            session.flush()
        assert seen == ["before_flush"]
        order = Order()
        session.add(order)
        keys: list[int | None] = []
        event.listen(session, "before_flush", lambda *args: keys.append(order.id))
        bus.record(order, TYPE, lambda order: f"order {order.id}")
        with fired(session, *names) as seen:
            session.commit()
        assert seen == ["before_flush", "after_flush"]
        assert keys == [None]  # a generated key is known after the flush only
    assert stored(database, bus) == ["alone", "order 1"]


def test_bulk_and_core_writes_begin_no_flush(database: Engine, bus: RelayBus) -> None:
    with Session(database) as session:
        with fired(session, "before_flush") as seen:
            session.bulk_insert_mappings(Order, [{"id": 1}])
            session.bulk_save_objects([Order(id=2)])
            session.connection().execute(insert(Order).values(id=3))
            session.commit()
        assert seen == []
        bus.publish(session, TYPE, "A")
        with fired(session, "before_flush") as seen:
            session.bulk_save_objects([Order(id=4)])
            session.commit()
        assert seen == ["before_flush"]  # the commit's, for the event's sake
    assert stored(database, bus) == ["A"]


# -- asyncio ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [async_sessionmaker(), AsyncSession])
def test_nothing_can_listen_on_what_makes_async_sessions(target: Any) -> None:
    """So attaching to a maker gives it a sync session class of its own to listen on."""
    with pytest.raises((InvalidRequestError, NotImplementedError)):
        event.listen(target, "before_flush", lambda *args: None)


# -- transactions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, "customer-7"])
@pytest.mark.parametrize("id", [None, "order-7"])
def test_publishing_only_writes(
    database: Engine, bus: RelayBus, key: str | None, id: str | None
) -> None:
    """On the session's connection: no second one, no commit, no rollback, also of savepoints."""
    done: list[str] = []
    lonely = create_engine(database.url, pool_size=1, max_overflow=0, pool_timeout=1)
    try:
        with Session(lonely) as session:
            session.add(Order(id=1))
            session.flush()
            for name in ("commit", "rollback", "begin", "savepoint", "rollback_savepoint"):
                event.listen(lonely, name, lambda *args, name=name: done.append(name))
            event.listen(lonely, "checkout", lambda *args: done.append("checkout"))
            for n in range(3):
                bus.publish(session, TYPE, n, key=key, id=id)
                session.flush()
            order = session.get_one(Order, 1)
            bus.record(order, TYPE, lambda order: order.id, key=key)
            session.flush()
            assert done == []
            session.commit()
            assert done == ["commit"]
    finally:
        lonely.dispose()


def test_no_transaction_is_begun_before_the_flush(database: Engine, bus: RelayBus) -> None:
    checkouts: list[object] = []
    event.listen(database, "checkout", lambda *args: checkouts.append(args))
    with Session(database) as session:
        bus.publish(session, TYPE, "A")
        assert checkouts == []
        session.commit()
    assert len(checkouts) == 1


@pytest.fixture(scope="module")
def preparing() -> Iterator[Engine]:
    """On a server of its own: prepared transactions must be asked for at its start."""
    with private_postgres({**SETTINGS, "max_prepared_transactions": "5"}) as server:
        with open_engine(server.create_database("shop")) as engine:
            alembic_relaybus.migrate(engine)
            Base.metadata.create_all(engine)
            yield engine


@pytest.mark.parametrize("outcome", ["commit", "rollback"])
def test_a_transaction_that_is_prepared(preparing: Engine, outcome: str) -> None:
    """PostgreSQL prepares none that has sent a notification; the hint is not part of ours."""
    bus = RelayBus(unrouted="store")
    before = stored(preparing, bus)
    with preparing.connect() as watcher:
        watcher.execution_options(isolation_level="AUTOCOMMIT")
        with Session(preparing, twophase=True) as session:
            session.add(Order())
            bus.publish(session, TYPE, outcome, key="k")
            session.prepare()
            assert watcher.scalar(text("SELECT count(*) FROM pg_prepared_xacts")) == 1
            assert stored(preparing, bus) == before
            getattr(session, outcome)()
        assert watcher.scalar(text("SELECT count(*) FROM pg_prepared_xacts")) == 0
    assert stored(preparing, bus) == before + (["commit"] if outcome == "commit" else [])


def test_a_notification_would_make_that_impossible(preparing: Engine) -> None:
    with preparing.connect() as connection:
        connection.execute(text("NOTIFY anybody"))
        with pytest.raises(DBAPIError, match="cannot PREPARE a transaction that has executed"):
            connection.execute(text("PREPARE TRANSACTION 'hinted'"))
