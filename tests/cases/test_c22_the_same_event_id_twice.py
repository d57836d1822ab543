"""An event is published again under its id, in every way in which two transactions can meet.

Elsewhere the uniqueness error of the second one came out of the driver and aborted the transaction
that it was in, business rows included.

Right is: publishing again is ignored, without an error; the business row of either transaction can
be committed; and of two transactions the one that survives has its event delivered, once.
"""

from __future__ import annotations

from uuid import UUID

import pytest
from sqlalchemy import Engine, delete, func, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sqlalchemy_relaybus import Event, RelayBus
from tests.support.stores import waiting
from tests.support.workers import Runs, drained, publish, working


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


runs = Runs()


@pytest.fixture(params=[UUID(int=22), "order-7 placed"], ids=["a UUID", "a text"])
def id(request: pytest.FixtureRequest) -> UUID | str:
    given: UUID | str = request.param
    return given


@pytest.fixture
def bus() -> RelayBus:
    bus = RelayBus(wake=False)

    @bus.handler("order.placed", name="mail")
    def mail(event: Event) -> None:
        runs.add(event.payload)

    runs.rows.clear()
    return bus


@pytest.fixture
def database(engine: Engine) -> Engine:
    Base.metadata.create_all(engine)
    return engine


def place(bus: RelayBus, session: Session, order: int, id: UUID | str, key: str | None) -> None:
    """A business row before the event, and one after it."""
    session.add(Order(id=order))
    bus.publish(session, "order.placed", order, id=id, key=key)
    session.flush()
    session.add(Order(id=order + 100))


def delivered(bus: RelayBus, engine: Engine) -> tuple[list[int], list[int]]:
    """The orders that are committed, and what was handled once a worker has done all there is."""
    with Session(engine) as session:
        orders = session.scalars(select(Order.id).order_by(Order.id)).all()
        assert session.scalar(select(func.count()).select_from(bus.tables.events)) == 1
        assert session.scalar(select(func.count()).select_from(bus.tables.deliveries)) == 1
    return list(orders), handled(bus, engine)


def handled(bus: RelayBus, engine: Engine) -> list[int]:
    with working(bus, engine):
        drained(bus, engine)
    return [payload for (payload,) in runs.rows]


keyed = pytest.mark.parametrize("key", [None, "customer-7"])


@keyed
@pytest.mark.parametrize("flushed", [True, False])
def test_in_one_transaction(
    database: Engine, bus: RelayBus, id: UUID | str, key: str | None, flushed: bool
) -> None:
    with Session(database) as session:
        first = bus.publish(session, "order.placed", 1, id=id, key=key)
        if flushed:
            session.flush()
        assert bus.publish(session, "order.placed", 2, id=id, key=key) == first
        session.add(Order(id=1))
        session.commit()
    assert delivered(bus, database) == ([1], [1])


@keyed
def test_in_two_transactions(
    database: Engine, bus: RelayBus, id: UUID | str, key: str | None
) -> None:
    for order in (1, 2):
        with Session(database) as session:
            place(bus, session, order, id, key)
            session.commit()
    assert delivered(bus, database) == ([1, 2, 101, 102], [1])


@keyed
@pytest.mark.parametrize("ends", ["commits", "rolls back", "rolls back to a savepoint"])
def test_in_two_transactions_at_once(
    database: Engine, bus: RelayBus, id: UUID | str, key: str | None, ends: str
) -> None:
    """The second one waits until the first has ended, and its event goes by how that was."""
    with Session(database) as first, database.connect() as connection:
        savepoint = first.begin_nested()
        place(bus, first, 1, id, key)
        with Session(connection) as second:
            with waiting(connection, lambda: place(bus, second, 2, id, key)) as placed:
                if ends == "commits":
                    first.commit()
                elif ends == "rolls back":
                    first.rollback()
                else:
                    savepoint.rollback()
                placed.result(60)
            second.commit()
            first.commit()
    if ends == "commits":
        assert delivered(bus, database) == ([1, 2, 101, 102], [1])
    else:
        assert delivered(bus, database) == ([2, 102], [2])


@keyed
def test_of_an_event_that_was_handled(
    database: Engine, bus: RelayBus, id: UUID | str, key: str | None
) -> None:
    publish(bus, database, "order.placed", 1, id=id, key=key)
    assert handled(bus, database) == [1]
    with Session(database) as session:
        place(bus, session, 2, id, key)
        session.commit()
        assert session.scalars(select(Order.id).order_by(Order.id)).all() == [2, 102]
    assert handled(bus, database) == [1]


@keyed
def test_of_an_event_that_is_not_kept_any_more(
    database: Engine, bus: RelayBus, id: UUID | str, key: str | None
) -> None:
    """An id is known for as long as its event is kept; after that it is a new one."""
    publish(bus, database, "order.placed", 1, id=id, key=key)
    assert handled(bus, database) == [1]
    with database.begin() as connection:
        connection.execute(delete(bus.tables.events))
    with Session(database) as session:
        place(bus, session, 2, id, key)
        session.commit()
    assert delivered(bus, database) == ([2, 102], [1, 2])


def test_while_a_worker_handles_it(database: Engine, bus: RelayBus, id: UUID | str) -> None:
    """Its completion and the second transaction do not wait for each other."""
    publish(bus, database, "order.placed", 1, id=id)
    with Session(database) as session:
        place(bus, session, 2, id, None)
        assert handled(bus, database) == [1]
        session.commit()
    assert handled(bus, database) == [1]
