"""A handler of the mode transactional has its effects once.

Its writes and the deletion of its delivery commit together, and the deletion comes last, under
``FOR KEY SHARE`` on the lane: until that commit no takeover gets the lane, and after a takeover
the deletion finds another epoch and the transaction is rolled back. What handlers do to their
transaction: ``test_effectively_once_handlers.py``.
"""

from __future__ import annotations

import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.exc import OperationalError

from sqlalchemy_relaybus.stores.base import Suspect
from tests.support.effects import INSERT, written
from tests.support.stores import EXPIRED, Bench, ids, key_on, new_event, sqlstate, waiting

LANE = 7
KEY, OTHER_KEY = key_on(LANE), key_on(LANE, 1)


# -- completion against takeover -------------------------------------------------------------------


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


@pytest.mark.parametrize("commits", [True, False])
def test_a_completion_that_began_before_a_takeover_keeps_it_away(
    bench: Bench, commits: bool
) -> None:
    """Also while its own statement is held up: the lane is locked first."""
    old, new = bench.holder(), bench.holder()
    bench.publish(new_event(KEY))
    old.take(LANE, lease=EXPIRED)
    [delivery] = old.claim(lease=EXPIRED)
    with bench.connect() as other, bench.connect() as handler:
        bench.lock_delivery(other, delivery.id)
        with waiting(handler, lambda: old.complete(delivery, handler)) as completion:
            assert new.take(LANE) == {}
            other.rollback()
            assert completion.result() is True
        assert new.take(LANE) == {}
        if commits:
            handler.commit()
        else:
            handler.rollback()
    taken = new.take(LANE)[LANE]
    assert taken.suspects.keys() == (set() if commits else {delivery.id})
    assert ids(new.claim()) == ([] if commits else [delivery.id])


def test_a_transaction_that_began_before_a_takeover_does_not_complete_after_it(
    effects: Engine, bench: Bench
) -> None:
    """Whatever the handler wrote and read meanwhile; what it wrote is rolled back."""
    old, new = bench.holder(), bench.holder()
    bench.publish(new_event(KEY))
    old.take(LANE, lease=EXPIRED)
    [delivery] = old.claim(lease=EXPIRED)
    with bench.connect() as handler:
        handler.execute(INSERT, {"n": 1, "what": "zombie"})
        handler.execute(select(bench.tables.lanes)).all()
        assert new.take(LANE).keys() == {LANE}
        before = bench.contents()
        assert old.complete(delivery, handler) is False
        handler.rollback()
    assert bench.contents() == before
    assert written(effects) == []
    with bench.connect() as handler:
        [again] = new.claim()
        handler.execute(INSERT, {"n": 1, "what": "successor"})
        assert new.complete(again, handler)
        handler.commit()
    assert written(effects) == [(1, "successor")]


def test_a_takeover_that_fails_lets_a_waiting_completion_go_on(bench: Bench) -> None:
    old, new = bench.holder(), bench.holder()
    bench.publish(new_event(KEY))
    old.take(LANE, lease=EXPIRED)
    [delivery] = old.claim(lease=EXPIRED)
    with bench.connect() as taker, bench.connect() as handler:
        new.begin_take(taker, LANE)
        with waiting(handler, lambda: old.complete(delivery, handler)) as completion:
            taker.rollback()
            assert completion.result() is True
        handler.commit()
    assert bench.deliveries() == []


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


def test_under_repeatable_read_a_zombies_completion_fails_to_serialize(engine: Engine) -> None:
    with Bench(engine) as bench:
        old, new = bench.holder(), bench.holder()
        bench.publish(new_event(KEY))
        old.take(LANE, lease=EXPIRED)
        [delivery] = old.exchange(room=0, lease=EXPIRED).prefetched  # so that it is not charged
        with bench.connect("REPEATABLE READ") as handler:
            handler.exec_driver_sql("SELECT count(*) FROM relaybus_lanes")  # the snapshot
            assert new.take(LANE).keys() == {LANE}
            with pytest.raises(OperationalError) as caught:
                old.complete(delivery, handler)
        assert sqlstate(caught.value) == "40001"
        assert bench.deliveries() == [delivery.id]


# -- completion against the worker's own pump ------------------------------------------------------


@pytest.mark.parametrize("careful", [False, True])
def test_what_completes_after_the_snapshot_is_not_claimed_again(
    bench: Bench, careful: bool
) -> None:
    """Its transaction commits while the exchange, whose snapshot shows it, waits for a lock."""
    holder = bench.holder()
    bench.publish(new_event(KEY), new_event(KEY), new_event(OTHER_KEY))
    bench.publish(new_event(key_on(LANE + 1)))
    holder.take(LANE, LANE + 1)
    completing, finishing, *_ = kept = holder.claim()
    with bench.connect() as other:
        # with a strength that lets the completion's FOR KEY SHARE through
        if careful:  # it steps over rows: held up at the table that it joins last
            other.execute(text("LOCK relaybus_events IN ACCESS EXCLUSIVE MODE"))
        else:
            bench.lock_lane(other, LANE, "NO KEY UPDATE")
        with waiting(
            holder.connection,
            lambda: holder.exchange(
                finished=[finishing], started=[completing, *kept[2:]], careful=careful
            ),
        ) as exchange:
            assert holder.complete(completing, other)
            other.commit()
            reply = exchange.result()
    assert reply.deleted == {finishing.id}
    assert reply.startable == reply.prefetched == []
    assert bench.deliveries() == ids(kept[2:])


@pytest.mark.parametrize("careful", [False, True])
def test_a_renewal_does_not_wait_for_a_completion_in_progress(bench: Bench, careful: bool) -> None:
    holder = bench.holder()
    bench.publish(new_event(KEY))
    holder.take(LANE)
    [delivery] = holder.claim()
    with bench.connect() as handler:
        assert holder.complete(delivery, handler)
        assert holder.exchange(started=[delivery], careful=careful).leases.keys() == {LANE}
        handler.commit()
    assert bench.deliveries() == []
