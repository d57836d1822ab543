"""Publishing on a Session: in hooks, by several buses, and on what it is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, event, select
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from sqlalchemy_relaybus import RelayBus
from sqlalchemy_relaybus.exc import ConfigurationError
from sqlalchemy_relaybus.tables import tables_for
from tests.support.orders import TYPE, Base, Order, make_bus, published


@pytest.fixture
def bus() -> RelayBus:
    return make_bus()


@pytest.fixture
def database(engine: Engine) -> Engine:
    Base.metadata.create_all(engine)
    return engine


# -- two buses, and hooks of the application -------------------------------------------------------


def test_two_buses_on_one_session_each_take_their_own(bus: RelayBus, database: Engine) -> None:
    other = make_bus("other_")
    other.tables.metadata.create_all(database)
    with Session(database) as session:
        bus.publish(session, TYPE, "A")
        other.publish(session, TYPE, "B")
        bus.publish(session, TYPE, "C")
        session.commit()
    assert published(database) == ["A", "C"]
    assert published(database, other.tables) == ["B"]


@pytest.mark.parametrize(
    ("hook", "attached"),
    [
        ("before_flush", "before"),
        ("before_flush", "after"),
        ("before_flush", "not"),
        ("after_flush", "before"),
        ("after_flush", "after"),
        ("after_flush", "not"),
    ],
)
def test_publishing_in_a_flush_hook_of_the_application(
    bus: RelayBus, database: Engine, hook: str, attached: str
) -> None:
    maker = sessionmaker(database)
    if attached == "before":
        bus.attach(maker)

    @event.listens_for(maker, hook)
    def publish_placed(session: Session, *args: object) -> None:
        bus.publish(session, TYPE, "hook", key="k")

    if attached == "after":
        bus.attach(maker)
    with maker() as session:
        bus.publish(session, TYPE, "before", key="k")
        session.add(Order())
        session.commit()
    assert published(database) == ["before", "hook"]


def test_publishing_while_an_object_is_inserted(bus: RelayBus, database: Engine) -> None:
    maker = sessionmaker(database)

    def publish_inserted(mapper: object, connection: object, order: Order) -> None:
        session = Session.object_session(order)
        assert session is not None
        bus.publish(session, TYPE, f"order {order.id}")

    event.listen(Order, "after_insert", publish_inserted)
    try:
        with maker() as session:
            session.add(Order(id=7))
            session.commit()
    finally:
        event.remove(Order, "after_insert", publish_inserted)
    assert published(database) == ["order 7"]


def test_publishing_goes_on_after_clear_mappers(database: Engine) -> None:
    """In a process of its own, since all mapped classes of the process lose their mapping."""
    script = """if True:
        import sys
        from sqlalchemy import create_engine
        from sqlalchemy.orm import Session, clear_mappers
        from sqlalchemy_relaybus import RelayBus
        bus = RelayBus(unrouted="store", wake=False)
        engine = create_engine(sys.argv[1])
        for _ in range(2):
            with Session(engine) as session:
                bus.publish(session, "order.placed", {})
                session.commit()
            clear_mappers()
    """
    url = database.url.render_as_string(hide_password=False)
    subprocess.run([sys.executable, "-c", script, url], check=True, timeout=60)
    with database.connect() as connection:
        assert len(connection.scalars(select(tables_for().events.c.id)).all()) == 2


# -- attaching -------------------------------------------------------------------------------------


def targets(engine: Engine) -> dict[str, tuple[Any, Callable[[], Session]]]:
    """What can be attached to, and how a session comes from it."""

    class Own(Session):
        pass

    maker = sessionmaker(engine)
    behind = sessionmaker(engine)
    scoped = scoped_session(behind)
    one = Session(engine)
    return {
        "class": (Own, lambda: Own(engine)),
        "sessionmaker": (maker, maker),
        "scoped_session": (scoped, scoped),
        "instance": (one, lambda: one),
    }


@pytest.mark.parametrize("kind", ["class", "sessionmaker", "scoped_session", "instance"])
def test_attaching_and_detaching_are_idempotent(bus: RelayBus, database: Engine, kind: str) -> None:
    target, make = targets(database)[kind]

    def hooks() -> int:
        with make() as session:
            return len(list(session.dispatch.before_flush))

    assert hooks() == 0
    for _ in range(2):
        bus.attach(target)
        assert hooks() == 1
        with make() as session:
            bus.publish(session, TYPE, "A")
            session.commit()
            assert len(list(session.dispatch.before_flush)) == 1
    for _ in range(2):
        bus.detach(target)
    if kind == "scoped_session":
        target.remove()
    assert hooks() == 0
    # an event of a session that is not attached is not lost either
    with make() as session:
        bus.publish(session, TYPE, "B")
        session.commit()
    assert published(database) == ["A", "A", "B"]
    with Session(database) as session:
        assert len(list(session.dispatch.before_flush)) == 0


@pytest.mark.parametrize("target", [object(), "session", None, Order])
def test_only_sessions_can_be_attached_to(bus: RelayBus, target: Any) -> None:
    with pytest.raises(ConfigurationError, match="cannot attach to"):
        bus.attach(target)


# -- what is published on --------------------------------------------------------------------------


def test_a_scoped_session_stands_for_its_session(bus: RelayBus, database: Engine) -> None:
    scoped = scoped_session(sessionmaker(database))
    bus.publish(scoped, TYPE, "A")
    scoped.commit()
    scoped.remove()
    assert published(database) == ["A"]


@pytest.mark.parametrize("target", [object(), None, sessionmaker()])
def test_on_anything_else_a_type_error_names_what_is_accepted(bus: RelayBus, target: Any) -> None:
    with pytest.raises(TypeError, match="Session.*Connection"):
        bus.publish(target, TYPE, "A")


def test_an_engine_is_not_published_on(bus: RelayBus, database: Engine) -> None:
    with pytest.raises(TypeError, match="Session.*Connection"):
        bus.publish(database, TYPE, "A")  # type: ignore[arg-type]
