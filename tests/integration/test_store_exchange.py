"""The pump's statement: what it claims and renews, and what it leaves alone."""

from __future__ import annotations

import pytest
from sqlalchemy import select, text, update
from sqlalchemy.exc import OperationalError

from tests.support.stores import Bench, ids, key_on, new_event, sqlstate

LANE = 7
KEY, OTHER_KEY = key_on(LANE), key_on(LANE, 1)


# -- claiming --------------------------------------------------------------------------------------


def test_a_claim_writes_no_delivery(bench: Bench) -> None:
    holder = bench.holder()
    bench.publish(*(new_event(KEY) for _ in range(3)))
    holder.take(LANE)
    # xmax too: it is not locked either
    rows = select(text("ctid::text, xmin::text, xmax::text"), bench.tables.deliveries)
    before = bench.read(rows)
    assert len(holder.claim()) == 3
    assert bench.read(rows) == before


def test_deep_lanes_do_not_take_all_the_room(bench: Bench) -> None:
    holder = bench.holder()
    for lane, depth in ((1, 20), (2, 20), (3, 2)):
        bench.publish(*(new_event(key_on(lane, n)) for n in range(depth)))
    holder.take(1, 2, 3)
    reply = holder.exchange(1, 2, 3, limit=12, per_lane=5)
    assert [d.lane for d in reply.startable] == [1] * 5 + [2] * 5 + [3] * 2


def test_the_lane_asked_for_first_is_served_first(bench: Bench) -> None:
    """So that a rotating order is fair where there is more than fits."""
    holder = bench.holder()
    for lane in (1, 2, 3):
        bench.publish(*(new_event(key_on(lane, n)) for n in range(4)))
    holder.take(1, 2, 3)
    reply = holder.exchange(3, 1, 2, limit=6, per_lane=4)
    assert [d.lane for d in reply.startable] == [1] * 2 + [3] * 4
    assert reply.startable[:2] == sorted(reply.startable[:2], key=lambda d: d.id)


def test_a_lane_that_is_not_to_be_claimed_from_is_only_renewed(bench: Bench) -> None:
    holder = bench.holder()
    bench.publish(new_event(KEY))
    holder.take(LANE)
    reply = holder.exchange(claim=False)
    assert reply.leases.keys() == {LANE}
    assert reply.startable == reply.prefetched == []


def test_only_deliveries_of_the_workers_own_handlers_are_claimed(bench: Bench) -> None:
    bench.publish(new_event(KEY, handlers=("a", "b")), new_event(None, handlers=("b", "a")))
    lanes = {lane for (lane,) in bench.read(select(bench.tables.deliveries.c.lane))}
    holder = bench.holder("b")
    holder.take(*lanes)
    assert [d.handler for d in holder.claim()] == ["b", "b"]


def test_a_delivery_comes_with_its_event(bench: Bench) -> None:
    holder = bench.holder()
    new = new_event(KEY, payload='{"id": 7}')
    bench.publish(new)
    holder.take(LANE)
    [delivery] = holder.claim()
    assert delivery.event is not None
    assert delivery.event == new.event
    assert (delivery.event.type, delivery.event.key) == ("test.happened", KEY)
    assert (delivery.event.payload, delivery.event.sequence) == ({"id": 7}, 1)
    assert delivery.event.created_at is not None
    assert (delivery.handler, delivery.key, delivery.attempts) == ("a", KEY, 0)
    assert (delivery.epoch, delivery.claims) == (1, 0)


# -- renewing --------------------------------------------------------------------------------------


def test_a_lane_with_nothing_new_is_not_rewritten(bench: Bench) -> None:
    holder = bench.holder()
    bench.publish(new_event(KEY))
    holder.take(LANE, LANE + 1)
    before = bench.lane(LANE + 1)
    assert holder.exchange(write=False).leases.keys() == {LANE}
    assert bench.lane(LANE + 1) == before
    assert holder.leases[LANE + 1].version == before.version == 0
    assert holder.exchange(LANE + 1, write=True).leases.keys() == {LANE + 1}


def test_a_lane_is_renewed_and_handed_back_without_the_holders_others(bench: Bench) -> None:
    """Though they are of the same epoch and version."""
    holder = bench.holder()
    mine, _ = (taken.lease for taken in holder.take(1, 2).values())
    before = bench.lane(2)
    renewed = bench.store.renew(holder.connection, holder.id, [mine], 60)
    assert renewed.keys() == {1}
    assert bench.lane(2) == before
    assert bench.store.relinquish(holder.connection, holder.id, list(renewed.values())) == {1}
    assert bench.lane(2) == before
    assert bench.lane(1).holder is None


def test_a_lane_that_has_moved_is_not_written_until_its_address_is_read_again(
    bench: Bench,
) -> None:
    holder = bench.holder()
    bench.publish(new_event(KEY))
    holder.take(LANE)
    lanes = bench.tables.lanes
    with bench.engine.begin() as connection:
        connection.execute(
            update(lanes).where(lanes.c.lane == LANE).values(version=lanes.c.version)
        )
    reply = holder.exchange()
    assert (reply.leases, reply.startable, reply.prefetched) == ({}, [], [])
    assert reply.refused == {LANE}
    state = bench.store.read_lanes(holder.connection, [LANE])[LANE]
    assert state.holder == holder.id
    assert state.lease == holder.leases[LANE]._replace(hint=state.lease.hint)
    assert state.lease.hint != holder.leases[LANE].hint
    holder.leases[LANE] = state.lease
    assert len(holder.claim()) == 1


# -- locks of others -------------------------------------------------------------------------------


@pytest.mark.parametrize("careful", [False, True])
def test_the_address_of_another_lane_writes_neither(bench: Bench, careful: bool) -> None:
    """It only says where to look: both rows are of the same holder, epoch and version."""
    holder = bench.holder()
    bench.publish(new_event(key_on(1)), new_event(key_on(2)))
    mine, other = holder.take(1, 2).values()
    before = bench.store.read_lanes(holder.connection, [1, 2])
    holder.leases[1] = mine.lease._replace(hint=other.lease.hint)
    reply = holder.exchange(1, careful=careful)
    assert (reply.leases, reply.refused, reply.startable) == ({}, {1}, [])
    assert bench.store.read_lanes(holder.connection, [1, 2]) == before
    reply = holder.exchange(1, 2, careful=careful)  # the row at that address is the other's alone
    assert reply.leases.keys() == {2}
    assert reply.refused == {1}
    assert [each.lane for each in reply.startable] == [2]
    after = bench.store.read_lanes(holder.connection, [1, 2])
    assert after[1] == before[1]
    assert after[2].started == ids(reply.startable)


def test_careful_steps_over_a_locked_delivery_and_says_so(bench: Bench) -> None:
    holder = bench.holder()
    bench.publish(new_event(KEY), new_event(KEY), new_event(OTHER_KEY))
    holder.take(LANE)
    locked, free, _ = finished = holder.claim()
    with bench.connect() as other:
        bench.lock_delivery(other, locked.id)
        reply = holder.exchange(finished=finished, careful=True)
        assert reply.leases.keys() == {LANE}
        assert reply.deleted == {free.id, finished[2].id}
        assert reply.locked == {locked.id}
    reply = holder.exchange(finished=[locked], careful=True)
    assert (reply.deleted, reply.locked) == ({locked.id}, set())


def test_careful_steps_over_a_locked_lane_and_serves_the_others(bench: Bench) -> None:
    holder = bench.holder()
    bench.publish(new_event(key_on(1)), new_event(key_on(2)))
    holder.take(1, 2)
    on_locked, on_free = finished = holder.claim()
    bench.publish(new_event(key_on(1)), new_event(key_on(2)))
    with bench.connect() as other:
        bench.lock_lane(other, 1)
        reply = holder.exchange(finished=finished, careful=True)
        assert reply.leases.keys() == {2}
        assert reply.deleted == {on_free.id}
        assert [d.lane for d in reply.startable] == [2]
    state = bench.store.read_lanes(holder.connection, [1])[1]
    assert state.lease == holder.leases[1]  # not lost: the next one serves it
    assert holder.exchange(1, finished=[on_locked], careful=True).deleted == {on_locked.id}


@pytest.mark.parametrize("row", ["delivery", "lane"])
def test_otherwise_a_lock_times_out_and_nothing_is_done(bench: Bench, row: str) -> None:
    holder = bench.holder()
    bench.publish(new_event(key_on(1)), new_event(key_on(2)))
    holder.take(1, 2)
    bench.store.prepare(holder.connection, lock_timeout=0.05, timeout=60)
    finished = holder.claim()
    before = bench.contents()
    with bench.connect() as other:
        if row == "lane":
            bench.lock_lane(other, 2)
        else:
            bench.lock_delivery(other, finished[1].id)
        with pytest.raises(OperationalError) as caught:
            holder.exchange(finished=finished)
    assert sqlstate(caught.value) == "55P03"
    assert bench.contents() == before
    assert holder.exchange(finished=finished).deleted == set(ids(finished))
