"""For the tests of applications: events and contexts to call handlers with, and what was published.

A private PostgreSQL server is in :mod:`.server`, which needs the extra ``embedded``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any
from uuid import UUID

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    Result,
    Select,
    Table,
    exists,
    func,
    select,
    union_all,
)
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

    Left alone is what is delayed or snoozed, the dead letters, what waits for one of these, and
    what is for handlers that *bus* has not. *settings* are a worker's.
    Raises ``TimeoutError`` after *timeout* seconds, which says what is left, and whatever ended
    the worker.
    """
    from ..worker import Worker  # an application's unit tests do without

    query = _unfinished(bus)
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
    left = ""
    try:
        while not raised:
            runs = thread.is_alive()
            with engine.connect() as connection:
                left = ", ".join(f"{count} of {name}" for name, count in connection.execute(query))
            if not (left and runs):
                break
            if time.monotonic() > end:
                raise TimeoutError(f"deliveries are left after {timeout:g} s: {left}")
            time.sleep(0.01)
    finally:
        worker.stop(grace=max(0.1, end - time.monotonic()))
        thread.join()
    if raised:
        raise raised[0]
    if left:
        raise RuntimeError(f"the worker ended by itself (its log says why): {left} are left")


def _unfinished(bus: RelayBus) -> Select[Any]:
    """How many deliveries :func:`drain` waits for, of each handler that has any."""
    deliveries, parked = bus.tables.deliveries, bus.tables.parked

    def of(table: Table, *where: ColumnElement[bool]) -> Select[Any]:
        first = parked.alias()
        held_back = exists().where(
            first.c.lane == table.c.lane,
            first.c.handler == table.c.handler,
            first.c.key == table.c.key,
            first.c.id < table.c.id,
            first.c.blocks,
            first.c.status.not_in(("behind", "retrying")),
        )
        known = table.c.handler.in_(list(bus.handlers))
        return select(table.c.handler).where(known, ~held_back, *where)

    # in one statement: what moves from one table to the other must not be missed in both
    left = union_all(
        of(deliveries), of(parked, parked.c.status.in_(("behind", "retrying")))
    ).subquery()
    return select(left.c.handler, func.count()).group_by(left.c.handler).order_by(left.c.handler)
