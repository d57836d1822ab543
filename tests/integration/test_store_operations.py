"""What operators do to single deliveries touches those alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import Connection, select

from sqlalchemy_relaybus.stores.base import ParkedStatus
from tests.support.stores import Bench, key_on, new_event, parked

LANE = 7
KEYS = [key_on(LANE, n) for n in range(4)]


def failed(bench: Bench, *statuses: ParkedStatus, handlers: tuple[str, ...] = ("a",)) -> list[int]:
    """Ids of parked deliveries, each of a key of its own and blocking it."""
    holder = bench.holder(*handlers)
    bench.publish(*(new_event(KEYS[n], handlers=handlers) for n in range(len(statuses))))
    holder.take(LANE)
    claimed = holder.claim()
    every = [status for status in statuses for _ in handlers]
    parks = [
        parked(each, status, delay=None if status == "dead" else 3600)
        for each, status in zip(claimed, every, strict=True)
    ]
    assert len(holder.park(*parks)) == len(parks)
    return [each.id for each in claimed]


def blocking(bench: Bench) -> list[int]:
    table = bench.tables.parked
    return [id for (id,) in bench.read(select(table.c.id).where(table.c.blocks).order_by("id"))]


def requeue(bench: Bench, connection: Connection, ids: list[int]) -> set[int]:
    return bench.store.requeue(connection, ids)


def discard(bench: Bench, connection: Connection, ids: list[int]) -> set[int]:
    return bench.store.discard(connection, ids)


@pytest.mark.parametrize("act", [requeue, discard])
def test_dead_letters_alone_and_those_that_were_named(
    bench: Bench, act: Callable[[Bench, Connection, list[int]], set[int]]
) -> None:
    dead, unnamed, retrying = failed(bench, "dead", "dead", "retrying")
    with bench.engine.begin() as connection:
        assert act(bench, connection, [dead, retrying]) == {dead}
    assert bench.parked() == [unnamed, retrying]
    assert bench.deliveries() == ([dead] if act is requeue else [])


def test_one_handler_and_key_is_released_once(bench: Bench) -> None:
    mine, other_handler, other_key, _ = failed(bench, "dead", "dead", handlers=("a", "b"))
    with bench.engine.begin() as connection:
        assert bench.store.release(connection, "a", KEYS[0]) == 1
        assert bench.store.release(connection, "a", KEYS[0]) == 0
    assert mine not in blocking(bench)
    assert {other_handler, other_key} < set(blocking(bench))


def test_what_is_not_dead_is_not_released(bench: Bench) -> None:
    """It will run: its followers have to wait."""
    [retrying] = failed(bench, "retrying")
    with bench.engine.begin() as connection:
        assert bench.store.release(connection, "a", KEYS[0]) == 0
    assert blocking(bench) == [retrying]
