"""What cannot be stored is told by ``publish()``, in a transaction that has other work to do.

Elsewhere a NUL, a Decimal or an overlong key came back as an error of the driver, from a flush far
away from its cause, and took the transaction with it.

Right is: a typed error at the call, nothing queued, the session as it was; the business row and the
events that are right can be committed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, func, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sqlalchemy_relaybus import PublishError, RelayBus


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


class State(Enum):
    PAID = "paid"


@dataclass
class Line:
    n: int


LINES: list[Any] = []
LINES.append(LINES)
RANDOM = "".join(map(chr, random.Random(14).choices(range(0x21, 0x7F), k=4000)))
WIDE = "".join(map(chr, random.Random(14).choices(range(0x10000, 0x20000), k=256)))  # 4 bytes each

#: As arguments of ``publish()``; the type is given.
WRONG: dict[str, dict[str, Any]] = {
    "NUL as value": {"payload": {"a": [{"b": "a\0b"}]}},
    "NUL as name": {"payload": {"a": [{"a\0b": 1}]}},
    "NUL alone": {"payload": "\0"},
    "surrogate": {"payload": "\ud800"},
    "Decimal": {"payload": {"a": Decimal(1)}},
    "aware": {"payload": {"a": datetime.now(UTC)}},
    "naive": {"payload": {"a": datetime.now()}},  # noqa: DTZ005 - one of each
    "UUID": {"payload": {"a": UUID(int=1)}},
    "Enum": {"payload": {"a": State.PAID}},
    "bytes": {"payload": {"a": b"a"}},
    "set": {"payload": {"a": {1}}},
    "dataclass": {"payload": Line(1)},
    "ORM": {"payload": {"a": Order(id=1)}},
    "int keys": {"payload": {1: 2}},
    "tuple": {"payload": {"a": (1, 2)}},
    "NaN": {"payload": float("nan")},
    "cycle": {"payload": LINES},
    "key with NUL": {"key": "a\0b"},
    "empty key": {"key": ""},
    "random key": {"key": RANDOM},
    "long key": {"key": "a" * 100_000},
    "key of another type": {"key": 7},
    "id with NUL": {"id": "a\0b"},
    "header with NUL": {"headers": {"a": "\0"}},
    "delay": {"delay": 10**400},
    "moment": {"available_at": datetime.max.replace(tzinfo=UTC)},
    "type": {"type": "a b"},
    "nobody's": {"type": "unknown"},
}


@pytest.fixture
def bus() -> RelayBus:
    bus = RelayBus(wake=False)
    bus.route("order.placed", to=["mail"])
    return bus


@pytest.fixture
def database(engine: Engine) -> Engine:
    Base.metadata.create_all(engine)
    return engine


def stored(engine: Engine, bus: RelayBus) -> tuple[list[int], list[str]]:
    """The business rows and the payloads that are committed."""
    events = bus.tables.events
    with engine.connect() as connection:
        orders = connection.scalars(select(Order.id).order_by(Order.id)).all()
        payloads = connection.scalars(select(events.c.payload).order_by(events.c.created_at)).all()
        return list(orders), list(payloads)


def publish_wrongly(publish: Callable[..., Any], target: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(PublishError):
        publish(target, **{"type": "order.placed", "payload": {}, **wrong})


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_on_a_session(database: Engine, bus: RelayBus, wrong: dict[str, Any]) -> None:
    with Session(database) as session:
        session.add(Order(id=1))
        session.flush()
        session.add(Order(id=2))  # not flushed yet
        bus.publish(session, "order.placed", "before")
        pending = set(session.new)
        publish_wrongly(bus.publish, session, wrong)
        assert set(session.new) == pending
        bus.publish(session, "order.placed", "after")
        session.commit()
    assert stored(database, bus) == ([1, 2], ['"before"', '"after"'])


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_on_a_connection(database: Engine, bus: RelayBus, wrong: dict[str, Any]) -> None:
    with database.begin() as connection:
        connection.execute(insert(Order).values(id=1))
        publish_wrongly(bus.publish, connection, wrong)
        bus.publish(connection, "order.placed", "after")
    assert stored(database, bus) == ([1], ['"after"'])


def test_with_asyncio(database: Engine, database_url: str, bus: RelayBus) -> None:
    async def publish_on_connection(connection: AsyncConnection) -> None:
        await connection.execute(insert(Order).values(id=2))
        for wrong in WRONG.values():
            with pytest.raises(PublishError):
                await bus.publish_async(
                    connection, **{"type": "order.placed", "payload": {}, **wrong}
                )
        await bus.publish_async(connection, "order.placed", "on a connection")

    async def work() -> None:
        engine = create_async_engine(database_url)
        try:
            async with AsyncSession(engine) as session:
                session.add(Order(id=1))
                await session.flush()
                for wrong in WRONG.values():
                    publish_wrongly(bus.publish, session, wrong)
                bus.publish(session, "order.placed", "on a session")
                await session.commit()
            async with engine.begin() as connection:
                await publish_on_connection(connection)
        finally:
            await engine.dispose()

    asyncio.run(work())
    assert stored(database, bus) == ([1, 2], ['"on a session"', '"on a connection"'])


ABOUT = {
    name: wrong
    for name, wrong in WRONG.items()
    if wrong.keys() <= {"type", "payload", "key", "headers"}  # what record() takes
}


@pytest.mark.parametrize("wrong", ABOUT.values(), ids=ABOUT)
def test_about_an_object(database: Engine, bus: RelayBus, wrong: dict[str, Any]) -> None:
    with Session(database) as session:
        order = Order(id=1)
        session.add(order)
        publish_wrongly(bus.record, order, wrong)
        bus.record(order, "order.placed", "after")
        session.commit()
    assert stored(database, bus) == ([1], ['"after"'])


def test_the_longest_of_everything_that_is_taken(database: Engine, bus: RelayBus) -> None:
    """Text that does not compress, so that an index holds all of it: ready, waiting, numbered."""
    handler = "h" * 200
    bus.route("long", to=[handler])
    keys = [RANDOM[:1024], WIDE]
    with Session(database) as session:
        for key in keys:
            bus.publish(session, "long", 1, key=key)
            bus.publish(session, "long", 2, key=key, delay=timedelta(days=1))
        session.commit()
        for table in (bus.tables.deliveries, bus.tables.parked):
            assert set(session.scalars(select(table.c.key))) == set(keys)
            assert session.scalar(select(func.count()).select_from(table)) == 2
