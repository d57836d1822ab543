"""The web application: ``uvicorn examples.fastapi_shop.app:app``.

``RELAYBUS_URL`` names the database. A worker runs in this process unless ``SHOP_WORKER=separate``.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException
from pydantic import BaseModel, Field
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from examples.fastapi_shop.bus import ORDER_PLACED, SessionLocal, bus
from examples.fastapi_shop.models import Order, Stock
from sqlalchemy_relaybus import Worker


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    url = os.environ["RELAYBUS_URL"]
    engine = create_async_engine(url)
    SessionLocal.configure(bind=engine)
    try:
        if os.environ.get("SHOP_WORKER") == "separate":
            yield
        else:
            async with embedded_worker(engine):
                yield
    finally:
        await engine.dispose()


@asynccontextmanager
async def embedded_worker(async_engine: AsyncEngine) -> AsyncIterator[None]:
    """A worker in a thread for the length of the block."""
    engine = create_engine(async_engine.url)
    worker = Worker(bus, engine, async_engine=async_engine)
    running = asyncio.create_task(asyncio.to_thread(worker.run))
    try:
        yield
    finally:
        worker.stop(grace=10)
        try:
            await running  # raises what ended the worker, if anything did
        finally:
            engine.dispose()


async def open_session() -> AsyncIterator[AsyncSession]:
    async with SessionLocal() as session:
        yield session


SessionDep = Annotated[AsyncSession, Depends(open_session)]
app = FastAPI(title="A small shop", lifespan=lifespan)


class NewOrder(BaseModel):
    customer: str = Field(min_length=1)
    item: str = Field(min_length=1)
    quantity: int = Field(gt=0)


class OrderState(BaseModel):
    id: int
    status: str


@app.post("/orders", status_code=202)
async def place_order(new: NewOrder, session: SessionDep) -> OrderState:
    order = Order(**new.model_dump())
    session.add(order)
    await session.flush()  # gives it its id
    bus.publish(session, ORDER_PLACED, {"order": order.id}, key=order.item)
    await session.commit()  # the order and its event, or neither
    return OrderState(id=order.id, status=order.status)


@app.get("/orders/{id}")
async def order_state(id: int, session: SessionDep) -> OrderState:
    order = await session.get(Order, id)
    if order is None:
        raise HTTPException(404, "there is no such order")
    return OrderState(id=order.id, status=order.status)


@app.put("/stock/{item}", status_code=204)
async def fill_shelf(item: str, left: int, session: SessionDep) -> None:
    await session.merge(Stock(item=item, left=left))
    await session.commit()
