"""From events to rows, in the publisher's transaction, which is meant to be READ COMMITTED.

One statement inserts the events and deliveries of a flush; one before it numbers ordering keys
where there are any. Events whose id the caller supplied may exist already, and take two more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any
from uuid import UUID

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Connection,
    DateTime,
    Executable,
    Float,
    Select,
    SmallInteger,
    Text,
    Uuid,
    bindparam,
    column,
    false,
    func,
    insert,
    literal_column,
    select,
    true,
    update,
)
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.sql.elements import ColumnElement
from sqlalchemy.sql.selectable import CTE, FromClause

from ...event import Event
from ...lanes import lane_of, lane_of_event
from ...tables import Tables
from ..base import NewEvent
from .sql import CLOCK, array_literal, rows, seconds

#: Separates handler names, which hold no blanks.
_BLANK = " "


def publish(tables: Tables, connection: Connection, events: Sequence[NewEvent]) -> None:
    """Insert *events* and their deliveries, numbered in the given order."""
    events = _distinct(events)
    sequences = _number(tables, connection, events)
    while True:
        given = any(new.given_id for new in events)
        delayed = any(new.waits for new in events)
        result = connection.execute(
            _insertion(tables, given, delayed), _parameters(events, sequences)
        )
        if not given:
            return
        inserted = set(result.scalars())
        known = [new for new in events if new.event.id not in inserted]
        # An event found while inserting and gone when it is read was purged in between: its id
        # is new again, so it starts over.
        events = _add_handlers(tables, connection, known) if known else []
        if not events:
            return


def _distinct(events: Sequence[NewEvent]) -> list[NewEvent]:
    """One entry an id, with the handlers of all its entries.

    Within one statement ON CONFLICT would not see the other row: two rows of one id would end in
    an error or in two deliveries.
    """
    by_id: dict[UUID, NewEvent] = {}
    for new in events:
        first = by_id.setdefault(new.event.id, new)
        if first is not new:
            both = dict.fromkeys(chain(first.handlers, new.handlers))
            by_id[new.event.id] = first._replace(
                handlers=list(both), passing=[*first.passing, *new.passing]
            )
    return list(by_id.values())


# -- ordering keys ---------------------------------------------------------------------------------


@lru_cache
def numbering(tables: Tables) -> Executable:
    """Count on the keys' counters, and so lock them until the transaction ends.

    The lock comes before the deliveries' ids are drawn: a transaction that publishes on the same
    key waits here for the first one's end, so within a key the order of ids is the order of
    commits. Sorted: two transactions never wait for each other's keys in opposite order.
    """
    keys = tables.keys
    counted = rows("counted", key=("keys", Text()), n=("counts", BigInteger()))
    entry = pg_insert(keys).from_select(
        ["key", "last"],
        select(counted.c.key, counted.c.n).order_by(counted.c.key),
        include_defaults=False,
    )
    return entry.on_conflict_do_update(
        index_elements=[keys.c.key], set_={"last": keys.c.last + entry.excluded.last}
    ).returning(keys.c.key, keys.c.last)


def _number(tables: Tables, connection: Connection, events: Iterable[NewEvent]) -> dict[UUID, int]:
    """Event id to its number within its key, for the events that have a key."""
    keyed = [new.event for new in events if new.event.key is not None]
    if not keyed:
        return {}
    counts = Counter(event.key for event in keyed)
    result = connection.execute(
        numbering(tables), {"keys": list(counts), "counts": array_literal(counts.values())}
    )
    following = {key: last - counts[key] + 1 for key, last in result}
    numbers = {}
    for event in keyed:
        numbers[event.id] = following[event.key]
        following[event.key] += 1
    return numbers


# -- events and deliveries -------------------------------------------------------------------------


_NEW = rows(
    "asked",
    ordinality="n",
    id=("ids", Uuid()),
    type=("types", Text()),
    payload=("payloads", Text()),
    headers=("headers", Text()),
    key=("keys", Text()),
    sequence=("sequences", BigInteger()),
    handlers=("handlers", Text()),
    lane=("lanes", SmallInteger()),
    delay=("delays", Float()),
    available_at=("moments", DateTime(timezone=True)),
)


def _parameters(events: Sequence[NewEvent], sequences: dict[UUID, int]) -> dict[str, Any]:
    each = [new.event for new in events]
    return {
        "ids": [event.id for event in each],
        "types": [event.type for event in each],
        "payloads": [event.payload_text for event in each],
        "headers": [event.headers_text for event in each],
        "keys": [event.key for event in each],
        "sequences": array_literal(sequences.get(event.id) for event in each),
        "handlers": [_BLANK.join(new.handlers) for new in events],
        "lanes": array_literal(map(_lane, each)),
        "delays": array_literal(new.delay for new in events),
        "moments": array_literal(_moment(new) for new in events),
        "passing": _passing(events),
    }


def _passing(events: Iterable[NewEvent]) -> list[str]:
    return sorted({handler for new in events for handler in new.passing})


def _moment(new: NewEvent) -> str | None:
    return None if new.available_at is None else f'"{new.available_at.isoformat()}"'


def _lane(event: Event) -> int:
    return lane_of_event(event.id) if event.key is None else lane_of(event.key)


@lru_cache
def _insertion(tables: Tables, given: bool, delayed: bool) -> Executable:
    """Insert events and their deliveries, in this order of ids.

    *given*: some ids were supplied by callers. ON CONFLICT waits for a transaction that is just
    inserting the same id and then leaves the event to :func:`_add_handlers`; it costs a record in
    the write-ahead log for each event, so it is not asked for ids made here. Events go in by id:
    two such flushes never wait for each other in opposite order. Deliveries are added only for the
    events that this statement inserted.

    *delayed*: some deliveries are due later. They are parked, with ids drawn in one sequence with
    the others, so that the order of their key holds.
    """
    events = tables.events
    new = select(_NEW).cte("new")
    entries = select(
        new.c.id,
        CLOCK,
        new.c.sequence,
        new.c.type,
        new.c.payload,
        func.string_to_array(new.c.handlers, _BLANK),
        new.c.headers,
        new.c.key,
    ).order_by(new.c.id if given else new.c.n)
    names = ["id", "created_at", "sequence", "type", "payload", "handlers", "headers", "key"]
    if given:
        stored = (
            pg_insert(events)
            .from_select(names, entries, include_defaults=False)
            .on_conflict_do_nothing(index_elements=[events.c.id])
            .returning(events.c.id)
        ).cte("stored")
    else:
        stored = (insert(events).from_select(names, entries, include_defaults=False)).cte("stored")

    each = (
        func.unnest(func.string_to_array(new.c.handlers, _BLANK))
        .table_valued(column("handler", Text()), with_ordinality="m")
        .render_derived(name="each")
        .lateral()
    )
    routes = (
        select(new.c.id.label("event_id"), each.c.handler, new.c.lane, new.c.key, _due(new))
        .select_from(new.join(each, true()))
        .order_by(new.c.n, each.c.m)
    )
    if given:
        routes = routes.where(new.c.id.in_(select(stored.c.id)))
        return select(stored.c.id).add_cte(*_deliver(tables, routes, delayed))
    return _run_all(stored, *_deliver(tables, routes, delayed))


def _run_all(*writes: CTE) -> Executable:
    """Data-modifying CTEs run to their end whether or not anybody reads them."""
    return select(literal_column("1")).where(false()).add_cte(*writes)


def _due(rows: FromClause) -> ColumnElement[Any]:
    """When the deliveries of *rows* are due, by the database's clock; null: at once."""
    return func.coalesce(rows.c.available_at, CLOCK + seconds(rows.c.delay)).label("due")


def _deliver(tables: Tables, routes: Select[Any], delayed: bool) -> list[CTE]:
    """Insert a delivery for each row of *routes*, with ids drawn in its order."""
    deliveries, parked = tables.deliveries, tables.parked
    names = ["id", "event_id", "handler", "lane", "key"]
    # the ids are drawn from the ordered rows: the server evaluates volatile columns after a sort
    ordered = routes.subquery("ordered")
    drawn = (
        select(
            tables.delivery_id.next_value().label("id"),
            ordered.c.event_id,
            ordered.c.handler,
            ordered.c.lane,
            ordered.c.key,
            ordered.c.due,
        )
        .cte("drawn")
        .prefix_with("MATERIALIZED")
    )
    ready = select(*(drawn.c[name] for name in names))
    if not delayed:
        return [
            insert(deliveries).from_select(names, ready, include_defaults=False).cte("delivered")
        ]
    later = select(
        *(drawn.c[name] for name in names),
        drawn.c.due,
        drawn.c.handler != func.all(bindparam("passing", type_=ARRAY(Text))),
        literal_column("'delayed'"),
    ).where(drawn.c.due.is_not(None))
    return [
        insert(deliveries)
        .from_select(names, ready.where(drawn.c.due.is_(None)), include_defaults=False)
        .cte("delivered"),
        insert(parked)
        .from_select([*names, "available_at", "blocks", "status"], later, include_defaults=False)
        .cte("delayed"),
    ]


# -- events that exist already ---------------------------------------------------------------------


@lru_cache
def lock_events(tables: Tables) -> Executable:
    """Lock events by id, and read which handlers they ever had a delivery for.

    The lock makes publishing an id again idempotent without a unique index on deliveries: two
    transactions that add handlers to one event do so one after the other, and the second sees what
    the first added. It also keeps retention from removing the event in between.
    """
    events = tables.events
    return (
        select(events.c.id, events.c.key, events.c.handlers)
        .where(events.c.id == func.any(bindparam("ids", type_=ARRAY(Uuid))))
        .order_by(events.c.id)
        .with_for_update()
    )


@lru_cache
def _extension(tables: Tables, delayed: bool) -> Executable:
    """Add deliveries, and list their handlers on the events, which are locked."""
    events = tables.events
    asked = select(
        rows(
            "asked",
            ordinality="n",
            event_id=("ids", Uuid()),
            handler=("handlers", Text()),
            lane=("lanes", SmallInteger()),
            key=("keys", Text()),
            delay=("delays", Float()),
            available_at=("moments", DateTime(timezone=True)),
        )
    ).cte("asked")
    added = (
        select(asked.c.event_id, func.array_agg(asked.c.handler).label("handlers"))
        .group_by(asked.c.event_id)
        .subquery("added")
    )
    listed = (
        update(events)
        .where(events.c.id == added.c.event_id)
        .values(handlers=events.c.handlers.op("||")(added.c.handlers))
        .cte("listed")
    )
    routes = select(
        asked.c.event_id, asked.c.handler, asked.c.lane, asked.c.key, _due(asked)
    ).order_by(asked.c.n)
    return _run_all(listed, *_deliver(tables, routes, delayed))


def _add_handlers(
    tables: Tables, connection: Connection, known: Sequence[NewEvent]
) -> list[NewEvent]:
    """Add deliveries for handlers that the stored events do not list; return what is not stored."""
    stored = {
        id: (key, set(handlers))
        for id, key, handlers in connection.execute(
            lock_events(tables), {"ids": [new.event.id for new in known]}
        )
    }
    # the stored key counts, or a redelivery could land in another lane than its key
    added = [
        (new, handler, stored[new.event.id][0])
        for new in known
        if new.event.id in stored
        for handler in new.handlers
        if handler not in stored[new.event.id][1]
    ]
    if added:
        # An id may come again under another key than it is stored with. The deliveries go under
        # the stored one, whose counter must be locked, too, before their ids are drawn.
        given = {new.event.key for new in known}
        others = {key for _, _, key in added if key is not None and key not in given}
        if others:
            connection.execute(
                numbering(tables),
                {"keys": list(others), "counts": array_literal(0 for _ in others)},
            )
        parameters = {
            "ids": [new.event.id for new, _, _ in added],
            "handlers": [handler for _, handler, _ in added],
            "lanes": array_literal(
                lane_of_event(new.event.id) if key is None else lane_of(key)
                for new, _, key in added
            ),
            "keys": [key for _, _, key in added],
            "delays": array_literal(new.delay for new, _, _ in added),
            "moments": array_literal(_moment(new) for new, _, _ in added),
            "passing": _passing(known),
        }
        delayed = any(new.waits for new, _, _ in added)
        connection.execute(_extension(tables, delayed), parameters)
    return [new for new in known if new.event.id not in stored]
