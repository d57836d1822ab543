"""For the tests of applications: events and contexts to call handlers with, and what was published.

A private PostgreSQL server is in :mod:`.server`, which needs the extra ``embedded``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Engine, Result, and_, exists, func, or_, select
from sqlalchemy.orm import Session, scoped_session

from .. import codec
from ..bus import RelayBus
from ..event import Context, Event

__all__ = ["drain", "make_context", "make_event", "published"]


def make_event(
    type: str,
    payload: Any = None,
    *,
    key: str | None = None,
    id: UUID | str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Event:
    """An event as a handler would get it. Raises what ``publish()`` would."""
    event_id = codec.new_event_id() if id is None else codec.event_id(id)[0]
    return Event(
        event_id,
        codec.check_type(type),
        codec.encode_payload(payload),
        codec.check_key(key),
        codec.encode_headers(headers),
    )


def make_context(event: Event, handler: str, *, attempt: int = 1, fence: int = 1) -> Context:
    """The context of a run of the handler named *handler*, without a time limit."""
    return Context(event.id, handler, attempt, fence)


def published(
    bus: RelayBus, target: Session | scoped_session[Any] | Connection, *types: str
) -> list[Event]:
    """The events that *target* sees in its transaction, oldest first; of *types*, if any are given.

    A session is flushed first, so what it has published is there, committed or not. With an
    ``AsyncSession``: ``await session.run_sync(lambda session: published(bus, session))``.
    """
    events = bus.tables.events
    query = select(events).order_by(events.c.created_at, events.c.sequence, events.c.id)
    if types:
        query = query.where(events.c.type.in_(types))
    rows: Result[Any]
    if isinstance(target, Connection):
        rows = target.execute(query)
    else:
        target.flush()
        rows = target.execute(query, bind_arguments={"clause": events})
    return [
        Event(row.id, row.type, row.payload, row.key, row.headers, row.sequence, row.created_at)
        for row in rows
    ]


def drain(bus: RelayBus, engine: Engine, *, timeout: float = 30.0, **settings: Any) -> None:
    """Run a worker until nothing is ready, running or waiting to be tried again.

    What is delayed or snoozed is left, and so are the dead letters and what waits for one of these.
    *settings* are a worker's.
    Raises ``TimeoutError`` after *timeout* seconds, and whatever ended the worker.
    """
    from ..worker import Worker  # an application's unit tests do without

    deliveries, parked = bus.tables.deliveries, bus.tables.parked
    first = parked.alias("first")
    held_back = (
        exists()
        .where(
            first.c.lane == parked.c.lane,
            first.c.handler == parked.c.handler,
            first.c.key == parked.c.key,
            first.c.blocks,
            first.c.status != "behind",
        )
        .correlate(parked)
    )
    goes_on = or_(parked.c.status == "retrying", and_(parked.c.status == "behind", ~held_back))
    # in one statement: what moves from one to the other must not be missed in both
    query = select(
        select(func.count()).select_from(deliveries).scalar_subquery()
        + select(func.count()).where(goes_on).scalar_subquery()
    )
    worker = Worker(bus, engine, **{"poll_interval": 0.01, "max_poll_interval": 0.1, **settings})
    raised: list[BaseException] = []

    def run() -> None:
        try:
            worker.run()
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            raised.append(error)

    thread = threading.Thread(target=run, name="relaybus-drain", daemon=True)
    thread.start()
    end = time.monotonic() + timeout
    try:
        while thread.is_alive():
            with engine.connect() as connection:
                left = connection.scalar(query)
            if not left:
                break
            if time.monotonic() > end:
                raise TimeoutError(f"{left} deliveries are left after {timeout:g} s")
            time.sleep(0.01)
    finally:
        worker.stop(grace=max(0.1, end - time.monotonic()))
        thread.join()
    if raised:
        raise raised[0]
