"""When followers of blocked and of hot keys are set aside, and when they are let go again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, cast
from uuid import UUID

import pytest
from sqlalchemy import Connection

from sqlalchemy_relaybus import Event, RelayBus
from sqlalchemy_relaybus.stores.base import Delivery, Lease, Pair, Store, Taken
from sqlalchemy_relaybus.worker.followers import (
    BEYOND,
    FEW,
    HOT,
    LET_GO,
    LOOK_AT,
    PAUSE,
    SWEEP,
    THIN_OUT,
    Followers,
)
from sqlalchemy_relaybus.worker.hold import Hold
from sqlalchemy_relaybus.worker.takeover import Holds

ME = UUID(int=1)
CONNECTION = cast(Connection, object())
PAIR = Pair("h", "k")

bus = RelayBus()


@bus.handler("step", name="h", on_dead="park")
async def h(event: Event) -> None: ...


@bus.handler("step", name="a", on_dead="park")
async def a(event: Event) -> None: ...


@bus.handler("step", name="blocks", on_dead="block")
async def blocks(event: Event) -> None: ...


class FakeStore:
    """Says what it was asked for, and moves what it is told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.moves: set[tuple[int, Pair]] = set()
        self.goes: dict[tuple[int, Pair], int] = {}
        self.blocked: list[int] = []

    def blocked_lanes(self, connection: object) -> list[int]:
        assert connection is CONNECTION
        return self.blocked

    def let_go(self, connection: object, pairs: Collection[Any] | None, limit: int) -> Any:
        assert (connection, limit) == (CONNECTION, LET_GO)
        self.calls.append(("let go", None if pairs is None else set(pairs)))
        return self.goes

    def hold_back(
        self,
        connection: object,
        holder: UUID,
        leases: Sequence[Lease],
        *,
        parking: Sequence[str],
        beyond: int,
        limit: int,
    ) -> set[tuple[int, Pair]]:
        assert (connection, holder) == (CONNECTION, ME)
        assert (parking, beyond, limit) == (["a", "h"], BEYOND, LOOK_AT)
        self.calls.append(("hold back", [lease.lane for lease in leases]))
        return self.moves

    def thin_out(
        self,
        connection: object,
        holder: UUID,
        leases: Sequence[Lease],
        *,
        hot: Collection[tuple[int, Pair]],
        kept: Sequence[Delivery],
        limit: int,
    ) -> set[tuple[int, Pair]]:
        assert (connection, holder, limit) == (CONNECTION, ME, THIN_OUT)
        lanes = [lease.lane for lease in leases]
        self.calls.append(("thin out", lanes, list(hot), [each.id for each in kept]))
        return self.moves


class FakeHolds(dict[int, Hold]):
    """The lanes held."""

    def __iter__(self) -> Any:
        return iter(self.values())


class Bench:
    def __init__(self) -> None:
        self.store, self.holds = FakeStore(), FakeHolds()
        self.followers = Followers(
            cast(Store, self.store), ME, cast(Holds, self.holds), bus.handlers.values()
        )
        for lane in (0, 1):
            self.holds[lane] = Hold(Taken(Lease(lane, 1, 0), [], {}), 0.0, 60.0)
            self.holds[lane].ready = False

    def tend(self, now: float) -> list[tuple[Any, ...]]:
        """What the store is asked for."""
        self.store.calls.clear()
        self.followers.tend(CONNECTION, now)
        return list(self.store.calls)

    def delivery(self, id: int, pair: tuple[str, str | None] = PAIR, lane: int = 0) -> Delivery:
        delivery = Delivery(id, lane, 1, 0, 0, *pair, None)
        delivery.hold = self.holds[lane]
        return delivery

    def fly(self, count: int, pair: tuple[str, str | None] = PAIR, lane: int = 0) -> None:
        """*count* more of *pair* are claimed."""
        hold = self.holds[lane]
        begin = len(hold.started) + len(hold.prefetched) + 1
        for id in range(begin, begin + count):
            delivery = self.delivery(id, pair, lane)
            if id == 1:
                hold.started[id] = delivery
            else:
                hold.prefetched.append(delivery)


@pytest.fixture
def bench() -> Bench:
    """Behind its first look."""
    bench = Bench()
    assert bench.tend(0.0) == [("let go", None)]
    return bench


def test_what_nobody_else_sees_to_is_seen_to_now_and_then(bench: Bench) -> None:
    assert bench.tend(SWEEP - 0.01) == []
    bench.store.blocked = [1, 200]
    assert bench.tend(SWEEP) == [("let go", None)]
    assert bench.tend(SWEEP + PAUSE) == [("hold back", [1])]
    assert bench.tend(SWEEP + 2 * PAUSE) == []


def test_behind_a_failed_head(bench: Bench) -> None:
    bench.followers.failed(bench.delivery(1), blocks=True)
    bench.store.moves = {(0, PAIR), (99, PAIR)}
    assert bench.tend(PAUSE) == [("hold back", [0])]
    lane = bench.holds[0]
    assert (lane.behind, lane.ready, lane.blocked) == ({PAIR}, True, True)
    bench.store.moves = set()
    # more may wait behind what was moved; the pair may have become free meanwhile
    assert bench.tend(PAUSE + 0.5) == [("let go", {(0, PAIR)})]  # lane 99 is not held
    assert bench.tend(2 * PAUSE) == [("hold back", [0])]
    assert not lane.blocked
    assert bench.tend(3 * PAUSE) == []


def test_what_has_no_key_holds_nothing_back(bench: Bench) -> None:
    bench.followers.failed(bench.delivery(1, ("h", None)), blocks=True)
    bench.followers.passed(bench.delivery(1, ("h", None)))
    assert bench.tend(PAUSE) == []


def test_a_dead_head_that_blocks_nothing_lets_its_followers_go(bench: Bench) -> None:
    bench.followers.failed(bench.delivery(1), blocks=False)
    assert bench.tend(0.1) == []  # there are none
    bench.holds[0].behind.add(PAIR)
    bench.followers.failed(bench.delivery(1), blocks=False)
    assert bench.tend(0.2) == [("let go", {(0, PAIR)})]


@pytest.mark.parametrize("flying", [FEW - 1, FEW])
def test_followers_come_when_few_are_left(bench: Bench, flying: int) -> None:
    bench.holds[0].behind.add(PAIR)
    bench.fly(flying)
    bench.followers.passed(bench.delivery(99))
    bench.followers.passed(bench.delivery(98, ("h", "other")))
    asked = bench.tend(0.1)
    assert asked == ([("let go", {(0, PAIR)})] if flying < FEW else [])
    bench.holds[0].started.clear()
    bench.holds[0].prefetched.clear()
    assert bench.tend(0.2) == ([] if asked else [("let go", {(0, PAIR)})])


def test_a_full_batch_leaves_more_behind(bench: Bench) -> None:
    lane = bench.holds[0]
    lane.behind.add(PAIR)
    bench.followers.passed(bench.delivery(1))
    bench.store.goes = {(0, PAIR): LET_GO, (99, PAIR): LET_GO}
    bench.tend(0.1)
    assert (lane.ready, lane.behind) == (True, {PAIR})
    bench.followers.passed(bench.delivery(1))
    bench.store.goes = {(0, PAIR): LET_GO - 1}
    bench.tend(0.2)
    assert lane.behind == set()


def test_a_hot_key_leaves_room_for_others(bench: Bench) -> None:
    bench.fly(HOT)
    bench.fly(2, ("h", "other"))
    bench.fly(HOT, ("h", None), lane=1)  # without a key they run side by side
    bench.store.moves = {(0, PAIR)}
    kept = list(range(1, HOT + 3))
    assert bench.tend(PAUSE) == [("thin out", [0], [(0, PAIR)], kept)]
    assert bench.holds[0].behind == {PAIR}
    assert bench.tend(PAUSE + 0.5) == []  # still many in flight


def test_a_busy_lane_of_many_keys_has_no_hot_one(bench: Bench) -> None:
    bench.fly(HOT - 1)
    assert bench.tend(PAUSE) == []
    bench.fly(HOT, ("h", "other"), lane=1)
    bench.fly(1, ("h", "other"))
    assert [call[1:3] for call in bench.tend(2 * PAUSE)] == [([1], [(1, Pair("h", "other"))])]
