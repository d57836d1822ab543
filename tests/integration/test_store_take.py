"""Taking lanes over: against completions and renewals in progress, and who is suspect after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, select

from sqlalchemy_relaybus.stores.base import Suspect
from tests.support.stores import EXPIRED, Bench, ids, key_on, new_event, parked, waiting

LANE = 7
KEY = key_on(LANE)


@pytest.fixture
def bench(engine: Engine) -> Iterator[Bench]:
    with Bench(engine) as bench:
        yield bench


def test_a_lane_with_a_completion_in_progress_is_not_taken(bench: Bench) -> None:
    old, new = bench.holder(), bench.holder()
    bench.publish(new_event(KEY), new_event(KEY))
    old.take(LANE, lease=EXPIRED)
    first, second = old.claim(lease=EXPIRED)
    with bench.connect() as handler:
        assert old.complete(first, handler)
        assert new.take(LANE) == {}
        handler.commit()
    assert new.take(LANE).keys() == {LANE}
    assert ids(new.claim()) == [second.id]


def test_a_completion_that_begins_after_a_takeover_waits_and_deletes_nothing(bench: Bench) -> None:
    old, new = bench.holder(), bench.holder()
    bench.publish(new_event(KEY), new_event(KEY))
    old.take(LANE, lease=EXPIRED)
    reply = old.exchange(room=1, lease=EXPIRED)
    [started], [prefetched] = reply.startable, reply.prefetched
    with bench.connect() as taker, bench.connect() as handler:
        new.begin_take(taker, LANE)
        # nothing but the lane's epoch refuses it
        with waiting(handler, lambda: old.complete(prefetched, handler)) as completion:
            taker.commit()
            assert completion.result() is False
        handler.commit()
    assert bench.deliveries() == [started.id, prefetched.id]


def test_two_takers_never_get_one_lane_and_do_not_wait_for_each_other(bench: Bench) -> None:
    old, new, late = bench.holder(), bench.holder(), bench.holder()
    old.take(LANE, lease=EXPIRED)
    with bench.connect() as taker:
        new.begin_take(taker, LANE)
        assert late.take(LANE, LANE + 1).keys() == {LANE + 1}
        taker.commit()
    assert late.take(LANE) == {}
    assert bench.lane(LANE).holder == new.id


def test_a_takeover_waits_for_no_lock_on_a_delivery(bench: Bench) -> None:
    """Its taker has leases to renew."""
    old, new = bench.holder(), bench.holder()
    bench.publish(new_event(KEY), new_event(KEY))
    old.take(LANE, lease=EXPIRED)
    first, second = old.claim(lease=EXPIRED)
    with bench.connect() as other:
        bench.lock_delivery(other, first.id)
        assert new.take(LANE)[LANE].suspects.keys() == {first.id, second.id}
    assert not old.complete(first)
    assert ids(new.claim()) == [first.id, second.id]


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


def test_what_is_completed_after_a_takers_snapshot_is_not_claimed_again(bench: Bench) -> None:
    old, new = bench.holder(), bench.holder()
    bench.publish(new_event(KEY), new_event(KEY))
    old.take(LANE, lease=EXPIRED)
    first, second = old.claim(lease=EXPIRED)
    with bench.gate(new.taker) as gate:
        with waiting(new.taker, lambda: new.take(LANE)) as takeover:
            assert old.complete(first)
            gate.rollback()
            taken = takeover.result()[LANE]
    assert taken.started == [first.id, second.id]
    assert taken.suspects == {second.id: Suspect(1, 1000)}
    [again] = new.claim()
    assert (again.id, again.attempts) == (second.id, 0)


def test_taking_and_reading_in_one_statement_would_claim_it_again(bench: Bench) -> None:
    """Why taking returns no deliveries: a statement's snapshot is older than its locks."""
    old, new = bench.holder(), bench.holder()
    bench.publish(new_event(KEY))
    old.take(LANE, lease=EXPIRED)
    [delivery] = old.claim(lease=EXPIRED)
    both = """
        WITH free AS MATERIALIZED (
          SELECT lane FROM relaybus_lanes
          WHERE lane = %(lane)s AND lease_expires_at < statement_timestamp()
          FOR UPDATE SKIP LOCKED
        ), taken AS (
          UPDATE relaybus_lanes AS l SET epoch = epoch + 1, holder = %(holder)s
          FROM free WHERE l.lane = free.lane RETURNING l.lane
        )
        SELECT id FROM relaybus_deliveries JOIN taken USING (lane)
    """
    with bench.gate(new.taker) as gate:
        with waiting(
            new.taker,
            lambda: new.taker.exec_driver_sql(both, {"lane": LANE, "holder": new.id}).all(),
        ) as takeover:
            assert old.complete(delivery)
            gate.rollback()
            assert takeover.result() == [(delivery.id,)]
    assert bench.deliveries() == []


def test_a_holder_never_takes_from_itself_although_its_lease_ran_out(bench: Bench) -> None:
    holder, other = bench.holder(), bench.holder()
    bench.publish(new_event(KEY))
    holder.take(LANE, lease=EXPIRED)
    [running] = holder.claim(lease=EXPIRED)
    assert holder.take(LANE) == {}
    assert holder.complete(running)
    assert other.take(LANE).keys() == {LANE}


def test_a_live_lease_is_not_taken(bench: Bench) -> None:
    bench.holder().take(LANE)
    assert bench.holder().take(LANE) == {}


def test_at_most_as_many_lanes_as_wanted_are_taken(bench: Bench) -> None:
    holder = bench.holder()
    assert len(holder.take(*range(10), limit=3)) == 3
    lanes = bench.tables.lanes
    assert len(bench.read(select(lanes.c.lane).where(lanes.c.holder == holder.id))) == 3


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


def test_only_what_was_started_and_is_still_there_is_suspect(bench: Bench) -> None:
    old, new = bench.holder(), bench.holder()
    bench.publish(*(new_event(KEY) for _ in range(4)))
    old.take(LANE, lease=EXPIRED)
    reply = old.exchange(room=3, lease=EXPIRED, company=9)
    completed, failed, started = reply.startable
    assert len(reply.prefetched) == 1
    assert old.complete(completed)
    assert old.park(parked(failed, charge=0)) == {failed.id}
    before = bench.contents()

    taken = new.take(LANE)[LANE]

    assert set(taken.started) == {completed.id, failed.id, started.id}
    assert taken.suspects == {started.id: Suspect(1, 9)}
    assert bench.lane(LANE).started == bench.lane(LANE).prefetched == []
    assert not old.complete(started)
    # no attempt is counted, and no delivery written or locked
    after = bench.contents()
    assert {name for name in after if after[name] != before[name]} == {bench.tables.lanes.name}


def test_each_crash_counts_until_the_delivery_has_ended(bench: Bench) -> None:
    bench.publish(new_event(KEY), new_event(KEY), new_event(KEY))
    holders = [bench.holder() for _ in range(4)]
    for n, holder in enumerate(holders):
        taken = holder.take(LANE, lease=EXPIRED)[LANE]
        if n == 0:
            assert taken.suspects == {}
        reply = holder.exchange(room=3 - n, lease=EXPIRED, company=10 - n)
        first, second, third = [*reply.startable, *reply.prefetched]
        if n == 2:
            # the second did not run again, and is as suspect as it was
            assert taken.suspects == {
                first.id: Suspect(2, 9),
                second.id: Suspect(2, 9),
                third.id: Suspect(1, 10),
            }
            zombie = holders[1]
            zombie.absolve(first)
            assert len(bench.suspects()) == 3  # by its epoch
            holder.absolve(second)
    assert bench.suspects() == {first.id: Suspect(3, 8), third.id: Suspect(1, 10)}
    assert taken.suspects == bench.suspects()


def test_a_suspect_that_is_gone_is_forgotten_and_one_that_waits_is_not(bench: Bench) -> None:
    old, new, last = bench.holder(), bench.holder(), bench.holder()
    bench.publish(new_event(KEY), new_event(KEY))
    old.take(LANE, lease=EXPIRED)
    old.claim(lease=EXPIRED)
    new.take(LANE, lease=EXPIRED)
    completed, waits = new.exchange(room=0, lease=EXPIRED).prefetched
    assert new.complete(completed)
    assert new.park(parked(waits, charge=0)) == {waits.id}
    assert last.take(LANE)[LANE].suspects == {waits.id: Suspect(1, 1000)}
    assert bench.suspects() == {waits.id: Suspect(1, 1000)}


def test_a_holder_that_lives_takes_back_the_crash_that_was_counted_for_it(bench: Bench) -> None:
    """And none that was counted for another."""
    bench.publish(new_event(KEY), new_event(KEY))
    holders = [bench.holder() for _ in range(3)]
    for holder in holders[:2]:
        holder.take(LANE, lease=EXPIRED)
        first, second = holder.claim(lease=EXPIRED)
    holders[2].take(LANE)
    assert bench.suspects() == {first.id: Suspect(2, 1000), second.id: Suspect(2, 1000)}
    holders[0].survived(first)
    assert bench.suspects() == {first.id: Suspect(1, 1000), second.id: Suspect(2, 1000)}
    holders[1].survived(first, second)
    holders[1].survived(first)
    assert bench.suspects() == {first.id: Suspect(0, 1000), second.id: Suspect(1, 1000)}
