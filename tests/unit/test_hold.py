"""What a worker knows of a lane: its clocks, its fill, and what became of it meanwhile."""

from __future__ import annotations

from typing import Literal
from uuid import UUID, uuid4

import pytest

from sqlalchemy_relaybus.stores.base import Delivery, LaneState, Lease, Pair, Suspect, Taken
from sqlalchemy_relaybus.worker.hold import LANE_IN_FLIGHT, Hold

LANE, EPOCH, VERSION = 7, 3, 10
ME, OTHER = UUID(int=1), UUID(int=2)


def hold(*, sent: float = 100.0, duration: float = 30.0, behind: tuple[Pair, ...] = ()) -> Hold:
    taken = Taken(Lease(LANE, EPOCH, VERSION), [], {5: Suspect(1, 2)}, behind)
    return Hold(taken, sent, duration)


def delivery(id: int, handler: str = "h", key: str | None = None) -> Delivery:
    return Delivery(id, LANE, EPOCH, 0, 0, handler, key, None)


def test_a_lane_just_taken_is_looked_into() -> None:
    it = hold()
    assert (it.ready, it.draining, it.yielded, it.lost, it.blocked) == (
        *(True, False, False),
        *(False, False),
    )
    assert it.suspects == {5: Suspect(1, 2)}
    assert (it.taken_at, it.worked_at) == (100.0, 100.0)
    assert it.empty
    assert hold(behind=(Pair("h", "k"),)).blocked
    assert hold(behind=(Pair("h", "k"),)).behind == {Pair("h", "k")}


def test_the_lease_counts_from_when_its_statement_was_sent() -> None:
    it = hold()
    assert it.live(129.9)
    assert not it.live(130.0)
    assert it.renewal_at == 110.0
    lease = Lease(LANE, EPOCH, VERSION + 1)
    it.renewed(lease, 120.0, 30.0)
    assert it.lease is lease
    assert it.live(149.9)
    assert it.renewal_at == 130.0
    it.not_before = 140.0  # somebody else has it locked
    assert it.renewal_at == 140.0
    it.lost = True
    assert not it.live(121.0)


def test_when_to_claim_from_it() -> None:
    it = hold()
    assert it.claimable(100.0)
    it.ready = False
    assert not it.claimable(100.0)
    it.ready, it.draining = True, True
    assert not it.claimable(100.0)
    it.draining, it.not_before = False, 101.0
    assert not it.claimable(100.9)
    assert it.claimable(101.0)
    for id in range(LANE_IN_FLIGHT // 2):
        it.started[id] = delivery(id)
    it.prefetched.extend(delivery(id) for id in range(100, 100 + LANE_IN_FLIGHT // 2 - 1))
    assert it.claimable(101.0)
    it.prefetched.append(delivery(99))
    assert not it.claimable(101.0)


def test_what_is_in_flight() -> None:
    it = hold()
    it.started[1] = delivery(1, key="k")
    assert not it.empty
    it.prefetched.append(delivery(2, key="k"))
    it.prefetched.append(delivery(3, "other", "k"))
    it.prefetched.append(delivery(4, key="other"))
    assert [each.id for each in it.in_flight] == [1, 2, 3, 4]
    assert it.count(Pair("h", "k")) == 2
    del it.started[1]
    assert not it.empty
    it.prefetched.clear()
    assert it.empty


def state(holder: UUID | None = ME, epoch: int = EPOCH, version: int = VERSION) -> LaneState:
    return LaneState(Lease(LANE, epoch, version), holder, [], [])


@pytest.mark.parametrize(
    ("stored", "unsure", "outcome"),
    [
        (state(), [], "same"),
        (state(), [LANE], "same"),
        (state(version=VERSION + 1), [LANE], "written"),
        (state(version=VERSION + 1), [LANE + 1], "lost"),  # by whom?
        (state(version=VERSION + 2), [LANE], "lost"),
        (state(version=VERSION - 1), [LANE], "lost"),
        (state(holder=OTHER), [LANE], "lost"),
        (state(holder=OTHER, version=VERSION + 1), [LANE], "lost"),
        (state(holder=None), [LANE], "lost"),
        (state(epoch=EPOCH + 1), [LANE], "lost"),
        (state(epoch=EPOCH + 1, version=VERSION + 1), [LANE], "lost"),
        (None, [LANE], "lost"),
    ],
)
def test_what_became_of_it(
    stored: LaneState | None, unsure: list[int], outcome: Literal["same", "written", "lost"]
) -> None:
    assert hold().compare(stored, ME, unsure) == outcome


def test_without_an_unknown_outcome_nobody_else_writes_it() -> None:
    assert hold().compare(state(version=VERSION + 1), ME) == "lost"
    assert hold().compare(state(), uuid4()) == "lost"
