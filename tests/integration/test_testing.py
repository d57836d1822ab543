"""What the library offers to the tests of applications."""

from __future__ import annotations

import asyncio
import threading

import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from sqlalchemy_relaybus import (
    Context,
    Event,
    Fixed,
    InvalidEventError,
    NoRetry,
    PayloadError,
    RelayBus,
    SchemaMissingError,
    Snooze,
)
from sqlalchemy_relaybus.testing import drain, make_context, make_event, published


@pytest.fixture
def bus() -> RelayBus:
    return RelayBus(unrouted="store")


def test_an_event_and_a_context_to_call_a_handler_with() -> None:
    event = make_event("order.placed", {"id": 7}, key="k", headers={"trace": "x"})
    assert (event.type, event.payload, event.key) == ("order.placed", {"id": 7}, "k")
    assert event.headers == {"trace": "x"}
    context = make_context(event, "mail.confirm", attempt=2)
    assert context.idempotency_key == f"{event.id}:mail.confirm"
    assert (context.attempt, context.fence, context.deadline) == (2, 1, None)
    assert make_event("a", id="order-7") == make_event("b", id="order-7")


def test_what_could_not_be_published_is_no_event() -> None:
    with pytest.raises(PayloadError):
        make_event("order.placed", {1: 2})
    with pytest.raises(InvalidEventError):
        make_event("two words")


def test_what_a_rolled_back_transaction_has_published(bus: RelayBus, engine: Engine) -> None:
    with engine.connect() as connection, connection.begin() as outer:
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            bus.publish(session, "order.placed", {"n": 1}, key="k")
            bus.publish(session, "order.paid", {"n": 2})
            first, second = published(bus, session)
            assert (first.type, first.payload, first.key, first.sequence) == (
                "order.placed",
                {"n": 1},
                "k",
                1,
            )
            assert second.created_at is not None
            assert published(bus, session, "order.paid") == [second]
            session.commit()
        assert published(bus, connection) == [first, second]
        outer.rollback()
    with engine.connect() as connection:
        assert published(bus, connection) == []


def test_with_an_async_session(bus: RelayBus, engine: Engine) -> None:
    async def test() -> None:
        async_engine = create_async_engine(engine.url)
        async with AsyncSession(async_engine) as session:
            bus.publish(session, "order.placed", 1)
            (event,) = await session.run_sync(lambda sync: published(bus, sync))
            assert event.payload == 1
        await async_engine.dispose()

    asyncio.run(test())


def test_a_worker_runs_until_all_is_done(bus: RelayBus, engine: Engine) -> None:
    seen: list[tuple[object, int]] = []

    @bus.handler("step", name="h", retry=Fixed(wait=0.05))
    def h(event: Event, context: Context) -> None:
        seen.append((event.payload, context.attempt))
        if context.attempt == 1:
            raise RuntimeError("once")

    @bus.handler("bad", name="bad", retry=NoRetry())
    async def bad(event: Event) -> None:
        raise RuntimeError("always")

    with Session(engine) as session, session.begin():
        bus.publish(session, "step", "now", key="k")
        bus.publish(session, "step", "later", delay=3600)
        bus.publish(session, "bad", None)
    drain(bus, engine)
    assert seen == [("now", 1), ("now", 2)]
    parked = bus.tables.parked
    with engine.connect() as connection:
        statuses = connection.scalars(select(parked.c.status).order_by(parked.c.status))
        assert list(statuses) == ["dead", "delayed"]


def test_what_waits_for_something_is_left_alone(bus: RelayBus, engine: Engine) -> None:
    """Its followers are ready, or set aside: nothing in their own rows says that they wait."""
    seen: list[tuple[str, object]] = []

    @bus.handler("step", name="elsewhere")
    def elsewhere(event: Event) -> None:
        raise AssertionError("the worker has no such handler")

    here = RelayBus()

    @here.handler("step", name="parks", retry=NoRetry(), on_dead="park")
    @here.handler("step", name="blocks", retry=NoRetry(), on_dead="block")
    def h(event: Event, context: Context) -> None:
        seen.append((context.handler, event.payload))
        if event.payload == "snooze":
            raise Snooze(3600)
        if event.payload == "fail":
            raise RuntimeError("always")

    with Session(engine) as session, session.begin():
        for publisher in (here, bus):
            for kind in ("snooze", "fail", "delay"):
                delay = 3600 if kind == "delay" else None
                publisher.publish(session, "step", kind, key=kind, delay=delay)
                for n in range(3):
                    publisher.publish(session, "step", n, key=kind)
    drain(here, engine)
    assert sorted(seen) == sorted(
        (handler, kind) for handler in ("parks", "blocks") for kind in ("snooze", "fail")
    )


def test_a_worker_that_ends_by_itself(bus: RelayBus, engine: Engine) -> None:
    go_on = threading.Event()

    @bus.handler("step", name="h", timeout=0.2)
    def h(event: Event) -> None:
        go_on.wait(30)

    with Session(engine) as session, session.begin():
        for n in range(3):
            bus.publish(session, "step", n)
    try:
        with pytest.raises(RuntimeError, match="ended by itself .*of h are left"):
            drain(bus, engine, threads=1, concurrency=1)
    finally:
        go_on.set()


def test_a_worker_that_cannot_get_done(bus: RelayBus, engine: Engine) -> None:
    @bus.handler("step", name="h", retry=Fixed(wait=3600))
    def h(event: Event) -> None:
        raise RuntimeError("always")

    with Session(engine) as session, session.begin():
        bus.publish(session, "step", 1)
    with pytest.raises(TimeoutError, match="left after 1 s: 1 of h$"):
        drain(bus, engine, timeout=1)
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE relaybus_schema_version"))
    with pytest.raises(SchemaMissingError):
        drain(bus, engine)
