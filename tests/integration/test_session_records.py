"""Events about mapped objects: `record` and `record_changes`."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Connection, Engine, String, event, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlalchemy_relaybus import ConfigurationError, PayloadError, RelayBus

bus = RelayBus(unrouted="store")


class Base(DeclarativeBase):
    pass


def _describe(item: Any) -> dict[str, Any]:
    return {"id": item.id, "name": item.name}


@bus.record_changes(
    insert="item.added",
    update="item.changed",
    delete="item.removed",
    payload=_describe,
    key=lambda item: f"item-{item.id}",
)
class Item(Base):
    __tablename__ = "items"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(20))


class Plain(Base):
    __tablename__ = "plain"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]


@pytest.fixture
def sessions(engine: Engine) -> sessionmaker[Session]:
    Base.metadata.create_all(engine)
    return sessionmaker(engine)


def stored(engine: Engine) -> list[tuple[str, str | None, str]]:
    with engine.connect() as connection:
        return stored_in(connection)


def stored_in(target: Connection | Session) -> list[tuple[str, str | None, str]]:
    events = bus.tables.events
    statement = select(events.c.type, events.c.key, events.c.payload).order_by(
        events.c.created_at, events.c.sequence
    )
    return [tuple(row) for row in target.execute(statement)]


def test_a_payload_function_sees_the_primary_key_of_a_new_object(
    engine: Engine, sessions: sessionmaker[Session]
) -> None:
    with sessions.begin() as session:
        plain = Plain(name="tea")
        session.add(plain)
        bus.record(plain, "plain.added", _describe, key=lambda item: str(item.id))
        bus.publish(session, "other", {})
    assert stored(engine) == [
        ("plain.added", "1", '{"id":1,"name":"tea"}'),
        ("other", None, "{}"),
    ]


def test_an_object_with_nothing_to_flush_is_recorded(
    engine: Engine, sessions: sessionmaker[Session]
) -> None:
    with sessions.begin() as session:
        session.add(Plain(name="tea"))
    with sessions.begin() as session:
        bus.record(session.scalars(select(Plain)).one(), "plain.seen", _describe)
    assert stored(engine) == [("plain.seen", None, '{"id":1,"name":"tea"}')]


def test_an_object_without_a_session_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="is in no session"):
        bus.record(Plain(name="tea"), "plain.added", {})


def test_a_plain_payload_is_checked_at_once(sessions: sessionmaker[Session]) -> None:
    with sessions() as session:
        plain = Plain(name="tea")
        session.add(plain)
        with pytest.raises(PayloadError):
            bus.record(plain, "plain.added", {"at": object()})
        session.commit()


def test_each_kind_of_change_is_published_in_order(
    engine: Engine, sessions: sessionmaker[Session]
) -> None:
    with sessions.begin() as session:
        item = Item(name="tea")
        session.add(item)
        session.flush()
        item.name = "coffee"
        session.flush()
        session.delete(item)
    assert stored(engine) == [
        ("item.added", "item-1", '{"id":1,"name":"tea"}'),
        ("item.changed", "item-1", '{"id":1,"name":"coffee"}'),
        ("item.removed", "item-1", '{"id":1,"name":"coffee"}'),
    ]


def test_a_change_that_changes_nothing_is_not_published(
    engine: Engine, sessions: sessionmaker[Session]
) -> None:
    with sessions.begin() as session:
        item = Item(name="tea")
        session.add(item)
        session.flush()
        item.name = "tea"
    assert [type for type, _, _ in stored(engine)] == ["item.added"]


def test_a_rolled_back_savepoint_takes_its_changes_along(
    engine: Engine, sessions: sessionmaker[Session]
) -> None:
    with sessions.begin() as session:
        session.add(Item(name="tea"))
        savepoint = session.begin_nested()
        session.add(Item(name="milk"))
        session.flush()
        savepoint.rollback()
        session.add(Item(name="sugar"))
    assert [payload for _, _, payload in stored(engine)] == [
        '{"id":1,"name":"tea"}',
        '{"id":3,"name":"sugar"}',
    ]


def test_a_flush_that_failed_leaves_nothing_behind(
    engine: Engine, sessions: sessionmaker[Session]
) -> None:
    with sessions() as session:
        session.add_all([Item(id=1, name="tea"), Item(id=2, name="x" * 30)])
        with pytest.raises(Exception, match="too long"):
            session.flush()
        session.rollback()
        session.add(Item(id=3, name="milk"))
        session.commit()
    assert [key for _, key, _ in stored(engine)] == ["item-3"]


def test_something_must_be_published() -> None:
    with pytest.raises(ConfigurationError, match="name an event type"):
        bus.record_changes(payload=_describe)


# -- from the application's own flush hooks --------------------------------------------------------


def _plain_added(session: Session) -> None:
    for each in session.new:
        if isinstance(each, Plain):
            bus.record(each, "plain.added", _describe)


@pytest.mark.parametrize("hook", ["before_flush", "after_flush", "after_flush_postexec"])
@pytest.mark.parametrize("place", ["ahead", "behind"])
def test_a_flush_hook_records_into_its_own_transaction(
    engine: Engine, sessions: sessionmaker[Session], hook: str, place: str
) -> None:
    seen: list[Plain] = []

    def record_new(session: Session, *rest: object) -> None:
        if hook == "after_flush_postexec":  # the new objects are not listed as new any more
            for each in seen:
                bus.record(each, "plain.added", _describe)
        else:
            _plain_added(session)

    class Own(Session):
        pass

    own = sessionmaker(engine, class_=Own)
    if place == "behind":
        bus.attach(own)
    event.listen(Own, hook, record_new)
    if place == "ahead":
        bus.attach(own)
    with own.begin() as session:
        plain = Plain(name="tea")
        seen.append(plain)
        session.add(plain)
        session.flush()
        seen.clear()
        assert [type for type, _, _ in stored_in(session)] == ["plain.added"]
    assert stored(engine) == [("plain.added", None, '{"id":1,"name":"tea"}')]


def test_an_object_added_by_a_flush_hook_is_recorded_with_the_next_flush(
    engine: Engine, sessions: sessionmaker[Session]
) -> None:
    class Own(Session):
        pass

    own = sessionmaker(engine, class_=Own)
    bus.attach(own)

    @event.listens_for(Own, "after_flush")
    def add_another(session: Session, context: object) -> None:
        if any(isinstance(each, Item) for each in session.new):
            plain = Plain(name="made by the hook")
            session.add(plain)
            bus.record(plain, "plain.added", _describe)

    with own.begin() as session:
        session.add(Item(name="tea"))
    assert [(type, payload) for type, _, payload in stored(engine)] == [
        ("item.added", '{"id":1,"name":"tea"}'),
        ("plain.added", '{"id":1,"name":"made by the hook"}'),
    ]


def test_what_waits_for_a_refused_flush_ends_with_its_transaction(
    engine: Engine, sessions: sessionmaker[Session]
) -> None:
    refusing = True

    class Own(Session):
        pass

    own = sessionmaker(engine, class_=Own)
    bus.attach(own)

    @event.listens_for(Own, "before_flush")
    def refuse(session: Session, context: object, instances: object) -> None:
        if refusing:
            raise ValueError("not today")

    session = own()
    plain = Plain(name="lost")
    session.add(plain)
    bus.record(plain, "plain.added", _describe)
    with pytest.raises(ValueError, match="not today"):
        session.commit()
    session.close()  # no rollback is told of
    refusing = False
    session.add(Plain(name="kept"))
    session.commit()
    assert stored(engine) == []

    # the same flush tried again within its transaction loses nothing
    refusing = True
    plain = Plain(name="late")
    session.add(plain)
    bus.record(plain, "plain.added", _describe)
    with pytest.raises(ValueError, match="not today"):
        session.flush()
    refusing = False
    session.commit()
    assert [payload for _, _, payload in stored(engine)] == ['{"id":2,"name":"late"}']
    session.close()


@pytest.mark.parametrize("on", ["class", "instance"])
def test_a_flush_hook_on_an_unattached_session(
    engine: Engine, sessions: sessionmaker[Session], on: str
) -> None:
    class Own(Session):
        pass

    own = Own(engine)

    def record_new(session: Session, *rest: object) -> None:
        _plain_added(session)

    target = Own if on == "class" else own
    event.listen(target, "after_flush", record_new)
    with own, own.begin():
        own.add(Plain(name="tea"))
    assert stored(engine) == [("plain.added", None, '{"id":1,"name":"tea"}')]

    event.remove(target, "after_flush", record_new)
    event.listen(target, "before_flush", record_new)
    with pytest.raises(ConfigurationError, match="attach the session"), own, own.begin():
        own.add(Plain(name="coffee"))
    assert len(stored(engine)) == 1
