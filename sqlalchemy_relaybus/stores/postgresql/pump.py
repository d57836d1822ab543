"""The pump: one statement that deletes what finished, claims what is ready and renews the leases.

One statement is right for lanes already held (and wrong for taking them): only their holder claims
from them, with one exchange outstanding, and ``kept`` and ``finished`` name every delivery of them
whose end is not confirmed. Whatever the statement's snapshot still shows of these is not claimed
again.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    Integer,
    SmallInteger,
    Text,
    Uuid,
    and_,
    bindparam,
    delete,
    func,
    literal_column,
    null,
    or_,
    select,
    true,
    union_all,
    update,
)
from sqlalchemy.sql.elements import ColumnElement
from sqlalchemy.sql.selectable import CTE

from ...tables import Tables
from .followers import blocked
from .sql import NO_IDS, Prepared, Tid, address, lease_end, rows, rows_at, run_of, unlocked


@lru_cache
def exchange(tables: Tables, careful: bool) -> Prepared:
    """The pump. *careful*: step over rows that somebody else has locked.

    Otherwise such a row holds the statement up until its lock timeout, and the next one is sent
    careful. Locking rows before deleting them writes a second record a delivery to the
    write-ahead log, so it is not done as long as nobody else's lock is in the way.
    """
    deliveries, lanes, events = tables.deliveries, tables.lanes, tables.events
    asked = select(
        rows(
            "asked",
            lane=("lanes", SmallInteger()),
            epoch=("epochs", BigInteger()),
            version=("versions", BigInteger()),
            address=("addresses", Tid()),
            claim=("claim", Boolean()),
            write=("write", Boolean()),
            tidy=("tidy", Boolean()),
        )
    ).cte("asked")
    finished = select(
        rows(
            "finished",
            lane=("finished_lanes", SmallInteger()),
            id=("finished_ids", BigInteger()),
            claims=("finished_claims", Integer()),
        )
    ).cte("finished")
    kept = select(
        rows(
            "kept",
            lane=("kept_lanes", SmallInteger()),
            id=("kept_ids", BigInteger()),
            starts=("kept_starts", Boolean()),
        )
    ).cte("kept")

    # -- claim: the ready rows of the lanes asked for, in id order. From each lane's start: a
    # remembered position would pass over ids that commit late.
    busy = union_all(select(kept.c.id), select(finished.c.id))
    following = (
        select(deliveries)
        .where(
            deliveries.c.lane == asked.c.lane,
            # other workers' handlers are not ours to claim
            deliveries.c.handler == func.any(bindparam("handlers", type_=ARRAY(Text))),
            # the snapshot may still show what ended since the last exchange
            deliveries.c.id.not_in(busy),
            ~blocked(tables, deliveries),
        )
        .order_by(deliveries.c.id)
        # a cap for each lane, or two deep lanes would have all the room
        .limit(bindparam("per_lane", type_=Integer))
        .lateral("following")
    )
    due = (
        select(following)
        .select_from(asked.join(following, asked.c.claim))
        .limit(bindparam("limit", type_=Integer))
        .cte("due")
        .prefix_with("MATERIALIZED")
    )
    claimed = select(
        due, (func.row_number().over() <= bindparam("room", type_=Integer)).label("starts")
    ).cte("claimed")

    # -- record: what each lane's holder now has, in the lane's own row. No delivery is written.
    in_flight = union_all(
        select(claimed.c.lane, claimed.c.id, claimed.c.starts),
        select(kept.c.lane, kept.c.id, kept.c.starts),
    ).subquery("in_flight")
    by_lane = (
        select(
            in_flight.c.lane,
            func.array_agg(in_flight.c.id).filter(in_flight.c.starts).label("started"),
            func.array_agg(in_flight.c.id).filter(~in_flight.c.starts).label("prefetched"),
        )
        .group_by(in_flight.c.lane)
        .subquery("by_lane")
    )
    flight = (
        select(asked, by_lane.c.started, by_lane.c.prefetched)
        .select_from(asked.outerjoin(by_lane, by_lane.c.lane == asked.c.lane))
        # a lane with nothing new is not rewritten
        .where(or_(asked.c.write, asked.c.lane.in_(select(due.c.lane))))
        .cte("flight")
    )
    # The fence. Epoch and holder: the lane is still this worker's (an epoch alone can come again
    # after a restored backup). Version: there was no exchange that this worker does not know of,
    # so the lists it writes lose nothing. The address finds the row without walking over its dead
    # versions under an old snapshot; a wrong one finds nothing, and the lane is read anew. The
    # write lock does not conflict with the FOR KEY SHARE of a completion in progress, and a
    # takeover that came first fails the check on the row's newest version.
    #
    # Found by its address a row's dead versions are never removed, and its page is soon full: then
    # an update writes to another page and to the index. Reading a row by the key makes its page
    # tidy, before the update and for its version.
    tidied = (
        select(lanes.c.lane)
        .select_from(flight.join(lanes, lanes.c.lane == flight.c.lane))
        .where(flight.c.tidy)
        .cte("tidied")
        .prefix_with("MATERIALIZED")
    )
    fence = and_(
        lanes.c.lane == flight.c.lane,
        address(lanes).element == flight.c.address,
        lanes.c.epoch == flight.c.epoch,
        lanes.c.version == flight.c.version,
        lanes.c.holder == bindparam("holder", type_=Uuid),
        or_(~flight.c.tidy, flight.c.lane.in_(select(tidied.c.lane))),
    )
    written: CTE = flight
    if careful:
        written = (
            select(flight.c.started, flight.c.prefetched, address(lanes))
            .where(fence)
            .order_by(lanes.c.lane)
            .with_for_update(of=lanes, key_share=True, skip_locked=True)
            .cte("unlocked")
            .prefix_with("MATERIALIZED")
        )
        # checked and locked, so nobody changes them before they are written
        fence = address(lanes).element == written.c.address
    fenced = (
        update(lanes)
        .where(fence)
        .values(
            version=lanes.c.version + 1,
            lease_expires_at=lease_end(),
            company=bindparam("company", type_=Integer),
            started=func.coalesce(written.c.started, NO_IDS),
            prefetched=func.coalesce(written.c.prefetched, NO_IDS),
        )
        .returning(lanes.c.lane, address(lanes))
        .cte("fenced")
    )

    # -- complete: only under a fenced lane, and only the very claim that ran: once a failure was
    # recorded or a takeover charged it, the counter differs. What is reported is what was really
    # deleted; no row is a lost lease, not a success.
    row = run_of(deliveries, finished)
    ours = (
        select(finished.c.id, row.c.address)
        .select_from(finished.join(fenced, fenced.c.lane == finished.c.lane).join(row, true()))
        .cte("ours")
        .prefix_with("MATERIALIZED")
    )
    seen: ColumnElement[Any] = null().cast(ARRAY(BigInteger))
    free = ours
    if careful:
        free = unlocked(deliveries, select(ours.c.address))
        seen = select(func.array_agg(ours.c.id)).scalar_subquery()
    removed = (
        delete(deliveries)
        .where(rows_at(deliveries, select(free.c.address)))
        .returning(deliveries.c.id)
        .cte("removed")
    )

    # -- reply: one row about the exchange, then one a claimed delivery, of fenced lanes only. The
    # event is joined from the left: an orphan is buried with that reason, not never claimed.
    head: Any = select(
        *(
            literal_column(f"NULL::{type_}").label(name)
            for name, type_ in (
                ("id", "bigint"),
                ("lane", "smallint"),
                ("starts", "boolean"),
                ("claims", "integer"),
                ("attempts", "integer"),
                ("handler", "text"),
                ("key", "text"),
                ("event_id", "uuid"),
                ("type", "text"),
                ("payload", "text"),
                ("headers", "text"),
                ("sequence", "bigint"),
                ("created_at", "timestamptz"),
            )
        ),
        select(func.array_agg(flight.c.lane)).scalar_subquery().label("tried"),
        select(func.array_agg(fenced.c.lane)).scalar_subquery().label("lanes"),
        select(func.array_agg(fenced.c.address)).scalar_subquery().label("addresses"),
        select(func.array_agg(removed.c.id)).scalar_subquery().label("removed"),
        seen.label("seen"),
    )
    event = (
        select(events)
        .where(events.c.id == claimed.c.event_id)
        .limit(literal_column("1"))
        .lateral("event")
    )
    body = select(
        claimed.c.id,
        claimed.c.lane,
        claimed.c.starts,
        claimed.c.claims,
        claimed.c.attempts,
        claimed.c.handler,
        claimed.c.key,
        claimed.c.event_id,
        event.c.type,
        event.c.payload,
        event.c.headers,
        event.c.sequence,
        event.c.created_at,
        *(null() for _ in range(5)),
    ).select_from(claimed.join(fenced, fenced.c.lane == claimed.c.lane).outerjoin(event, true()))
    return Prepared(union_all(head, body))
