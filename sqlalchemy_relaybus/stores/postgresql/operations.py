"""What an operator does with dead letters and blocked keys: not fenced, since nobody runs these."""

from __future__ import annotations

from functools import lru_cache

from sqlalchemy import (
    BigInteger,
    DateTime,
    Integer,
    SmallInteger,
    Text,
    and_,
    bindparam,
    cast,
    delete,
    func,
    literal_column,
    or_,
    select,
    tuple_,
    union_all,
    update,
)
from sqlalchemy.sql.elements import ColumnElement

from ...tables import Tables
from .outcomes import to_ready
from .sql import Prepared, array

_DEAD: ColumnElement[str] = literal_column("'dead'")


@lru_cache
def dead_letters(tables: Tables) -> Prepared:
    """The dead letters in the order in which they died, behind a given one."""
    parked = tables.parked
    handler = cast(bindparam("handler", type_=Text), Text)
    since = cast(bindparam("since", type_=DateTime(timezone=True)), DateTime(timezone=True))
    id = cast(bindparam("id", type_=BigInteger), BigInteger)
    return Prepared(
        select(
            parked.c.id,
            parked.c.event_id,
            parked.c.handler,
            parked.c.key,
            parked.c.attempts,
            parked.c.last_error,
            parked.c.parked_at,
            parked.c.blocks,
        )
        .where(
            parked.c.status == _DEAD,
            or_(handler.is_(None), parked.c.handler == handler),
            or_(since.is_(None), tuple_(parked.c.parked_at, parked.c.id) > tuple_(since, id)),
        )
        .order_by(parked.c.parked_at, parked.c.id)
        .limit(bindparam("limit", type_=Integer))
    )


@lru_cache
def requeue(tables: Tables) -> Prepared:
    """Give dead letters a fresh budget of attempts.

    Whoever deletes the parked row first moves it: twice at once has one effect. The id is kept,
    so the delivery runs before the later ones of its key that no worker has claimed yet.
    """
    parked = tables.parked
    dead = and_(
        parked.c.status == _DEAD,
        parked.c.id == func.any(array("ids", BigInteger())),
    )
    return Prepared(to_ready(tables, dead, fresh=True))


@lru_cache
def discard(tables: Tables) -> Prepared:
    """Remove dead letters; one that is being requeued is waited for, and is dead no more."""
    parked = tables.parked
    return Prepared(
        delete(parked)
        .where(parked.c.status == _DEAD, parked.c.id == func.any(array("ids", BigInteger())))
        .returning(parked.c.id, parked.c.lane, parked.c.handler, parked.c.key, parked.c.blocks)
    )


@lru_cache
def release(tables: Tables) -> Prepared:
    """Take the mark from the dead letters of a handler and key for which others wait."""
    parked = tables.parked
    return Prepared(
        update(parked)
        .where(
            parked.c.lane == bindparam("lane", type_=SmallInteger),
            parked.c.handler == bindparam("handler", type_=Text),
            parked.c.key == bindparam("key", type_=Text),
            parked.c.blocks,
            parked.c.status == _DEAD,
        )
        .values(blocks=False)
        .returning(parked.c.id)
    )


@lru_cache
def blocked_keys(tables: Tables) -> Prepared:
    """Each handler and key with a parked delivery that blocks, and how many wait for it."""
    deliveries, parked = tables.deliveries, tables.parked
    place = func.row_number().over(
        partition_by=(parked.c.lane, parked.c.handler, parked.c.key), order_by=parked.c.id
    )
    blocking = (
        select(parked, place.label("place"))
        .where(parked.c.blocks, parked.c.key.is_not(None))
        .subquery("blocking")
    )
    first = select(blocking).where(blocking.c.place == 1).cte("first")
    # waiting ones are ready, or parked as well
    every = union_all(
        *(
            select(table.c.lane, table.c.handler, table.c.key, table.c.id).where(
                table.c.key.is_not(None)
            )
            for table in (deliveries, parked)
        )
    ).subquery("every")
    counted = (
        select(first.c.lane, first.c.handler, first.c.key, func.count().label("followers"))
        .select_from(
            first.join(
                every,
                and_(
                    every.c.lane == first.c.lane,
                    every.c.handler == first.c.handler,
                    every.c.key == first.c.key,
                    every.c.id > first.c.id,
                ),
            )
        )
        .group_by(first.c.lane, first.c.handler, first.c.key)
        .subquery("counted")
    )
    followers = func.coalesce(counted.c.followers, literal_column("0"))
    return Prepared(
        select(
            first.c.handler,
            first.c.key,
            first.c.lane,
            first.c.status,
            first.c.parked_at,
            first.c.available_at,
            first.c.attempts,
            first.c.last_error,
            followers,
        )
        .select_from(
            first.outerjoin(
                counted,
                and_(
                    counted.c.lane == first.c.lane,
                    counted.c.handler == first.c.handler,
                    counted.c.key == first.c.key,
                ),
            )
        )
        .order_by(followers.desc(), first.c.parked_at, first.c.id)
        .limit(bindparam("limit", type_=Integer))
    )
