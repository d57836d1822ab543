"""Publishing on a Session: with every kind of flush, savepoint and hook, and on what it is refused.

No flush event fires for bulk and Core writes, and none for a commit with nothing to flush.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, event, insert, select, text
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    mapped_column,
    scoped_session,
    sessionmaker,
)

from sqlalchemy_relaybus import RelayBus
from sqlalchemy_relaybus.event import Event
from sqlalchemy_relaybus.exc import ConfigurationError
from sqlalchemy_relaybus.tables import Tables, tables_for

TYPE = "order.placed"


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(default="new")


def make_bus(prefix: str = "relaybus_") -> RelayBus:
    bus = RelayBus(prefix=prefix, wake=False)

    @bus.handler(TYPE, name="a")
    def handle(event: Event) -> None: ...

    return bus


@pytest.fixture
def bus() -> RelayBus:
    return make_bus()


@pytest.fixture
def database(engine: Engine) -> Engine:
    Base.metadata.create_all(engine)
    return engine


def published(engine: Engine, tables: Tables | None = None) -> list[Any]:
    """The payloads of the committed events, in the order of their deliveries."""
    tables = tables or tables_for()
    events, deliveries = tables.events, tables.deliveries
    statement = (
        select(events.c.payload)
        .select_from(deliveries.join(events, events.c.id == deliveries.c.event_id))
        .order_by(deliveries.c.id)
    )
    with engine.connect() as connection:
        payloads = [text.strip('"') for text in connection.scalars(statement)]
        assert len(connection.scalars(select(events.c.id)).all()) == len(payloads)
    return payloads


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


def test_events_of_several_flushes_are_stored_in_the_order_of_publishing(
    bus: RelayBus, database: Engine
) -> None:
    with Session(database) as session:
        for n in range(10):
            bus.publish(session, TYPE, str(n), key="k")
            if n % 3 == 0:
                session.flush()
        session.commit()
    assert published(database) == [str(n) for n in range(10)]


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


def test_a_connection_is_written_to_at_once(bus: RelayBus, database: Engine) -> None:
    with database.begin() as connection:
        bus.publish(connection, TYPE, "A")
        assert connection.scalar(select(bus.tables.events.c.payload)) == '"A"'
        assert published(database) == []
    assert published(database) == ["A"]


@pytest.mark.parametrize("target", [object(), None, sessionmaker()])
def test_on_anything_else_a_type_error_names_what_is_accepted(bus: RelayBus, target: Any) -> None:
    with pytest.raises(TypeError, match="Session.*Connection"):
        bus.publish(target, TYPE, "A")


def test_an_engine_is_not_published_on(bus: RelayBus, database: Engine) -> None:
    with pytest.raises(TypeError, match="Session.*Connection"):
        bus.publish(database, TYPE, "A")  # type: ignore[arg-type]


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
