"""Values from mapped objects that their session does not hold up to date, or does not hold at all.

Elsewhere a late hook read an attribute when no SQL could be sent any more; and where a handler's
error read one in its text, recording the failure failed too, and the row stayed "running" for ever.

Right is: the payload is what it was when ``publish()`` was called; a failure whose text cannot be
made counts as an attempt like any other.
"""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine, String, select, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.orm.exc import DetachedInstanceError

from sqlalchemy_relaybus import ConfigurationError, Event, Fixed, RelayBus
from tests.support.workers import Runs, dead, drained, eventually, publish, ready, working


class Base(DeclarativeBase):
    pass


class Item(Base):
    __tablename__ = "items"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String)
    state: Mapped[str] = mapped_column(server_default=text("'from the server'"))

    def __repr__(self) -> str:
        return f"<Item {self.name}>"  # of a detached object this raises


def _describe(item: Item) -> dict[str, Any]:
    return {"id": item.id, "name": item.name, "state": item.state}


TEA = '{"id":1,"name":"tea","state":"from the server"}'


@pytest.fixture
def bus() -> RelayBus:
    return RelayBus(unrouted="store", wake=False)


@pytest.fixture
def database(engine: Engine) -> Engine:
    Base.metadata.create_all(engine)
    return engine


def stored(engine: Engine, bus: RelayBus) -> list[str]:
    events = bus.tables.events
    with engine.connect() as connection:
        return list(connection.scalars(select(events.c.payload).order_by(events.c.created_at)))


def expired(session: Session) -> Item:
    """An object whose attributes the next access has to load."""
    item = Item(name="tea")
    session.add(item)
    session.commit()
    assert "name" not in vars(item)
    return item


# -- publishing ------------------------------------------------------------------------------------


def test_a_value_of_an_expired_object(database: Engine, bus: RelayBus) -> None:
    with Session(database) as session:
        item = expired(session)
        bus.publish(session, "item.seen", _describe(item))
        session.commit()
    assert stored(database, bus) == [TEA]


def test_a_function_of_an_expired_object(database: Engine, bus: RelayBus) -> None:
    """It is called in the flush, which can still load."""
    with Session(database) as session:
        item = expired(session)
        bus.record(item, "item.seen", _describe)
        session.commit()
        item.name = "coffee"  # something to flush
        bus.record(item, "item.changed", _describe)
        session.expire(item, ["state"])
        session.commit()
    assert stored(database, bus) == [TEA, TEA.replace("tea", "coffee")]


def test_a_function_of_a_new_object_with_a_default_of_the_server(
    database: Engine, bus: RelayBus
) -> None:
    with Session(database) as session:
        item = Item(name="tea")
        session.add(item)
        bus.record(item, "item.added", _describe)
        session.commit()
    assert stored(database, bus) == [TEA]


def test_each_change_of_a_class_with_a_default_of_the_server(
    database: Engine, bus: RelayBus
) -> None:
    class Noted(Base):
        __tablename__ = "noted"
        id: Mapped[int] = mapped_column(primary_key=True)
        name: Mapped[str]
        state: Mapped[str] = mapped_column(server_default=text("'from the server'"))

    try:
        noting = bus.record_changes(insert="new", update="new", delete="gone", payload=_describe)
        noting(Noted)
        Base.metadata.create_all(database)
        with Session(database) as session:
            noted = Noted(name="tea")
            session.add(noted)
            session.commit()
            noted.name = "coffee"  # without loading the rest
            session.commit()
            session.delete(noted)
            session.commit()
    finally:
        Base.metadata.remove(Noted.__table__)  # type: ignore[arg-type]
    coffee = TEA.replace("tea", "coffee")
    assert stored(database, bus) == [TEA, coffee, coffee]


def test_a_detached_object_is_refused(database: Engine, bus: RelayBus) -> None:
    """Although its ``repr`` raises, and with it a message that was made of that."""
    with Session(database) as session:
        item = expired(session)
    with pytest.raises(ConfigurationError, match="is in no session"):
        bus.record(item, "item.seen", _describe)
    with Session(database) as session:
        with pytest.raises(DetachedInstanceError):  # the application's own, before publish()
            bus.publish(session, "item.seen", _describe(item))
        session.add(Item(name="milk"))
        session.commit()
        assert len(session.scalars(select(Item)).all()) == 2


def test_an_object_that_leaves_its_session_before_the_flush(
    database: Engine, bus: RelayBus
) -> None:
    """What its function raises is raised by the flush, and nothing is stored."""
    with Session(database) as session:
        item = expired(session)
        bus.record(item, "item.seen", _describe)
        session.add(Item(name="milk"))
        session.expunge(item)
        with pytest.raises(DetachedInstanceError):
            session.commit()
        session.rollback()
        bus.publish(session, "item.seen", "after")
        session.commit()
    assert stored(database, bus) == ['"after"']


# -- later changes ---------------------------------------------------------------------------------


def test_what_is_changed_after_publish_is_not_stored(database: Engine, bus: RelayBus) -> None:
    payload: dict[str, Any] = {"lines": [1], "name": "tea"}
    headers = {"trace": "7"}
    with Session(database) as session:
        item = Item(name="tea")
        session.add(item)
        event = bus.publish(session, "item.added", payload, headers=headers)
        bus.record(item, "item.added", payload)
        payload["lines"].append(object())
        payload["name"] = "coffee"
        headers["trace"] = "8"
        event.payload["name"] = "milk"
        item.name = "coffee"
        session.commit()
        assert session.scalars(select(bus.tables.events.c.headers)).all() == ['{"trace":"7"}', None]
    assert stored(database, bus) == ['{"lines":[1],"name":"tea"}'] * 2


# -- handlers --------------------------------------------------------------------------------------


class Failed(Exception):
    """Its text reads an attribute of an object."""

    def __init__(self, item: Item) -> None:
        super().__init__(item)
        self.item = item

    def __str__(self) -> str:
        return f"cannot ship {self.item.name}"


@pytest.mark.parametrize("mode", ["at_least_once", "transactional"])
def test_an_error_whose_text_reads_a_detached_object(
    database: Engine, bus: RelayBus, mode: str
) -> None:
    runs = Runs()
    retry = Fixed(wait=0.01, max_attempts=2)

    def fail(session: Session) -> None:
        item = session.scalars(select(Item)).one()
        runs.add(item.name)
        session.rollback() if mode == "at_least_once" else session.expire(item)
        raise Failed(item)

    if mode == "transactional":

        @bus.handler("item.added", name="ship", mode="transactional", retry=retry)
        def ship_in_transaction(event: Event, session: Session) -> None:
            fail(session)

    else:

        @bus.handler("item.added", name="ship", retry=retry)
        def ship(event: Event) -> None:
            with Session(database) as session:
                fail(session)

    @bus.handler("item.added", name="count")
    def count(event: Event) -> None:
        runs.add("counted")

    with Session(database) as session:
        session.add(Item(name="tea"))
        session.commit()
    publish(bus, database, "item.added", {}, key="tea")
    with working(bus, database):
        (letter,) = eventually(lambda: dead(bus, database))
        # nothing is left running, and what comes later on the key goes on
        publish(bus, database, "item.added", {}, key="tea")
        eventually(lambda: len(dead(bus, database)) == 2)
        drained(bus, database)
    assert letter.attempts == 2
    assert letter.last_error == "Failed (its text raised DetachedInstanceError)"
    assert sorted(row[0] for row in runs.rows) == ["counted"] * 2 + ["tea"] * 4
    assert ready(bus, database) == 0
