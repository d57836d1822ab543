"""The FastAPI example: inside a transaction that is rolled back, and with real workers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from httpx2 import ASGITransport, AsyncClient
from sqlalchemy import Engine, func, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from examples.fastapi_shop.app import app, open_session
from examples.fastapi_shop.bus import ORDER_PLACED, ORDER_RESERVED, SessionLocal, bus, reserve
from examples.fastapi_shop.models import Base, Order, Stock
from sqlalchemy_relaybus import Event, SchemaMissingError
from tests.support.workers import drained, eventually, terminated, worker_process

events = bus.tables.events


@pytest.fixture
def shop(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """A database with the shop's tables and one item, which the application is told of."""
    Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        session.add(Stock(item="tea", left=3))
    monkeypatch.setenv("RELAYBUS_URL", engine.url.render_as_string(hide_password=False))
    yield engine
    SessionLocal.configure(bind=None)


# -- rolled back -----------------------------------------------------------------------------------


@asynccontextmanager
async def rolled_back(shop: Engine) -> AsyncIterator[AsyncConnection]:
    """A connection with a transaction that the application's sessions join; none of it stays."""
    engine = create_async_engine(shop.url)
    try:
        async with engine.connect() as connection:
            outer = await connection.begin()

            async def joined() -> AsyncIterator[AsyncSession]:
                async with session_in(connection) as session:
                    yield session

            app.dependency_overrides[open_session] = joined
            try:
                yield connection
            finally:
                del app.dependency_overrides[open_session]
                await outer.rollback()
    finally:
        await engine.dispose()


def session_in(connection: AsyncConnection) -> AsyncSession:
    return SessionLocal(bind=connection, join_transaction_mode="create_savepoint")


def in_rolled_back(
    shop: Engine, test: Callable[[AsyncConnection, AsyncClient], Coroutine[Any, Any, None]]
) -> None:
    async def run() -> None:
        async with (
            rolled_back(shop) as connection,
            AsyncClient(transport=ASGITransport(app), base_url="http://shop") as client,
        ):
            await test(connection, client)

    asyncio.run(run())
    with shop.connect() as connection:
        assert connection.scalar(select(func.count()).select_from(Order)) == 0
        assert connection.scalar(select(func.count()).select_from(events)) == 0
        assert connection.scalar(select(func.count()).select_from(bus.tables.deliveries)) == 0
        assert connection.scalar(select(Stock.left)) == 3


async def published(connection: AsyncConnection, type: str) -> list[Event]:
    """The events of *type* that are in the transaction of *connection*."""
    rows = await connection.execute(
        select(events.c.id, events.c.type, events.c.payload, events.c.key)
        .where(events.c.type == type)
        .order_by(events.c.id)
    )
    return [Event(*row) for row in rows]


async def place(client: AsyncClient, quantity: int) -> int:
    answer = await client.post(
        "/orders", json={"customer": "ann", "item": "tea", "quantity": quantity}
    )
    assert answer.status_code == 202
    assert answer.json()["status"] == "placed"
    return int(answer.json()["id"])


def test_an_order_is_published_with_its_row_and_reserved(shop: Engine) -> None:
    async def test(connection: AsyncConnection, client: AsyncClient) -> None:
        id = await place(client, 2)
        (event,) = await published(connection, ORDER_PLACED)
        assert (event.payload, event.key) == ({"order": id}, "tea")

        async with session_in(connection) as session, session.begin():
            await reserve(event, session)
        assert (await client.get(f"/orders/{id}")).json() == {"id": id, "status": "reserved"}
        assert await connection.scalar(select(Stock.left)) == 1
        (event,) = await published(connection, ORDER_RESERVED)
        assert (event.payload["order"], event.key) == (id, "ann")

    in_rolled_back(shop, test)


def test_an_order_for_more_than_there_is_is_refused(shop: Engine) -> None:
    async def test(connection: AsyncConnection, client: AsyncClient) -> None:
        id = await place(client, 4)
        (event,) = await published(connection, ORDER_PLACED)
        async with session_in(connection) as session, session.begin():
            await reserve(event, session)
        assert (await client.get(f"/orders/{id}")).json()["status"] == "refused"
        assert await connection.scalar(select(Stock.left)) == 3
        assert await published(connection, ORDER_RESERVED) == []

    in_rolled_back(shop, test)


def test_an_order_that_is_refused_at_the_door_publishes_nothing(shop: Engine) -> None:
    async def test(connection: AsyncConnection, client: AsyncClient) -> None:
        answer = await client.post("/orders", json={"customer": "ann", "item": "tea"})
        assert answer.status_code == 422
        assert await published(connection, ORDER_PLACED) == []

    in_rolled_back(shop, test)


# -- with a worker ---------------------------------------------------------------------------------


def buy(client: TestClient, quantities: list[int]) -> list[int]:
    """Fill the shelf with five, and place orders."""
    assert client.put("/stock/tea", params={"left": 5}).status_code == 204
    return [
        client.post(
            "/orders", json={"customer": f"c{n}", "item": "tea", "quantity": quantity}
        ).json()["id"]
        for n, quantity in enumerate(quantities)
    ]


def states(client: TestClient, ids: list[int]) -> list[str]:
    return [client.get(f"/orders/{id}").json()["status"] for id in ids]


def test_the_worker_in_the_web_process(shop: Engine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with TestClient(app) as client:
        ids = buy(client, [2, 2, 2, 1])
        drained(bus, shop)
        # first come, first served: the third asks for more than is left, the fourth does not
        assert states(client, ids) == ["reserved", "reserved", "refused", "reserved"]
        assert client.get("/orders/0").status_code == 404
    mails = [text for text in caplog.messages if text.startswith("mail to")]
    assert sorted(mail.split(" (")[0] for mail in mails) == [
        f"mail to {customer}: tea is yours" for customer in ("c0", "c1", "c3")
    ]
    with shop.connect() as connection:
        assert connection.scalar(select(Stock.left)) == 0
        # it has ended, and given its lanes back
        held = bus.tables.lanes.c.holder.is_not(None)
        assert connection.scalar(select(func.count()).where(held)) == 0


def test_a_worker_of_its_own(shop: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_WORKER", "separate")
    with TestClient(app) as client:
        ids = buy(client, [4, 2])
        assert states(client, ids) == ["placed", "placed"]
        with worker_process(tmp_path, app="examples.fastapi_shop.bus:bus") as worker:
            eventually(lambda: states(client, ids) == ["reserved", "refused"])
            worker.until(lambda: "mail to c0: tea is yours" in worker.output)
            assert terminated(worker) == 0
    assert "mail to c1" not in worker.output


def test_a_worker_that_cannot_run_is_no_secret(
    empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELAYBUS_URL", empty_database_url)
    with pytest.raises(SchemaMissingError), TestClient(app):
        pass
