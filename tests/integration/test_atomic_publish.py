"""An event is stored if and only if its transaction commits.

Events and their deliveries are rows that the publishing transaction inserts, on its own connection
and before its commit: nothing is sent, and no second transaction or connection takes part. Events
that a session has not flushed yet make it dirty, so that no commit passes them by, and a savepoint
that is rolled back takes its own along.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import Engine, insert, select, text
from sqlalchemy.orm import Session

from sqlalchemy_relaybus import RelayBus
from sqlalchemy_relaybus.exc import ConfigurationError
from tests.support.orders import TYPE, Base, Order, make_bus, published
from tests.support.stores import Bench, key_on, new_event

LANE = 7
KEY, OTHER_KEY = key_on(LANE), key_on(LANE, 1)


@pytest.fixture
def bus() -> RelayBus:
    return make_bus()


@pytest.fixture
def database(engine: Engine) -> Engine:
    Base.metadata.create_all(engine)
    return engine


def test_events_commit_and_roll_back_with_the_callers_transaction(bench: Bench) -> None:
    with bench.connect() as connection:
        bench.store.publish(connection, [new_event(KEY), new_event(delay=60)])
        assert (bench.deliveries(), bench.parked(), bench.events()) == ([], [], [])
        connection.rollback()
        assert (bench.deliveries(), bench.parked(), bench.events()) == ([], [], [])
        bench.store.publish(connection, [new_event(KEY), new_event(delay=60)])
        connection.commit()
    assert (len(bench.deliveries()), len(bench.parked()), len(bench.events())) == (1, 1, 2)


# -- whatever else the transaction does ------------------------------------------------------------


def core(session: Session) -> None:
    session.execute(insert(Order), [{"state": "paid"}])


def bulk_mappings(session: Session) -> None:
    session.bulk_insert_mappings(Order, [{"state": "paid"}])


def bulk_objects(session: Session) -> None:
    session.bulk_save_objects([Order(state="paid")])


def nothing(session: Session) -> None: ...


def without_autoflush(session: Session) -> None:
    session.autoflush = False
    session.execute(select(Order))


def on_the_connection(session: Session) -> None:
    session.connection().execute(text("INSERT INTO orders (state) VALUES ('paid')"))


def orm(session: Session) -> None:
    session.add(Order())


WRITES = [core, bulk_mappings, bulk_objects, nothing, without_autoflush, on_the_connection, orm]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("published_first", [True, False])
def test_one_event_is_stored_whatever_else_the_transaction_writes(
    bus: RelayBus, database: Engine, write: Callable[[Session], None], published_first: bool
) -> None:
    with Session(database) as session:
        if not published_first:
            write(session)
        bus.publish(session, TYPE, "A")
        if published_first:
            write(session)
        session.commit()
    assert published(database) == ["A"]


@pytest.mark.parametrize("write", WRITES)
def test_none_is_stored_where_it_rolls_back(
    bus: RelayBus, database: Engine, write: Callable[[Session], None]
) -> None:
    with Session(database) as session:
        bus.publish(session, TYPE, "A")
        write(session)
        session.flush()
        session.rollback()
        session.commit()
    with Session(database) as session:
        bus.publish(session, TYPE, "B")
        write(session)
    assert published(database) == []


def test_a_session_goes_on_after_each_commit_and_rollback(bus: RelayBus, database: Engine) -> None:
    with Session(database) as session:
        for n in range(4):
            bus.publish(session, TYPE, str(n))
            if n % 2:
                session.rollback()
            else:
                session.commit()
    assert published(database) == ["0", "2"]


# -- savepoints ------------------------------------------------------------------------------------


@pytest.mark.parametrize("flushed", [True, False])
def test_a_savepoint_that_is_rolled_back_takes_its_events_along(
    bus: RelayBus, database: Engine, flushed: bool
) -> None:
    with Session(database) as session:
        bus.publish(session, TYPE, "A", key="k")
        savepoint = session.begin_nested()
        bus.publish(session, TYPE, "B", key="k")
        if flushed:
            session.flush()
        savepoint.rollback()
        bus.publish(session, TYPE, "C", key="k")
        session.flush()
        assert published(database) == []
        session.commit()
    assert published(database) == ["A", "C"]


def test_a_savepoint_that_is_released_inside_one_that_is_rolled_back(
    bus: RelayBus, database: Engine
) -> None:
    with Session(database) as session:
        bus.publish(session, TYPE, "A")
        outer = session.begin_nested()
        bus.publish(session, TYPE, "B")
        with session.begin_nested():
            bus.publish(session, TYPE, "C")
        assert published(database) == []
        outer.rollback()
        bus.publish(session, TYPE, "D")
        session.commit()
    assert published(database) == ["A", "D"]


def test_nothing_is_visible_before_the_outermost_commit(bus: RelayBus, database: Engine) -> None:
    with Session(database) as session:
        with session.begin_nested():
            bus.publish(session, TYPE, "A")
        assert published(database) == []
        session.commit()
        assert published(database) == ["A"]


def test_a_session_inside_a_transaction_of_a_test(bus: RelayBus, database: Engine) -> None:
    """The recipe for test suites: the session commits savepoints, the test rolls back."""
    with database.connect() as connection:
        outer = connection.begin()
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            bus.publish(session, TYPE, "A")
            session.commit()
            bus.publish(session, TYPE, "B")
            session.rollback()
        stored = connection.scalars(select(bus.tables.events.c.payload)).all()
        assert stored == ['"A"']
        outer.rollback()
    assert published(database) == []


# -- a connection ----------------------------------------------------------------------------------


def test_a_connection_is_written_to_at_once(bus: RelayBus, database: Engine) -> None:
    with database.begin() as connection:
        bus.publish(connection, TYPE, "A")
        assert connection.scalar(select(bus.tables.events.c.payload)) == '"A"'
        assert published(database) == []
    assert published(database) == ["A"]


def test_autocommit_is_refused_where_a_rollback_would_keep_the_event(
    bus: RelayBus, database: Engine
) -> None:
    autocommit = database.execution_options(isolation_level="AUTOCOMMIT")
    with autocommit.connect() as connection:
        with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
            bus.publish(connection, TYPE, "A")
    with Session(autocommit) as session:
        bus.publish(session, TYPE, "A")
        with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
            session.commit()
    assert published(database) == []
