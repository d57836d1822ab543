"""How a delivery ends, other than through the pump: completed in a transaction, or parked.

Each is fenced by ``FOR KEY SHARE`` on the lane's row with the holder and epoch that the caller
believes in. It is the weakest lock that conflicts with a takeover's ``FOR UPDATE``: whichever
comes first wins, the other finds nothing. The holder's own pump is a plain update of the lane and
waits for none of them. ``claims`` names the very run: an older one of the same delivery, which may
still be going on in an abandoned thread, is refused.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    Float,
    Integer,
    SmallInteger,
    Text,
    Uuid,
    and_,
    bindparam,
    delete,
    func,
    insert,
    literal,
    literal_column,
    select,
    true,
    tuple_,
    union_all,
    update,
)
from sqlalchemy.sql.dml import ReturningInsert
from sqlalchemy.sql.elements import ColumnElement
from sqlalchemy.sql.selectable import CTE, FromClause

from ...tables import Tables
from .sql import CLOCK, NOW, Prepared, address, rows, rows_at, run_of, seconds, unlocked


def held_lanes(tables: Tables, asked: FromClause) -> CTE:
    """The lanes of *asked* (lane, epoch) that are still the holder's, locked in lane order.

    With their epochs, by which what is asked is joined: a holder that has lost a lane and taken it
    again may ask about it under both of its leases at once.
    """
    lanes = tables.lanes
    return (
        select(lanes.c.lane, lanes.c.epoch)
        .where(
            lanes.c.holder == bindparam("holder", type_=Uuid),
            tuple_(lanes.c.lane, lanes.c.epoch).in_(select(asked.c.lane, asked.c.epoch)),
        )
        .order_by(lanes.c.lane)
        .with_for_update(of=lanes, read=True, key_share=True)
        .cte("held")
        .prefix_with("MATERIALIZED")
    )


def _same_lease(held: FromClause, asked: FromClause) -> ColumnElement[bool]:
    return and_(held.c.lane == asked.c.lane, held.c.epoch == asked.c.epoch)


@lru_cache
def complete(tables: Tables) -> Prepared:
    """Delete one delivery inside the handler's transaction.

    The lock on the lane is held until that transaction ends: until then no takeover gets the
    lane, afterwards the takeover does not find the delivery. If the takeover came first this waits
    for it, checks the newest version, finds another epoch and deletes nothing: the caller rolls
    back. Either the handler's writes and the deletion commit together or neither does.
    """
    deliveries, lanes = tables.deliveries, tables.lanes
    held = (
        select(lanes.c.lane)
        .where(
            lanes.c.lane == bindparam("lane", type_=SmallInteger),
            lanes.c.epoch == bindparam("epoch", type_=BigInteger),
            lanes.c.holder == bindparam("holder", type_=Uuid),
        )
        .with_for_update(of=lanes, read=True, key_share=True)
        .cte("held")
        .prefix_with("MATERIALIZED")
    )
    return Prepared(
        delete(deliveries)
        .where(
            deliveries.c.lane == select(held.c.lane).scalar_subquery(),
            deliveries.c.id == bindparam("id", type_=BigInteger),
            deliveries.c.claims == bindparam("claims", type_=Integer),
        )
        .returning(deliveries.c.id)
    )


@lru_cache
def park(tables: Tables) -> Prepared:
    """Reschedule, snooze or bury: move deliveries out of the range that claims scan.

    Deleted and inserted in one statement: the row is never in both places or in neither.
    ``SKIP LOCKED``: one row locked by somebody else does not hold up the rest; it is reported as
    seen and tried again. What is written comes from ``ours``: asked for under two leases, of which
    the earlier one is lost, a delivery is parked once and as the present one says.
    """
    deliveries, parked = tables.deliveries, tables.parked
    asked = select(
        rows(
            "asked",
            lane=("lanes", SmallInteger()),
            epoch=("epochs", BigInteger()),
            id=("ids", BigInteger()),
            claims=("claims", Integer()),
            charge=("charges", Integer()),
            delay=("delays", Float()),
            blocks=("blocks", Boolean()),
            status=("statuses", Text()),
            error=("errors", Text()),
        )
    ).cte("asked")
    held = held_lanes(tables, asked)
    row = run_of(deliveries, asked)
    ours = (
        select(
            *(asked.c[name] for name in ("id", "charge", "delay", "blocks", "status", "error")),
            row.c.address,
        )
        .select_from(asked.join(held, _same_lease(held, asked)).join(row, true()))
        .cte("ours")
        .prefix_with("MATERIALIZED")
    )
    free = unlocked(deliveries, select(ours.c.address))
    gone = (
        delete(deliveries)
        .where(rows_at(deliveries, select(free.c.address)))
        .returning(*deliveries.c)
        .cte("gone")
    )
    moved = (
        select(
            gone.c.id,
            gone.c.event_id,
            (CLOCK + seconds(ours.c.delay)).label("available_at"),
            (gone.c.attempts + ours.c.charge).label("attempts"),
            (gone.c.claims + 1).label("claims"),
            gone.c.lane,
            ours.c.blocks,
            ours.c.status,
            gone.c.handler,
            gone.c.key,
            func.coalesce(ours.c.error, gone.c.last_error).label("last_error"),
        )
        .select_from(gone.join(ours, ours.c.id == gone.c.id))
        .subquery("moved")
    )
    stored = (
        insert(parked)
        .from_select([c.name for c in moved.c], select(moved), include_defaults=False)
        .returning(parked.c.id)
        .cte("stored")
    )
    return Prepared(
        union_all(
            select(stored.c.id, literal_column("true").label("parked")),
            select(ours.c.id, literal_column("false")),
        )
    )


@lru_cache
def absolve(tables: Tables) -> Prepared:
    """Forget suspects that have ended, by the lane's holder.

    Fenced: one that a takeover has counted another crash for stays a suspect, whatever its former
    holder reports.
    """
    suspects = tables.suspects
    asked = select(
        rows(
            "asked",
            lane=("lanes", SmallInteger()),
            epoch=("epochs", BigInteger()),
            id=("ids", BigInteger()),
        )
    ).cte("asked")
    held = held_lanes(tables, asked)
    return Prepared(
        delete(suspects)
        .where(
            suspects.c.lane == held.c.lane,
            _same_lease(held, asked),
            suspects.c.id == asked.c.id,
        )
        .returning(suspects.c.id)
    )


@lru_cache
def survived(tables: Tables) -> Prepared:
    """Take back a crash that a takeover has counted for a worker that is alive.

    Not fenced: it is the former holder that knows. Each row is found in its newest version, so
    crashes counted since are kept.
    """
    suspects = tables.suspects
    asked = rows("asked", lane=("lanes", SmallInteger()), id=("ids", BigInteger()))
    return Prepared(
        update(suspects)
        .where(suspects.c.lane == asked.c.lane, suspects.c.id == asked.c.id, suspects.c.crashes > 0)
        .values(crashes=suspects.c.crashes - 1)
        .returning(suspects.c.id)
    )


@lru_cache
def promote(tables: Tables) -> Prepared:
    """Move parked deliveries that are due back to the ready ones, where claims find them.

    By the lane's holder, fenced. The id is kept, so the delivery is again the first of its key;
    its followers see it parked and blocking or ready and in front of them, never neither.
    ``SKIP LOCKED``: an operator who requeues or discards the same row is not waited for.
    """
    parked = tables.parked
    asked = select(
        rows("asked", lane=("lanes", SmallInteger()), epoch=("epochs", BigInteger()))
    ).cte("asked")
    held = held_lanes(tables, asked)
    due = (
        select(address(parked))
        .where(parked.c.lane == held.c.lane, parked.c.available_at <= NOW)
        .order_by(parked.c.available_at)
        .limit(bindparam("limit", type_=Integer))
        .with_for_update(of=parked, skip_locked=True)
        .lateral("due")
    )
    chosen = (
        select(due.c.address)
        .select_from(held.join(due, literal_column("true")))
        .cte("chosen")
        .prefix_with("MATERIALIZED")
    )
    those = rows_at(parked, select(chosen.c.address))
    return Prepared(to_ready(tables, those, fresh=False))


@lru_cache
def set_aside(tables: Tables) -> Prepared:
    """Park the ready deliveries of handlers that no worker has, out of the way of claims.

    By the lane's holder, fenced. None of them is in flight: nobody claims for a handler that it
    does not have. Lowest ids first, and marked as blocking: later ones of the same key stay behind
    them. ``SKIP LOCKED``: what somebody else has locked is left for the next time.
    """
    deliveries, parked = tables.deliveries, tables.parked
    asked = select(
        rows("asked", lane=("lanes", SmallInteger()), epoch=("epochs", BigInteger()))
    ).cte("asked")
    held = held_lanes(tables, asked)
    strange = (
        select(address(deliveries))
        .where(
            deliveries.c.lane == held.c.lane,
            deliveries.c.handler != func.all(bindparam("known", type_=ARRAY(Text))),
        )
        .order_by(deliveries.c.id)
        .limit(bindparam("limit", type_=Integer))
        .with_for_update(of=deliveries, skip_locked=True)
        .lateral("strange")
    )
    chosen = (
        select(strange.c.address)
        .select_from(held.join(strange, literal_column("true")))
        .cte("chosen")
        .prefix_with("MATERIALIZED")
    )
    gone = (
        delete(deliveries)
        .where(rows_at(deliveries, select(chosen.c.address)))
        .returning(*deliveries.c)
        .cte("gone")
    )
    names = ["id", "event_id", "attempts", "claims", "lane", "handler", "key", "last_error"]
    return Prepared(
        insert(parked)
        .from_select(
            [*names, "blocks", "status"],
            select(
                *(gone.c[name] for name in names),
                literal_column("true"),
                literal_column("'unhandled'"),
            ),
            include_defaults=False,
        )
        .returning(parked.c.lane)
    )


@lru_cache
def reclaim(tables: Tables) -> Prepared:
    """Make the deliveries ready that were set aside, for a worker that has their handlers.

    By any worker, whoever holds the lanes: a row is parked and blocking, or ready and in front of
    its followers, never neither, and whoever deletes the parked row first moves it.
    """
    parked = tables.parked
    chosen = (
        select(address(parked))
        .where(
            parked.c.status == literal_column("'unhandled'"),
            parked.c.handler == func.any(bindparam("handlers", type_=ARRAY(Text))),
        )
        .order_by(parked.c.id)
        .limit(bindparam("limit", type_=Integer))
        .with_for_update(of=parked, skip_locked=True)
        .cte("chosen")
        .prefix_with("MATERIALIZED")
    )
    those = rows_at(parked, select(chosen.c.address))
    return Prepared(to_ready(tables, those, fresh=False))


def to_ready(tables: Tables, chosen: ColumnElement[bool], *, fresh: bool) -> ReturningInsert[Any]:
    """Delete the *chosen* parked rows and insert them as ready, in one statement."""
    deliveries, parked = tables.deliveries, tables.parked
    moved = (
        delete(parked)
        .where(chosen)
        .returning(
            parked.c.id,
            parked.c.event_id,
            literal(0, Integer).label("attempts") if fresh else parked.c.attempts,
            (parked.c.claims + 1).label("claims") if fresh else parked.c.claims,
            parked.c.lane,
            parked.c.handler,
            parked.c.key,
            parked.c.last_error,
        )
        .cte("moved")
    )
    return (
        insert(deliveries)
        .from_select([c.name for c in moved.c], select(moved), include_defaults=False)
        .returning(deliveries.c.lane, deliveries.c.id)
    )
