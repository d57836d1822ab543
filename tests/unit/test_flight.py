"""What is claimed and not over: how much more there is room for, and what goes back."""

from __future__ import annotations

import pytest

from sqlalchemy_relaybus import Event, RelayBus
from sqlalchemy_relaybus.settings import Settings
from sqlalchemy_relaybus.stores.base import Delivery, Lease, Taken
from sqlalchemy_relaybus.worker.flight import RETRY_LOCKED, Flight
from sqlalchemy_relaybus.worker.hold import Hold

bus = RelayBus()


@bus.handler("step", name="h")
async def h(event: Event) -> None: ...


@bus.handler("step", name="plain")
def plain(event: Event) -> None: ...


def flight(concurrency: int = 4, prefetch: int = 3, batch: int = 100) -> Flight:
    settings = Settings(concurrency=concurrency, prefetch=prefetch, batch=batch, threads=2)
    return Flight(bus.handlers, settings)


def hold(lane: int = 0) -> Hold:
    return Hold(Taken(Lease(lane, 1, 0), [], {}), 0.0, 60.0)


def claimed(
    flight: Flight, hold: Hold, *names: tuple[int, str | None], handler: str = "h"
) -> list[Delivery]:
    """Claimed ahead, by id and key."""
    deliveries = [Delivery(id, hold.lease.lane, 1, 0, 0, handler, key, None) for id, key in names]
    for each in deliveries:
        each.hold = hold
        flight.prefetch(hold, each)
    return deliveries


def waiting(hold: Hold) -> list[int]:
    return [each.id for each in hold.prefetched]


def test_room_is_what_may_run_and_wait() -> None:
    it, lane = flight(), hold()
    assert it.room == 7
    claimed(it, lane, (1, None), (2, None))
    assert (it.prefetched, it.room) == (2, 5)
    it.promote(lane)
    assert (it.prefetched, it.room) == (0, 5)
    claimed(it, lane, *((id, None) for id in range(3, 10)))
    assert it.room == 0
    assert flight(batch=5).room == 5


def test_what_fits_begins_in_order() -> None:
    it, lane = flight(concurrency=2), hold()
    one, two, three, four = claimed(it, lane, (1, "k"), (2, "k"), (3, None), (4, None))
    assert it.promote(lane) == [one, two, three]  # a run takes one slot
    assert list(lane.started) == [1, 2, 3]
    assert waiting(lane) == [4]
    assert (it.prefetched, it.load.deliveries, it.load.slots) == (1, 3, 2)
    assert it.promote(lane) == []
    it.load.end(three)
    assert it.promote(lane) == [four]


def test_only_some_may_begin() -> None:
    it, lane = flight(), hold()
    _, two, _ = claimed(it, lane, (1, None), (2, None), (3, None))
    assert it.promote(lane, {2}) == [two]
    assert waiting(lane) == [1, 3]
    assert it.promote(lane, set()) == []


def test_what_was_not_recorded_as_started_waits_again_in_its_place() -> None:
    it, lane, other = flight(), hold(), hold(1)
    claimed(it, lane, (1, None), (2, None), (3, None))
    first = it.promote(lane)
    claimed(it, lane, (4, None))
    claimed(it, other, (5, None))
    lost = it.promote(other)
    other.lost = True
    it.put_back(first + lost)
    assert waiting(lane) == [1, 2, 3, 4]
    assert (waiting(other), list(other.started)) == ([], [5])
    assert not lane.started
    assert (it.prefetched, it.load.deliveries) == (4, 0)


def test_followers_of_what_failed_are_claimed_anew() -> None:
    it, lane = flight(), hold()
    (head,) = claimed(it, lane, (1, "k"))
    it.promote(lane)
    claimed(it, lane, (2, "k"), (3, "other"), (4, "k"), (5, None))
    claimed(it, lane, (6, "k"), handler="plain")
    it.drop_followers(head)
    assert waiting(lane) == [3, 5, 6]
    assert it.prefetched == 3
    (alone,) = claimed(it, hold(1), (7, None))
    it.drop_followers(alone)
    assert it.prefetched == 4


def test_how_idle_what_waits_leaves_its_executor() -> None:
    it, lane, other = flight(concurrency=4), hold(), hold(1)
    assert it.idle([lane]) == 0.0
    claimed(it, lane, (1, None))
    it.promote(lane)
    assert it.idle([lane]) == 0.0  # nothing waits
    claimed(it, lane, (2, None))
    assert it.idle([lane, other]) == 0.75
    claimed(it, other, (3, None), handler="plain")
    assert it.idle([lane, other]) == 1.0
    assert it.idle([lane]) == 0.75


def test_a_locked_row_is_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 50.0)
    it, lane = flight(), hold()
    (one,) = claimed(it, lane, (1, None))
    it.retry_locked(0.0)
    it.lock(one)
    assert (it.locked, it.finished) == ({1: one}, {})
    it.retry_locked(50.0 + RETRY_LOCKED - 0.01)
    assert it.locked
    it.retry_locked(50.0 + RETRY_LOCKED)
    assert (it.locked, it.finished) == ({}, {1: one})


def test_a_lost_lane_takes_all_with_it() -> None:
    it, lane, other = flight(), hold(), hold(1)
    one, two = claimed(it, lane, (1, None), (2, None))
    it.promote(lane)
    claimed(it, lane, (3, None))
    (four,) = claimed(it, other, (4, None))
    it.finished = {1: one, 4: four}
    it.lock(two)
    it.forget(lane)
    assert (it.finished, it.locked) == ({4: four}, {})
    assert (waiting(lane), it.prefetched) == ([], 1)
