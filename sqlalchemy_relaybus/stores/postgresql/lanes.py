"""Statements about lanes: who is alive, which lanes have work, taking and handing back.

All are meant for READ COMMITTED: a statement's snapshot is taken when it begins, and a row found
changed when it is locked is checked again in its newest version.
"""

from __future__ import annotations

from functools import lru_cache

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Float,
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
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.sql.selectable import CTE

from ...tables import Tables
from .sql import (
    CLOCK,
    NO_IDS,
    NOW,
    Prepared,
    address,
    array,
    lease_end,
    rows,
    seconds,
)


@lru_cache
def enlist(tables: Tables) -> Prepared:
    """Renew this worker's entry and read the others'. A hint for sharing lanes; no guarantee."""
    workers = tables.workers
    entry = insert(workers).values(
        holder=bindparam("holder", type_=Uuid),
        started_at=CLOCK,
        expires_at=CLOCK + seconds(bindparam("ttl", type_=Float)),
        owner=bindparam("owner", type_=Text),
        handlers=bindparam("handlers", type_=ARRAY(Text)),
    )
    mine = (
        entry.on_conflict_do_update(
            index_elements=[workers.c.holder], set_={"expires_at": entry.excluded.expires_at}
        )
        .returning(workers.c.holder)
        .cte("mine")
    )
    others = select(workers.c.handlers).where(
        workers.c.expires_at > NOW, workers.c.holder != bindparam("holder", type_=Uuid)
    )
    return Prepared(others.add_cte(mine))


@lru_cache
def resign(tables: Tables) -> Prepared:
    """Leave the list. Entries that ran out go along; locked ones are left to the next."""
    workers = tables.workers
    stale = (
        select(workers.c.holder)
        .where(or_(workers.c.holder == bindparam("holder", type_=Uuid), workers.c.expires_at < NOW))
        .with_for_update(skip_locked=True)
        .cte("stale")
        .prefix_with("MATERIALIZED")
    )
    return Prepared(
        delete(workers).where(workers.c.holder == stale.c.holder).returning(workers.c.holder)
    )


@lru_cache
def probe(tables: Tables) -> Prepared:
    """Lanes that have work: a loose index scan, one descent for each lane that has some.

    Asking 256 lanes one by one costs 15 to 90 times as much where the queue is shallow. Only a
    hint: nothing is locked.
    """
    deliveries, parked, lanes = tables.deliveries, tables.parked, tables.lanes

    by_lane = select(deliveries.c.lane, deliveries.c.handler).order_by(
        deliveries.c.lane, deliveries.c.id
    )
    first = by_lane.limit(1).subquery("first")
    ready = select(first.c.lane, first.c.handler).cte("ready", recursive=True)
    following = by_lane.where(deliveries.c.lane > ready.c.lane).limit(1).lateral("following")
    ready = ready.union_all(
        select(following.c.lane, following.c.handler).select_from(ready.join(following, true()))
    )

    by_due = (
        select(parked.c.lane, parked.c.available_at)
        .where(parked.c.available_at.is_not(None))
        .order_by(parked.c.lane, parked.c.available_at)
    )
    soonest = by_due.limit(1).subquery("soonest")
    later = select(soonest.c.lane, soonest.c.available_at).cte("later", recursive=True)
    behind = by_due.where(parked.c.lane > later.c.lane).limit(1).lateral("behind")
    later = later.union_all(
        select(behind.c.lane, behind.c.available_at).select_from(later.join(behind, true()))
    )

    wait = func.extract("epoch", later.c.available_at - CLOCK).cast(Float)
    found = union_all(
        select(ready.c.lane, ready.c.handler, literal_column("0.0").cast(Float).label("wait")),
        select(later.c.lane, null().cast(Text), func.greatest(literal_column("0.0"), wait)),
    ).subquery("found")
    return Prepared(
        select(
            found.c.lane,
            found.c.handler,
            found.c.wait,
            or_(lanes.c.holder.is_(None), lanes.c.lease_expires_at < NOW).label("free"),
        ).select_from(found.join(lanes, lanes.c.lane == found.c.lane))
    )


@lru_cache
def take(tables: Tables) -> Prepared:
    """Take lanes that nobody holds: the takeover, first statement of a transaction.

    * ``FOR UPDATE``, before anything is written: it conflicts with the ``FOR KEY SHARE`` of a
      completion in progress, so a completion and a takeover never both win. A plain UPDATE takes
      ``FOR NO KEY UPDATE``, which does not conflict with it.
    * ``SKIP LOCKED``: two takers never wait for each other and never get the same lane; a lane
      with a completion in progress is left for later.
    * The condition on the lease is checked again on the locked row's newest version, so a renewal
      that came in between keeps the lane.
    * Never from its own holder, also after the lease ran out: after an exchange with an unknown
      outcome the lane is read, not retaken, or its own running deliveries would be charged.
    * The epoch grows in the very write that names the new holder: from here on every write of the
      former one is refused.
    * ``MATERIALIZED``: a subquery with a limit and a lock, inlined into a join, may run twice.

    The deliveries are read by a later statement: this one's snapshot is older than its locks and
    would still show what the former holder completed in between.
    """
    lanes = tables.lanes
    free = (
        select(lanes.c.lane, lanes.c.started, lanes.c.company)
        .where(
            lanes.c.lane == func.any(array("lanes", SmallInteger())),
            or_(
                lanes.c.holder.is_(None),
                and_(
                    lanes.c.lease_expires_at < NOW,
                    lanes.c.holder != bindparam("holder", type_=Uuid),
                ),
            ),
        )
        .order_by(lanes.c.lane)
        .limit(bindparam("limit", type_=Integer))
        .with_for_update(of=lanes, skip_locked=True)
        .cte("free")
        .prefix_with("MATERIALIZED")
    )
    return Prepared(
        update(lanes)
        .where(lanes.c.lane == free.c.lane)
        .values(
            epoch=lanes.c.epoch + 1,
            version=0,
            holder=bindparam("holder", type_=Uuid),
            lease_expires_at=lease_end(),
            started=NO_IDS,
            prefetched=NO_IDS,
        )
        .returning(
            lanes.c.lane,
            lanes.c.epoch,
            lanes.c.version,
            address(lanes),
            free.c.started,
            free.c.company,
        )
    )


@lru_cache
def suspect(tables: Tables) -> Prepared:
    """Count a crash for each delivery that the former holder had started.

    Second statement of the takeover's transaction. Its own snapshot, taken under the lanes' locks,
    does not show what the former holder completed or parked, and what it had not it cannot any
    more. What it had only prefetched never ran and is not named. The deliveries themselves are
    neither written nor locked: nobody's lock on one holds a takeover up.
    """
    deliveries, suspects = tables.deliveries, tables.suspects
    lost = rows(
        "lost",
        lane=("lanes", SmallInteger()),
        id=("ids", BigInteger()),
        company=("companies", Integer()),
    )
    there = (
        select(literal_column("1"))
        .where(deliveries.c.lane == lost.c.lane, deliveries.c.id == lost.c.id)
        .limit(literal_column("1"))
        .lateral("there")
    )
    found = insert(suspects).from_select(
        ["lane", "id", "company", "crashes"],
        select(lost.c.lane, lost.c.id, lost.c.company, literal_column("1")).select_from(
            lost.join(there, true())
        ),
    )
    return Prepared(
        found.on_conflict_do_update(
            index_elements=[suspects.c.lane, suspects.c.id],
            set_={"crashes": suspects.c.crashes + 1, "company": found.excluded.company},
        ).returning(suspects.c.lane)
    )


@lru_cache
def suspects(tables: Tables) -> Prepared:
    """The suspects of lanes just taken that are still there, in the takeover's transaction.

    A later statement than the one that locked the lanes: suspects are written by takers alone, so
    this snapshot has them all. One whose delivery is gone is removed.
    """
    suspects = tables.suspects
    mine = suspects.c.lane == func.any(array("lanes", SmallInteger()))
    # subqueries with a limit: one that only asks for existence may read its whole table instead
    there = func.coalesce(
        *(
            select(literal_column("1"))
            .where(table.c.lane == suspects.c.lane, table.c.id == suspects.c.id)
            .limit(literal_column("1"))
            .scalar_subquery()
            for table in (tables.deliveries, tables.parked)
        )
    )
    gone = delete(suspects).where(mine, there.is_(None)).cte("gone")
    return Prepared(
        select(suspects.c.lane, suspects.c.id, suspects.c.crashes, suspects.c.company)
        .where(mine, there.is_not(None))
        .add_cte(gone)
    )


@lru_cache
def read_lanes(tables: Tables) -> Prepared:
    """The lanes as they are: decides about an exchange whose reply was lost. Locks nothing."""
    lanes = tables.lanes
    return Prepared(
        select(
            lanes.c.lane,
            lanes.c.epoch,
            lanes.c.version,
            address(lanes),
            lanes.c.holder,
            lanes.c.started,
            lanes.c.prefetched,
        ).where(lanes.c.lane == func.any(array("lanes", SmallInteger())))
    )


@lru_cache
def renew(tables: Tables) -> Prepared:
    """Renew leases and nothing else, where a lock holds the pump up.

    It reads no other table, so no lock on one can stall it. Fenced as an exchange is, and counted
    in the version as one; what the lanes have in flight stays as it is listed.
    """
    lanes = tables.lanes
    unlocked = _mine(tables)
    return Prepared(
        update(lanes)
        .where(lanes.c.lane == unlocked.c.lane)
        .values(version=lanes.c.version + 1, lease_expires_at=lease_end())
        .returning(lanes.c.lane, lanes.c.version, address(lanes))
    )


@lru_cache
def relinquish(tables: Tables) -> Prepared:
    """Hand lanes back.

    Fenced by epoch and holder: a zombie cannot free its successor's lane. By version too: what an
    exchange of unknown outcome wrote is not wiped out unseen. The epoch stays; the next taker
    raises it, and until then the missing holder refuses this worker.
    """
    lanes = tables.lanes
    unlocked = _mine(tables)
    return Prepared(
        update(lanes)
        .where(lanes.c.lane == unlocked.c.lane)
        .values(holder=null(), lease_expires_at=null(), started=NO_IDS, prefetched=NO_IDS)
        .returning(lanes.c.lane)
    )


def _mine(tables: Tables) -> CTE:
    """The lanes asked for by epoch and version that are still the holder's, locked for a write.

    ``SKIP LOCKED``: a lane that somebody else has locked does not hold up the others.
    """
    lanes = tables.lanes
    asked = rows(
        "asked",
        lane=("lanes", SmallInteger()),
        epoch=("epochs", BigInteger()),
        version=("versions", BigInteger()),
    )
    return (
        select(lanes.c.lane)
        .where(
            lanes.c.lane == asked.c.lane,
            lanes.c.epoch == asked.c.epoch,
            lanes.c.version == asked.c.version,
            lanes.c.holder == bindparam("holder", type_=Uuid),
        )
        .with_for_update(of=lanes, key_share=True, skip_locked=True)
        .cte("unlocked")
        .prefix_with("MATERIALIZED")
    )
