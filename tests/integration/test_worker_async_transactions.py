"""Transactional handlers that are coroutines, with an `AsyncSession`."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import Engine, select
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sqlalchemy_relaybus import (
    ConfigurationError,
    Context,
    Event,
    Fixed,
    HandlerSignatureError,
    NoRetry,
    RelayBus,
    Worker,
)
from tests.support.workers import Runs, dead, drained, publish, ready, working


class Base(DeclarativeBase):
    pass


class Line(Base):
    __tablename__ = "lines"
    id: Mapped[int] = mapped_column(primary_key=True)
    text: Mapped[str]


@pytest.fixture
def bus(engine: Engine) -> RelayBus:
    Base.metadata.create_all(engine)
    return RelayBus()


@pytest.fixture
def async_engine(database_url: str) -> AsyncEngine:
    return create_async_engine(database_url)


def lines(engine: Engine) -> list[str]:
    with Session(engine) as session:
        return list(session.scalars(select(Line.text).order_by(Line.id)))


def test_writes_and_completion_commit_together(
    bus: RelayBus, engine: Engine, async_engine: AsyncEngine
) -> None:
    runs = Runs()

    @bus.handler("step", name="h", mode="transactional", retry=Fixed(wait=0.01))
    async def h(event: Event, session: AsyncSession, context: Context) -> None:
        session.add(Line(text=f"{event.payload} {context.attempt}"))
        await session.flush()
        await asyncio.sleep(0)
        if context.attempt == 1:
            raise RuntimeError("not yet")
        bus.publish(session, "next", event.payload)

    @bus.handler("next", name="n")
    async def n(event: Event) -> None:
        runs.add(event.payload)

    publish(bus, engine, "step", "a", "b", "c", key="k")
    with working(bus, engine, async_engine=async_engine):
        drained(bus, engine)
        runs.wait(3)
    assert lines(engine) == ["a 2", "b 2", "c 2"]
    assert sorted(runs.rows) == [("a",), ("b",), ("c",)]


def test_a_factory_of_the_handlers_own(
    bus: RelayBus, engine: Engine, async_engine: AsyncEngine
) -> None:
    class Own(AsyncSession):
        pass

    seen: list[type[AsyncSession]] = []

    @bus.handler(
        "step",
        name="h",
        mode="transactional",
        session_factory=async_sessionmaker(async_engine, class_=Own),
    )
    async def h(event: Event, session: AsyncSession) -> None:
        seen.append(type(session))
        session.add(Line(text=event.payload))

    publish(bus, engine, "step", "a")
    with working(bus, engine):
        drained(bus, engine)
    assert seen == [Own]
    assert lines(engine) == ["a"]


def test_its_own_commit_is_refused(
    bus: RelayBus, engine: Engine, async_engine: AsyncEngine
) -> None:
    @bus.handler("step", name="h", mode="transactional", retry=NoRetry())
    async def h(event: Event, session: AsyncSession) -> None:
        session.add(Line(text="half"))
        await session.commit()

    publish(bus, engine, "step", "a")
    with working(bus, engine, async_engine=async_engine):
        drained(bus, engine)
    assert lines(engine) == []
    (letter,) = dead(bus, engine)
    assert "ended the transaction" in letter.last_error


def test_a_stop_leaves_all_or_nothing(
    bus: RelayBus, engine: Engine, async_engine: AsyncEngine
) -> None:
    runs = Runs()

    @bus.handler("step", name="h", mode="transactional")
    async def h(event: Event, session: AsyncSession) -> None:
        session.add(Line(text="first"))
        await session.flush()
        runs.add("began")
        await asyncio.Event().wait()

    publish(bus, engine, "step", "a")
    with working(bus, engine, async_engine=async_engine) as running:
        runs.wait(1)
        assert running.stop(grace=0.2)
    assert lines(engine) == []
    assert ready(bus, engine) == 1


def test_an_engine_must_be_given(bus: RelayBus, engine: Engine) -> None:
    @bus.handler("step", name="h", mode="transactional")
    async def h(event: Event, session: AsyncSession) -> None: ...

    with pytest.raises(ConfigurationError, match="'h' takes an AsyncSession"):
        Worker(bus, engine)


def test_a_transactional_handler_takes_a_session(bus: RelayBus) -> None:
    with pytest.raises(HandlerSignatureError, match="takes the session"):

        @bus.handler("step", name="h", mode="transactional")
        def h(event: Event) -> None: ...


def test_the_applications_own_async_engine_serves_both(
    bus: RelayBus, engine: Engine, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its connections belong to the application's event loop, and the worker's to its own."""
    shared = create_async_engine(database_url, pool_size=1, max_overflow=0)

    @bus.handler("step", name="h", mode="transactional")
    async def h(event: Event, session: AsyncSession) -> None:
        session.add(Line(text=event.payload))
        await session.flush()
        await asyncio.sleep(0.001)

    async def publish_one(n: int) -> None:
        async with AsyncSession(shared) as session, session.begin():
            bus.publish(session, "step", f"{n:03}")
            await session.flush()
            await asyncio.sleep(0.001)

    async def publish_all() -> None:
        await asyncio.gather(*map(publish_one, range(100)))
        await shared.dispose()

    with working(bus, engine, async_engine=shared):
        asyncio.run(publish_all())
        drained(bus, engine)
    assert sorted(lines(engine)) == [f"{n:03}" for n in range(100)]
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
