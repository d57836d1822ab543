"""A takeover and a write of the holder never both win, whichever comes first.

A takeover locks the lane ``FOR UPDATE`` and steps over one that is locked; it checks the lease
again on the newest version. The holder's writes lock the lane too. Each test holds one of them in
the middle of its statement or of its transaction and lets the other go.
"""

from __future__ import annotations

import pytest
from sqlalchemy import func, select
from sqlalchemy.exc import OperationalError

from tests.support.stores import EXPIRED, Bench, backend, ids, key_on, new_event, waiting

LANE = 7
KEY, OTHER_KEY = key_on(LANE), key_on(LANE, 1)


# -- one holder at a time --------------------------------------------------------------------------


def test_two_takers_never_get_one_lane_and_do_not_wait_for_each_other(bench: Bench) -> None:
    old, new, late = bench.holder(), bench.holder(), bench.holder()
    old.take(LANE, lease=EXPIRED)
    with bench.connect() as taker:
        new.begin_take(taker, LANE)
        assert late.take(LANE, LANE + 1).keys() == {LANE + 1}
        taker.commit()
    assert late.take(LANE) == {}
    assert bench.lane(LANE).holder == new.id


def test_a_live_lease_is_not_taken(bench: Bench) -> None:
    bench.holder().take(LANE)
    assert bench.holder().take(LANE) == {}


def test_the_epoch_grows_by_one_whenever_the_lane_changes_hands(bench: Bench) -> None:
    first, second = bench.holder(), bench.holder()
    assert first.take(LANE, lease=EXPIRED)[LANE].lease.epoch == 1
    assert second.take(LANE)[LANE].lease.epoch == 2
    second.exchange()
    assert second.leases[LANE].epoch == 2
    assert bench.store.relinquish(second.connection, second.id, [second.leases[LANE]]) == {LANE}
    assert bench.lane(LANE).epoch == 2
    taken = first.take(LANE)[LANE]
    assert (taken.lease.epoch, taken.lease.version, taken.started) == (3, 0, [])


def test_a_renewal_between_a_takers_snapshot_and_its_lock_keeps_the_lane(bench: Bench) -> None:
    old, new = bench.holder(), bench.holder()
    old.take(LANE, lease=EXPIRED)
    with bench.gate(new.taker) as gate:
        with waiting(new.taker, lambda: new.take(LANE)) as takeover:
            assert old.exchange(lease=60).leases.keys() == {LANE}
            gate.rollback()
            assert takeover.result() == {}
    assert bench.lane(LANE).holder == old.id
    assert old.exchange().leases.keys() == {LANE}


# -- step by step ----------------------------------------------------------------------------------


def test_a_claim_that_read_before_the_lane_was_locked_is_refused(bench: Bench) -> None:
    """Its snapshot shows the lane as its own, and the deliveries as free or running."""
    old, new = bench.holder(), bench.holder()
    bench.publish(new_event(KEY), new_event(OTHER_KEY))
    old.take(LANE, lease=EXPIRED)
    [finished] = old.exchange(limit=1, lease=EXPIRED).startable
    with bench.connect() as taker:
        bench.lock_lane(taker, LANE, "NO KEY UPDATE")  # as somebody's write, which comes first
        with waiting(old.connection, lambda: old.exchange(finished=[finished])) as exchange:
            new.begin_take(taker, LANE)
            taker.commit()
            before = bench.contents()
            reply = exchange.result()
    assert (reply.leases, reply.deleted, reply.locked) == ({}, set(), set())
    assert (reply.startable, reply.prefetched) == ([], [])
    assert reply.refused == {LANE}
    assert bench.contents() == before


def test_an_exchange_that_steps_over_locks_is_refused_beside_a_takeover(bench: Bench) -> None:
    old, new = bench.holder(), bench.holder()
    bench.publish(new_event(KEY), new_event(OTHER_KEY))
    old.take(LANE, lease=EXPIRED)
    [finished] = old.exchange(limit=1, lease=EXPIRED).startable
    with bench.connect() as taker:
        new.begin_take(taker, LANE)
        for _ in ("before its commit", "after it"):
            reply = old.exchange(finished=[finished], careful=True)
            assert (reply.leases, reply.deleted, reply.startable) == ({}, set(), [])
            assert reply.refused == {LANE}
            taker.commit()
    assert len(bench.deliveries()) == 2


def test_an_exchange_in_progress_keeps_the_lane(bench: Bench) -> None:
    """It has written the lane, and waits for somebody's lock on what it is to delete."""
    old, new = bench.holder(), bench.holder()
    bench.publish(new_event(KEY))
    old.take(LANE, lease=EXPIRED)
    [finished] = old.claim(lease=EXPIRED)
    with bench.connect() as other:
        bench.lock_delivery(other, finished.id)
        with waiting(old.connection, lambda: old.exchange(finished=[finished])) as exchange:
            assert new.take(LANE) == {}
            other.rollback()
            assert exchange.result().deleted == {finished.id}
    assert new.take(LANE) == {}
    assert bench.lane(LANE).holder == old.id


@pytest.mark.parametrize("commits", [True, False])
def test_a_renewal_in_progress_keeps_the_lane(bench: Bench, commits: bool) -> None:
    old, new = bench.holder(), bench.holder()
    old.take(LANE, lease=EXPIRED)
    renewal = bench.connect()
    assert bench.store.renew(renewal, old.id, [old.leases[LANE]], 60).keys() == {LANE}
    assert new.take(LANE) == {}
    if commits:
        renewal.commit()
        assert new.take(LANE) == {}
    else:
        renewal.rollback()
        assert new.take(LANE).keys() == {LANE}


@pytest.mark.parametrize("commits", [True, False])
def test_a_renewal_beside_a_takeover_does_not_wait_and_has_no_effect(
    bench: Bench, commits: bool
) -> None:
    old, new = bench.holder(), bench.holder()
    old.take(LANE, lease=EXPIRED)
    with bench.connect() as taker:
        new.begin_take(taker, LANE)
        before = bench.contents()
        assert old.renew() == set()
        assert bench.contents() == before
        if commits:
            taker.commit()
            before = bench.contents()
            assert old.renew() == set()
            assert bench.contents() == before
        else:
            taker.rollback()
            assert old.renew() == {LANE}
    assert bench.lane(LANE).holder == (new.id if commits else old.id)


@pytest.mark.parametrize("commits", [True, False])
def test_a_hand_back_in_progress_is_not_taken_over(bench: Bench, commits: bool) -> None:
    """Its commit leaves the next holder no suspects: its worker lives."""
    old, new = bench.holder(), bench.holder()
    bench.publish(new_event(KEY))
    old.take(LANE, lease=EXPIRED)
    [started] = old.claim(lease=EXPIRED)
    handing_back = bench.connect()
    assert old.relinquish(handing_back) == {LANE}
    assert new.take(LANE) == {}
    if commits:
        handing_back.commit()
    else:
        handing_back.rollback()
    taken = new.take(LANE)[LANE]
    assert taken.lease.epoch == 2
    assert taken.suspects.keys() == (set() if commits else {started.id})
    assert ids(new.claim()) == [started.id]


def test_a_hand_back_between_a_takers_snapshot_and_its_lock_leaves_no_suspects(
    bench: Bench,
) -> None:
    old, new = bench.holder(), bench.holder()
    bench.publish(new_event(KEY))
    old.take(LANE, lease=EXPIRED)
    old.claim(lease=EXPIRED)
    with bench.gate(new.taker) as gate:
        with waiting(new.taker, lambda: new.take(LANE)) as takeover:
            assert old.relinquish() == {LANE}
            gate.rollback()
            taken = takeover.result()[LANE]
    assert (taken.started, taken.suspects) == ([], {})
    assert bench.lane(LANE).holder == new.id


@pytest.mark.parametrize("commits", [True, False])
def test_a_hand_back_beside_a_takeover_does_not_wait_and_has_no_effect(
    bench: Bench, commits: bool
) -> None:
    old, new = bench.holder(), bench.holder()
    old.take(LANE, lease=EXPIRED)
    with bench.connect() as taker:
        new.begin_take(taker, LANE)
        before = bench.contents()
        assert old.relinquish() == set()
        assert bench.contents() == before
        if commits:
            taker.commit()
            before = bench.contents()
            assert old.relinquish() == set()
            assert bench.contents() == before
        else:
            taker.rollback()
            assert old.relinquish() == {LANE}
    assert bench.lane(LANE).holder == (new.id if commits else None)


def test_somebodys_lock_on_one_delivery_beside_the_renewal_of_the_lanes(bench: Bench) -> None:
    """An exchange that waits for it renews nothing; what is sent instead does."""
    holder, other = bench.holder(), bench.holder()
    bench.publish(new_event(key_on(1)), new_event(key_on(2)))
    holder.take(1, 2, lease=EXPIRED)
    locked, free = finished = holder.claim(lease=EXPIRED)
    with bench.connect() as stranger:
        bench.lock_delivery(stranger, locked.id)
        with waiting(holder.connection, lambda: holder.exchange(finished=finished)) as exchange:
            assert [bench.lane(lane).version for lane in (1, 2)] == [1, 1]
            with bench.engine.begin() as connection:  # as its lock timeout would
                connection.execute(select(func.pg_cancel_backend(backend(holder.connection))))
            with pytest.raises(OperationalError):
                exchange.result()
        assert holder.renew() == {1, 2}
        assert other.take(1, 2) == {}
        reply = holder.exchange(finished=finished, careful=True)
        assert reply.leases.keys() == {1, 2}
        assert (reply.deleted, reply.locked) == ({free.id}, {locked.id})
    assert holder.exchange(finished=[locked], careful=True).deleted == {locked.id}
    assert bench.deliveries() == []
