"""Taking lanes: how many."""

from __future__ import annotations

from sqlalchemy import select

from tests.support.stores import Bench

LANE = 7


def test_at_most_as_many_lanes_as_wanted_are_taken(bench: Bench) -> None:
    holder = bench.holder()
    assert len(holder.take(*range(10), limit=3)) == 3
    lanes = bench.tables.lanes
    assert len(bench.read(select(lanes.c.lane).where(lanes.c.holder == holder.id))) == 3
