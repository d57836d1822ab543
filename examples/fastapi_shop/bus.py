"""The bus and its handlers.

A worker process loads this, and nothing of FastAPI:
``python -m sqlalchemy_relaybus.worker --app examples.fastapi_shop.bus:bus``.
"""

from __future__ import annotations

import logging

from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from examples.fastapi_shop.models import Order, Stock
from sqlalchemy_relaybus import Context, Event, Exponential, RelayBus

ORDER_PLACED = "order.placed"
ORDER_RESERVED = "order.reserved"

log = logging.getLogger(__name__)

#: The application's sessions. Whoever runs it binds them: ``SessionLocal.configure(bind=engine)``.
SessionLocal = async_sessionmaker(expire_on_commit=False)

bus = RelayBus()
bus.attach(SessionLocal)


@bus.handler(ORDER_PLACED, name="stock.reserve", mode="transactional")
async def reserve(event: Event, session: AsyncSession) -> None:
    """Take the goods off the shelf: once for each order, whatever happens to the worker.

    The session's transaction is the one that the delivery completes in, so the stock, the order,
    the next event and the completion commit together. The worker commits; a handler never does.
    """
    order = await session.get_one(Order, event.payload["order"])
    # Orders for one item have one key and come one at a time. The lock is for the shop's owner,
    # who may put something on the shelf meanwhile.
    stock = await session.get(Stock, order.item, with_for_update=True)
    if stock is None or stock.left < order.quantity:
        order.status = "refused"
        return
    stock.left -= order.quantity
    order.status = "reserved"
    bus.publish(
        session,
        ORDER_RESERVED,
        {"order": order.id, "customer": order.customer, "item": order.item},
        key=order.customer,
    )


@bus.handler(ORDER_RESERVED, name="mail.confirm", retry=Exponential(max_attempts=8), timeout=30)
async def confirm(event: Event, ctx: Context) -> None:
    """Tell the customer: at least once, so the mail service is given a key to know it again by."""
    await send_mail(
        event.payload["customer"], f"{event.payload['item']} is yours", key=ctx.idempotency_key
    )


async def send_mail(to: str, text: str, *, key: str) -> None:
    """Stands for the call of a mail service."""
    log.info("mail to %s: %s (%s)", to, text, key)
