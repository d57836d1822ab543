"""What type checkers see of the public calls. Checked by mypy, and by nothing at run time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, assert_type

from sqlalchemy import Connection, Engine
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from sqlalchemy_relaybus import Context, Event, Exponential, Handler, RelayBus, Router, Worker

bus = RelayBus()


@bus.handler("a", "b", name="plain", retry=Exponential(max_attempts=3), timeout=30)
def plain(event: Event, ctx: Context) -> int:
    return ctx.attempt


@bus.handler("a", name="async", mode="transactional")
async def transactional(event: Event, session: AsyncSession) -> None: ...


# a decorated handler keeps its type: it can be called directly, in a test for example
def calls(event: Event, ctx: Context) -> None:
    assert_type(plain(event, ctx), int)


async def async_calls(event: Event, session: AsyncSession) -> None:
    await transactional(event, session)


def publishing(
    session: Session,
    async_session: AsyncSession,
    scoped: scoped_session[Session],
    connection: Connection,
) -> None:
    assert_type(bus.publish(session, "a", {"n": 1}), Event)
    assert_type(bus.publish(async_session, "a", [1, "two"], key="k", id="7"), Event)
    assert_type(bus.publish(scoped, "a", None, headers={"h": "v"}, delay=1.5), Event)
    assert_type(bus.publish(connection, "a", "text"), Event)
    bus.publish(sessionmaker(), "a", {})  # type: ignore[arg-type]
    bus.publish(session, 7, {})  # type: ignore[arg-type]


async def async_publishing(connection: AsyncConnection) -> None:
    assert_type(await bus.publish_async(connection, "a", {}), Event)
    bus.publish(connection, "a", {})  # type: ignore[arg-type]


def attaching(maker: sessionmaker[Session], async_maker: async_sessionmaker[AsyncSession]) -> None:
    bus.attach(maker)
    bus.attach(async_maker)
    bus.attach(Session)
    bus.detach(maker)
    bus.attach("maker")  # type: ignore[arg-type]


def events(event: Event) -> None:
    assert_type(event.payload, Any)
    assert_type(event.key, str | None)
    assert_type(event.sequence, int | None)
    assert_type(event.headers, Mapping[str, str])


def contexts(ctx: Context) -> None:
    assert_type(ctx.attempt, int)
    assert_type(ctx.fence, int)
    assert_type(ctx.idempotency_key, str)
    assert_type(ctx.deadline, float | None)


def routers(router: Router) -> None:
    bus.include(router)
    bus.route("a", to=["elsewhere"])
    assert_type(bus.handlers, Mapping[str, Handler])


def workers(engine: Engine) -> None:
    worker = Worker(bus, engine, concurrency=10)
    assert_type(worker.run(), bool)
    worker.stop(grace=1)


@bus.record_changes(insert="a", payload=lambda item: {"id": item.id})
class Item:
    id: int


def records(item: Item) -> None:
    assert_type(item.id, int)
    bus.record(item, "a", {"id": 1}, key=lambda item: str(item.id))
