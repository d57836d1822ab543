"""Retention: removing what is done and old, a page at a time.

All of it is meant for READ COMMITTED, a transaction a page, and waits for nobody: what somebody
else has locked is left for another time. Whoever publishes a locked event again waits for the end
of the page's transaction, finds the event there or gone, and goes on accordingly. Workers lock
neither events nor dead letters, so they never wait.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Column,
    DateTime,
    Float,
    Integer,
    Table,
    Uuid,
    bindparam,
    delete,
    func,
    literal_column,
    select,
    tuple_,
    union,
)
from sqlalchemy.sql.elements import ColumnElement

from ...tables import Tables
from .sql import NOW, Prepared, address, rows_at, seconds


@lru_cache
def fit_transaction() -> Prepared:
    """Fit the transaction to the statements below, and leave the session as it was.

    Planned each time, with the ids as constants: :func:`remove` rests on it. Not guided by the
    size of tables that were empty when they were analysed; compiled by no means.
    """
    settings = {
        "plan_cache_mode": "force_custom_plan",
        "enable_seqscan": "off",
        "enable_bitmapscan": "off",
        "jit": "off",
    }
    return Prepared(select(*(func.set_config(name, to, True) for name, to in settings.items())))


def _is_old(moment: Column[Any]) -> ColumnElement[bool]:
    return moment <= NOW - seconds(bindparam("age", type_=Float))


@lru_cache
def lock_page(tables: Tables) -> Prepared:
    """Look at the next events by id and lock those that are old enough.

    One row: the last id of the page, how many events are in it, how many of them are old, and the
    ids of the old ones that are locked now. A page is counted in events looked at, not in events
    found: however many young ones lie between the old ones, the statement is a short one. By id,
    since nothing else is indexed and ids that callers supply follow no clock.

    ``FOR UPDATE`` conflicts with the lock by which a publisher adds deliveries to a stored event
    (``publish.lock_events``), so from here to the end of the transaction nobody adds one.
    ``SKIP LOCKED``: a publisher that is at it already keeps its event; neither it nor anybody else
    is waited for, so no deadlock has purges in it and two of them share the work. By id and not by
    address: an event that was changed since the snapshot is locked in its newest version, which
    servers of different releases do not agree on where it is found by its address.

    Whether an event has deliveries is not asked here: this snapshot is older than the locks. Old
    events that are not done yet are locked in vain (60 bytes of log each); there are few, as a
    retention is longer than a queue.
    """
    events = tables.events
    page = (
        select(events.c.id, _is_old(events.c.created_at).label("old"))
        .where(events.c.id >= bindparam("start", type_=Uuid))
        .order_by(events.c.id)
        .limit(bindparam("limit", type_=Integer))
        .cte("page")
        .prefix_with("MATERIALIZED")
    )
    old = func.array(select(page.c.id).where(page.c.old).scalar_subquery())
    locked = (
        select(events.c.id)
        .where(events.c.id == func.any(old))
        .with_for_update(of=events, skip_locked=True)
        .cte("locked")
        .prefix_with("MATERIALIZED")
    )
    last = select(page.c.id).order_by(page.c.id.desc()).limit(literal_column("1"))
    counts = select(func.count(), func.count().filter(page.c.old)).select_from(page)
    return Prepared(
        counts.add_columns(
            last.scalar_subquery(), func.array(select(locked.c.id).scalar_subquery())
        )
    )


@lru_cache
def remove(tables: Tables) -> Prepared:
    """Delete those of the locked events that have no delivery left; how many.

    A statement of its own, after :func:`lock_page` in its transaction: its snapshot is newer than
    the locks, so it sees every delivery that was added before them, and none is added after. In
    one statement with the locks it would not: the deliveries of a publisher that committed in
    between would be orphaned. Both tables are read under one snapshot, since a delivery moves
    from one to the other: it is seen in exactly one of them.

    Nothing leads from an event to its deliveries: an index for it would cost every publisher and
    every completion more than this costs a purge. The lane is known, but a page has events of
    nearly every lane, and a lane looked through for each of its events is worse than the table
    looked through once. So that is what happens, whatever the planner believes: the only way to
    read ``event_id = ANY(constant)`` without an index is one scan, with the ids hashed. A join
    would be a nested loop of scans where the statistics say that the queue is empty.
    """
    events = tables.events
    ids = func.any(bindparam("ids", type_=ARRAY(Uuid)))
    undone = union(
        *(
            select(table.c.event_id).where(table.c.event_id == ids)
            for table in (tables.deliveries, tables.parked)
        )
    )
    gone = (
        delete(events)
        .where(events.c.id == ids, events.c.id != func.all(func.array(undone.scalar_subquery())))
        .returning(literal_column("1"))
        .cte("gone")
    )
    return Prepared(select(func.count()).select_from(gone))


@lru_cache
def remove_dead(tables: Tables) -> Prepared:
    """Delete the next dead letters that are old enough: see :func:`_remove_old`.

    An operator who requeues one deletes the row, too: whoever is first has it. If it was the
    operator the row is locked and stepped over, else the operator finds no dead letter.
    """
    parked = tables.parked
    return _remove_old(parked, parked.c.parked_at, parked.c.status == literal_column("'dead'"))


@lru_cache
def remove_completed(tables: Tables) -> Prepared:
    """Delete the next completed deliveries that are old enough: see :func:`_remove_old`."""
    completed = tables.completed
    return _remove_old(completed, completed.c.completed_at)


def _remove_old(table: Table, moment: Column[Any], *where: ColumnElement[bool]) -> Prepared:
    """Delete a page of *table*'s rows, the oldest first: how many, of how many, the last's place.

    The page begins after the place where the one before it ended: entries of rows just deleted
    stay in the index for as long as somebody's old snapshot needs them, and are not walked over
    again and again. ``SKIP LOCKED``: what somebody else is removing or moving is left to them. The
    locked rows are deleted by the statement that locked them, at the address that it read. A dead
    letter that was changed in between (an operator let its key go on) is not found there, and is
    left to the next purge: so the rows of the page are counted apart from those removed.
    """
    place = tuple_(
        bindparam("moment", type_=DateTime(timezone=True)), bindparam("id", type_=BigInteger)
    )
    old = (
        select(moment.label("moment"), table.c.id, address(table))
        .where(*where, _is_old(moment), tuple_(moment, table.c.id) > place)
        .order_by(moment, table.c.id)
        .limit(bindparam("limit", type_=Integer))
        .with_for_update(of=table, skip_locked=True)
        .cte("old")
        .prefix_with("MATERIALIZED")
    )
    gone = (
        delete(table)
        .where(rows_at(table, select(old.c.address)))
        .returning(literal_column("1"))
        .cte("gone")
    )
    last = (
        select(old.c.moment, old.c.id)
        .order_by(old.c.moment.desc(), old.c.id.desc())
        .limit(literal_column("1"))
        .subquery("last")
    )
    removed = select(func.count()).select_from(gone).scalar_subquery()
    found = select(func.count()).select_from(old).scalar_subquery()
    return Prepared(select(removed, found, last))
