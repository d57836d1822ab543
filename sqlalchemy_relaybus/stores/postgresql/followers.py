"""Followers of a blocked key: set aside while it is blocked, and let go in order.

A delivery with a key waits while an earlier one of the same handler and key is parked and blocks.
Waiting among the ready ones it costs every claim of its lane a look, so all but a few are parked
*behind* it. No order rests on when that is done and undone: a follower is parked and blocks those
behind it, or it is ready and in front of them by its id, and it changes over in one statement.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Integer,
    Select,
    SmallInteger,
    Text,
    and_,
    bindparam,
    delete,
    exists,
    func,
    insert,
    literal_column,
    or_,
    select,
    true,
    tuple_,
    union_all,
)
from sqlalchemy.sql.elements import ColumnElement
from sqlalchemy.sql.selectable import CTE, FromClause

from ...tables import Tables
from .outcomes import held_lanes, to_ready
from .sql import Prepared, address, array, rows, rows_at, unlocked

#: Among how many of a lane's first and last deliveries others than a hot key's are looked for.
_FIRST, _LAST = 1000, 200
_BEHIND: ColumnElement[str] = literal_column("'behind'")


def blocked(tables: Tables, delivery: FromClause) -> ColumnElement[bool]:
    """Whether an earlier delivery of *delivery*'s handler and key is parked in front of it.

    The mark on the parked row says so, never its attempts. An earlier one that is ready needs no
    check: it comes first by its id, and the holder runs one key's deliveries one after another.
    """
    earlier: Select[Any] = select(literal_column("1")).where(*_in_front(tables, delivery))
    return and_(delivery.c.key.is_not(None), earlier.correlate(delivery).exists())


def _in_front(tables: Tables, delivery: FromClause) -> tuple[ColumnElement[bool], ...]:
    """What a parked delivery meets that blocks *delivery*."""
    parked = tables.parked
    return (
        parked.c.lane == delivery.c.lane,
        parked.c.handler == delivery.c.handler,
        parked.c.key == delivery.c.key,
        parked.c.blocks,
        parked.c.id < delivery.c.id,
    )


@lru_cache
def blocked_lanes(tables: Tables) -> Prepared:
    """Lanes with a parked delivery that blocks its key: one descent of the index for each."""
    parked = tables.parked
    blocking = (
        select(parked.c.lane)
        .where(parked.c.blocks, parked.c.key.is_not(None))
        .order_by(parked.c.lane, parked.c.handler, parked.c.key, parked.c.id)
        .limit(literal_column("1"))
    )
    first = blocking.subquery("first")
    found = select(first.c.lane).cte("found", recursive=True)
    following = blocking.where(parked.c.lane > found.c.lane).lateral("following")
    found = found.union_all(select(following.c.lane).select_from(found.join(following, true())))
    return Prepared(select(found.c.lane))


@lru_cache
def hold_back(tables: Tables) -> Prepared:
    """Park followers of blocked keys *behind* what blocks them.

    By the lane's holder, fenced: whoever else believes to hold the lane must not take a delivery
    away that runs. What waits is in flight nowhere, since no claim takes it. Deleted and inserted
    in one statement, the row is never in both places or in neither. ``SKIP LOCKED``: one that
    somebody else has locked is left where it is.
    """
    deliveries, parked = tables.deliveries, tables.parked
    asked = select(
        rows("asked", lane=("lanes", SmallInteger()), epoch=("epochs", BigInteger()))
    ).cte("asked")
    mine = held_lanes(tables, asked)
    front = (
        select(
            address(deliveries),
            deliveries.c.lane,
            deliveries.c.id,
            deliveries.c.handler,
            deliveries.c.key,
        )
        .where(deliveries.c.lane == mine.c.lane)
        .order_by(deliveries.c.id)
        .limit(bindparam("limit", type_=Integer))
        .lateral("front")
    )
    blocker = (
        select(parked.c.status)
        .where(*_in_front(tables, front))
        .order_by(parked.c.id)
        .limit(literal_column("1"))
        .lateral("blocker")
    )
    waiting = (
        select(
            front.c.address,
            func.row_number().over(partition_by=front.c.lane, order_by=front.c.id).label("n"),
            and_(
                front.c.handler == func.any(bindparam("parking", type_=ARRAY(Text))),
                blocker.c.status == literal_column("'dead'"),
            ).label("parks"),
        )
        .select_from(mine.join(front, true()).join(blocker, true()))
        .cte("waiting")
        .prefix_with("MATERIALIZED")
    )
    free = unlocked(
        deliveries,
        select(waiting.c.address).where(
            or_(waiting.c.n > bindparam("beyond", type_=Integer), waiting.c.parks)
        ),
    )
    return Prepared(_move_behind(tables, free))


@lru_cache
def thin_out(tables: Tables) -> Prepared:
    """Park deliveries of hot keys *behind* those in flight, if others of their lane wait for them.

    A key with a long queue runs one delivery after another, and whatever comes behind it in its
    lane would have to wait for its end. Others are looked for among the lane's first and its last
    deliveries, and where there are none nothing is moved. Fenced, and moved in one statement, as
    in :func:`hold_back`; what is in flight stays.
    """
    deliveries = tables.deliveries
    asked = select(
        rows("asked", lane=("lanes", SmallInteger()), epoch=("epochs", BigInteger()))
    ).cte("asked")
    mine = held_lanes(tables, asked)
    # without their lanes: a key is always on the same one
    hot = select(rows("hot", handler=("hot_handlers", Text()), key=("hot_keys", Text()))).cte("hot")

    def is_hot(delivery: FromClause) -> ColumnElement[bool]:
        return (
            exists()
            .where(hot.c.handler == delivery.c.handler, hot.c.key == delivery.c.key)
            .correlate(delivery)
        )

    def some(name: str, lanes: FromClause, limit: ColumnElement[int], *, last: bool) -> Any:
        return (
            select(
                address(deliveries),
                deliveries.c.lane,
                deliveries.c.id,
                deliveries.c.handler,
                deliveries.c.key,
            )
            .where(deliveries.c.lane == lanes.c.lane)
            .order_by(deliveries.c.id.desc() if last else deliveries.c.id)
            .limit(limit)
            .lateral(name)
        )

    first = some("first", mine, literal_column(str(_FIRST)), last=False)
    last = some("last", mine, literal_column(str(_LAST)), last=True)
    ends = union_all(
        *(
            select(end.c.lane, end.c.id).select_from(mine.join(end, true())).where(~is_hot(end))
            for end in (first, last)
        )
    ).subquery("ends")
    others = (
        select(ends.c.lane, func.max(ends.c.id).label("id"))
        .group_by(ends.c.lane)
        .cte("others")
        .prefix_with("MATERIALIZED")
    )
    front = some("front", others, bindparam("limit", type_=Integer), last=False)
    excess = (
        select(front.c.address)
        .select_from(others.join(front, front.c.id < others.c.id))
        .where(is_hot(front), front.c.id != func.all(array("kept", BigInteger())))
    )
    return Prepared(_move_behind(tables, unlocked(deliveries, excess)))


def _move_behind(tables: Tables, free: CTE) -> Select[Any]:
    """Park the deliveries at the addresses in *free*; their lanes, handlers and keys."""
    deliveries, parked = tables.deliveries, tables.parked
    gone = (
        delete(deliveries)
        .where(rows_at(deliveries, select(free.c.address)))
        .returning(*deliveries.c)
        .cte("gone")
    )
    names = ["id", "event_id", "attempts", "claims", "lane", "handler", "key", "last_error"]
    moved = (
        insert(parked)
        .from_select(
            [*names, "blocks", "status"],
            select(*(gone.c[name] for name in names), literal_column("true"), _BEHIND),
            include_defaults=False,
        )
        .returning(parked.c.lane, parked.c.handler, parked.c.key)
        .cte("moved")
    )
    return select(moved.c.lane, moved.c.handler, moved.c.key).distinct()


@lru_cache
def let_go(tables: Tables, everywhere: bool) -> Prepared:
    """Make the first followers ready of pairs that nothing blocks any more.

    By any worker, fenced by nothing: see the module. What blocks a pair is its first parked
    delivery; where that is a follower itself, nothing does. If that changes after this statement's
    snapshot the rows are ready and wait, as they did before they were set aside. ``SKIP LOCKED``:
    two at once move different rows, and those of the second wait for the first to commit, since
    until then they see the rows of the first parked in front of them.
    """
    parked = tables.parked
    if everywhere:
        behind = (
            select(parked.c.lane, parked.c.handler, parked.c.key)
            .where(parked.c.status == _BEHIND)
            .order_by(parked.c.lane, parked.c.handler, parked.c.key)
            .limit(literal_column("1"))
        )
        first = behind.subquery("first")
        pairs = select(first).cte("pairs", recursive=True)
        last = tuple_(pairs.c.lane, pairs.c.handler, pairs.c.key)
        following = behind.where(
            tuple_(parked.c.lane, parked.c.handler, parked.c.key) > last
        ).lateral("following")
        pairs = pairs.union_all(select(following).select_from(pairs.join(following, true())))
    else:
        pairs = select(
            rows(
                "asked",
                lane=("lanes", SmallInteger()),
                handler=("handlers", Text()),
                key=("keys", Text()),
            )
        ).cte("pairs")
    of_pair = and_(
        parked.c.lane == pairs.c.lane,
        parked.c.handler == pairs.c.handler,
        parked.c.key == pairs.c.key,
    )
    front = (
        select(parked.c.status)
        .where(of_pair, parked.c.blocks)
        .order_by(parked.c.id)
        .limit(literal_column("1"))
        .lateral("front")
    )
    followers = (
        select(address(parked))
        .where(of_pair, parked.c.status == _BEHIND)
        .order_by(parked.c.id)
        .limit(bindparam("limit", type_=Integer))
        .with_for_update(of=parked, skip_locked=True)
        .lateral("followers")
    )
    chosen = (
        select(followers.c.address)
        .select_from(pairs.join(front, front.c.status == _BEHIND).join(followers, true()))
        .cte("chosen")
        .prefix_with("MATERIALIZED")
    )
    ready = to_ready(tables, rows_at(parked, select(chosen.c.address)), fresh=False)
    deliveries = tables.deliveries
    moved = ready.returning(deliveries.c.handler, deliveries.c.key).cte("released")
    counted = select(moved.c.lane, moved.c.handler, moved.c.key, func.count()).group_by(
        moved.c.lane, moved.c.handler, moved.c.key
    )
    if everywhere:
        return Prepared(counted)
    none = (
        select(pairs.c.lane, pairs.c.handler, pairs.c.key, literal_column("0"))
        .select_from(pairs.outerjoin(front, true()))
        .where(front.c.status.is_(None))
    )
    return Prepared(union_all(counted, none))


@lru_cache
def behind(tables: Tables) -> Prepared:
    """The pairs of lanes just taken that have followers set aside."""
    parked = tables.parked
    return Prepared(
        select(parked.c.lane, parked.c.handler, parked.c.key)
        .where(
            parked.c.lane == func.any(array("lanes", SmallInteger())),
            parked.c.status == _BEHIND,
        )
        .distinct()
    )
