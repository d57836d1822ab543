"""Every kind of session and connection that an application may have."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, func, select, text
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    mapped_column,
    scoped_session,
    sessionmaker,
)

from sqlalchemy_relaybus import (
    ConfigurationError,
    InvalidEventError,
    RelayBus,
    SchemaMissingError,
    UnroutedEventError,
)


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


class Elsewhere(DeclarativeBase):
    pass


class Note(Elsewhere):
    __tablename__ = "notes"
    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture
def bus() -> RelayBus:
    return RelayBus(unrouted="store")


def events(engine: Engine, bus: RelayBus) -> int:
    with engine.connect() as connection:
        return connection.scalar(select(func.count()).select_from(bus.tables.events)) or 0


def in_loop(url: str, work: Callable[[AsyncEngine], Awaitable[None]]) -> None:
    async def run() -> None:
        engine = create_async_engine(url)
        try:
            await work(engine)
        finally:
            await engine.dispose()

    asyncio.run(run())


# -- asyncio ---------------------------------------------------------------------------------------


def test_an_async_session(engine: Engine, database_url: str, bus: RelayBus) -> None:
    async def work(async_engine: AsyncEngine) -> None:
        async with AsyncSession(async_engine) as session:
            bus.publish(session, "a", {})
            await session.rollback()
            bus.publish(session, "a", {})
            await session.commit()

    in_loop(database_url, work)
    assert events(engine, bus) == 1


def test_an_attached_async_sessionmaker(engine: Engine, database_url: str, bus: RelayBus) -> None:
    async def work(async_engine: AsyncEngine) -> None:
        class Own(Session):
            pass

        maker = async_sessionmaker(async_engine, sync_session_class=Own)
        bus.attach(maker)
        private = maker.kw["sync_session_class"]
        bus.attach(maker)
        assert maker.kw["sync_session_class"] is private
        assert issubclass(private, Own)
        async with maker.begin() as session:
            assert isinstance(session.sync_session, Own)
            bus.publish(session, "a", {})
        bus.detach(maker)

    in_loop(database_url, work)
    assert events(engine, bus) == 1


def test_attaching_an_async_sessionmaker_leaves_other_sessions_alone(
    database_url: str, bus: RelayBus
) -> None:
    async def work(async_engine: AsyncEngine) -> None:
        bus.attach(async_sessionmaker(async_engine))

    in_loop(database_url, work)
    assert not list(Session().dispatch.before_flush)


def test_an_async_scoped_session(engine: Engine, database_url: str, bus: RelayBus) -> None:
    async def work(async_engine: AsyncEngine) -> None:
        scoped = async_scoped_session(async_sessionmaker(async_engine), asyncio.current_task)
        bus.attach(scoped)
        bus.publish(scoped, "a", {})
        await scoped.commit()
        await scoped.remove()

    in_loop(database_url, work)
    assert events(engine, bus) == 1


def test_an_async_connection(engine: Engine, database_url: str, bus: RelayBus) -> None:
    async def work(async_engine: AsyncEngine) -> None:
        async with async_engine.begin() as connection:
            event = await bus.publish_async(connection, "a", {"n": 1})
            assert event.payload == {"n": 1}
            with pytest.raises(TypeError, match=r"await bus\.publish_async"):
                bus.publish(connection, "a", {})  # type: ignore[arg-type]
        async with AsyncSession(async_engine) as session:
            with pytest.raises(TypeError, match="is for an AsyncConnection"):
                await bus.publish_async(session, "a", {})  # type: ignore[arg-type]

    in_loop(database_url, work)
    assert events(engine, bus) == 1


# -- scoped sessions, targets ----------------------------------------------------------------------


def test_a_scoped_session(engine: Engine, bus: RelayBus) -> None:
    scoped = scoped_session(sessionmaker(engine))
    bus.attach(scoped)
    bus.publish(scoped, "a", {})
    scoped.commit()
    scoped.remove()
    assert events(engine, bus) == 1


def test_a_scoped_session_over_a_function_cannot_be_attached(engine: Engine, bus: RelayBus) -> None:
    scoped: scoped_session[Session] = scoped_session(lambda: Session(engine))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="cannot attach"):
        bus.attach(scoped)
    bus.publish(scoped, "a", {})
    scoped.commit()
    scoped.remove()
    assert events(engine, bus) == 1


@pytest.mark.parametrize("target", [None, "session", object(), Session, sessionmaker()])
def test_anything_else_is_refused(target: Any, bus: RelayBus) -> None:
    with pytest.raises(TypeError, match="cannot publish on"):
        bus.publish(target, "a", {})


# -- which database --------------------------------------------------------------------------------


def test_events_go_to_the_engine_that_their_tables_are_bound_to(
    engine: Engine, empty_database_url: str, bus: RelayBus
) -> None:
    other = create_engine(empty_database_url)
    Base.metadata.create_all(engine)
    Elsewhere.metadata.create_all(other)
    binds: dict[Any, Any] = {Base: engine, Elsewhere: other, bus.tables.events: engine}
    try:
        with Session(binds=binds) as session:
            session.add(Order(id=1))
            bus.publish(session, "a", {})
            session.rollback()
            session.add(Order(id=2))
            session.add(Note(id=1))
            bus.publish(session, "a", {})
            session.commit()
            session.add(Note(id=2))
            bus.publish(session, "a", {})
            session.commit()
        assert events(engine, bus) == 2
        with other.connect() as connection:
            assert connection.scalar(text("SELECT to_regclass('relaybus_events')")) is None
    finally:
        other.dispose()


def test_a_session_with_no_engine_for_the_tables_says_so(engine: Engine, bus: RelayBus) -> None:
    with Session(binds={Base: engine}) as session:
        bus.publish(session, "a", {})
        with pytest.raises(ConfigurationError, match="bound to no engine for the bus's tables"):
            session.commit()


def test_an_overridden_get_bind_decides(engine: Engine, bus: RelayBus) -> None:
    asked: list[object] = []

    class Routing(Session):
        def get_bind(self, mapper: Any = None, *, clause: Any = None, **kw: Any) -> Engine:
            asked.append(clause)
            return engine

    with Routing() as session:
        bus.publish(session, "a", {})
        session.commit()
    assert bus.tables.events in asked
    assert events(engine, bus) == 1


# -- when, and to whom -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "zone", [UTC, timezone(timedelta(hours=-23, minutes=-59, microseconds=-7))]
)
def test_a_moment_instead_of_a_delay(engine: Engine, bus: RelayBus, zone: timezone) -> None:
    """In any time zone that Python knows, also where PostgreSQL has no such offset."""
    bus.route("a", to=["x"])
    moment = datetime.now(zone) + timedelta(days=2)
    with Session(engine) as session:
        bus.publish(session, "a", {}, available_at=moment)
        session.commit()
        assert session.scalar(select(bus.tables.parked.c.available_at)) == moment


@pytest.mark.parametrize(
    "arguments",
    [
        {"delay": 1, "available_at": datetime.now(UTC)},
        {"available_at": datetime.now()},  # noqa: DTZ005 - that is the mistake
        {"available_at": "tomorrow"},
        {"delay": -1},
        {"delay": "soon"},
        {"delay": 1e12},
    ],
)
def test_a_wrong_moment_is_refused_and_the_session_goes_on(
    engine: Engine, bus: RelayBus, arguments: dict[str, Any]
) -> None:
    with Session(engine) as session:
        with pytest.raises(InvalidEventError):
            bus.publish(session, "a", {}, **arguments)
        bus.publish(session, "a", {})
        session.commit()
    assert events(engine, bus) == 1


def test_an_event_that_nobody_takes_is_refused_unless_it_is_routed(engine: Engine) -> None:
    bus = RelayBus()
    with Session(engine) as session:
        with pytest.raises(UnroutedEventError, match="no handler takes events of type 'a'"):
            bus.publish(session, "a", {})
        bus.route("a", to=["elsewhere.one", "elsewhere.two"])
        bus.publish(session, "a", {})
        session.commit()
        handlers = session.scalars(select(bus.tables.deliveries.c.handler)).all()
    assert sorted(handlers) == ["elsewhere.one", "elsewhere.two"]


def test_a_database_without_tables_says_how_to_make_them(
    empty_engine: Engine, bus: RelayBus
) -> None:
    with Session(empty_engine) as session:
        bus.publish(session, "a", {})
        with pytest.raises(SchemaMissingError, match="relaybus migrate upgrade"):
            session.commit()


def test_every_new_sessionmaker_is_attached(engine: Engine, bus: RelayBus) -> None:
    """Also one whose class has the address of one that is gone."""
    for n in range(60):
        maker = sessionmaker(engine)
        bus.attach(maker)
        with maker.begin() as session:
            bus.publish(session, "a", n)
        del maker, session
        gc.collect()
    assert events(engine, bus) == 60
