"""The handlers.

A worker process loads this, and nothing of Flask:
``python -m sqlalchemy_relaybus.worker --app examples.flask_library.handlers:bus``.
"""

from __future__ import annotations

import logging

from sqlalchemy.orm import Session

from examples.flask_library.models import CatalogueCard, bus
from sqlalchemy_relaybus import Context, Event

__all__ = ["bus", "keep_catalogue", "notify_reader"]

log = logging.getLogger(__name__)


@bus.handler(
    "book.added", "book.changed", "book.removed", name="catalogue.keep", mode="transactional"
)
def keep_catalogue(event: Event, session: Session) -> None:
    """Keep the card of the event's book.

    The card and the delivery's completion commit together. One handler takes all three types: the
    events of one key reach a handler in the order in which they were committed, so that the last
    one wins rightly. Between two handlers there is no order.
    """
    book = event.payload
    if event.type != "book.removed":
        session.merge(
            CatalogueCard(
                book_id=book["id"],
                text=f"{book['title']} / {book['author']}".casefold(),
                available=book["in_house"] > 0,
            )
        )
    elif (card := session.get(CatalogueCard, book["id"])) is not None:
        session.delete(card)


@bus.handler("book.lent", name="reader.notify", timeout=30)
def notify_reader(event: Event, ctx: Context) -> None:
    """Tell the reader: at least once. The log stands for a service, and is given a key."""
    loan = event.payload
    log.info("letter to %s: enjoy %s (%s)", loan["reader"], loan["title"], ctx.idempotency_key)
