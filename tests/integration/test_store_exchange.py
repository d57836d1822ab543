"""The pump's statement: what it claims, deletes, renews and records, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, delete, select, text, update
from sqlalchemy.exc import OperationalError

from tests.support.stores import Bench, ids, key_on, new_event, parked, sqlstate, waiting

LANE = 7
KEY, OTHER_KEY = key_on(LANE), key_on(LANE, 1)


@pytest.fixture
def bench(engine: Engine) -> Iterator[Bench]:
    with Bench(engine) as bench:
        yield bench


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


def test_what_is_kept_is_not_claimed_again(bench: Bench) -> None:
    holder = bench.holder()
    bench.publish(*(new_event(KEY) for _ in range(4)))
    holder.take(LANE)
    reply = holder.exchange(limit=3, room=2)
    started, prefetched = reply.startable, reply.prefetched
    assert (len(started), len(prefetched)) == (2, 1)
    [last] = holder.exchange(started=started, prefetched=prefetched).startable
    assert last.id > prefetched[0].id


def test_what_just_finished_is_not_claimed_again(bench: Bench) -> None:
    """The statement's snapshot still shows what it deletes."""
    holder = bench.holder()
    bench.publish(new_event(KEY))
    holder.take(LANE)
    [delivery] = holder.claim()
    reply = holder.exchange(finished=[delivery])
    assert reply.deleted == {delivery.id}
    assert reply.startable == reply.prefetched == []


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


def test_a_lane_is_claimed_in_the_order_of_ids(bench: Bench) -> None:
    holder = bench.holder()
    bench.publish(*(new_event(key_on(LANE, n % 3)) for n in range(9)))
    holder.take(LANE)
    first = holder.exchange(per_lane=4).startable
    second = holder.exchange(per_lane=4, started=first).startable
    assert ids(first) + ids(second) == bench.deliveries()[:8]


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


def test_room_divides_what_may_start_from_what_is_claimed_ahead(bench: Bench) -> None:
    holder = bench.holder()
    bench.publish(*(new_event(KEY) for _ in range(3)), new_event(key_on(LANE + 1)))
    holder.take(LANE, LANE + 1)
    reply = holder.exchange(LANE, LANE + 1, room=2)
    assert [len(reply.startable), len(reply.prefetched)] == [2, 2]
    for lane in (LANE, LANE + 1):
        row = bench.lane(lane)
        assert sorted(row.started) == [d.id for d in reply.startable if d.lane == lane]
        assert sorted(row.prefetched) == [d.id for d in reply.prefetched if d.lane == lane]
        assert row.version == holder.leases[lane].version == 1

    started, (first, second) = reply.startable, reply.prefetched
    reply = holder.exchange(
        finished=started[:1], started=[*started[1:], first], prefetched=[second], claim=False
    )
    assert reply.deleted == {started[0].id}
    assert bench.lane(LANE).started == [started[1].id, first.id]
    assert bench.lane(LANE).prefetched == []
    assert bench.lane(LANE + 1).started == []
    assert bench.lane(LANE + 1).prefetched == [second.id]


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


def test_a_delivery_without_its_event_comes_all_the_same(bench: Bench) -> None:
    holder = bench.holder()
    bench.publish(new_event(KEY), new_event(KEY))
    with bench.engine.begin() as connection:
        connection.execute(delete(bench.tables.events).where(bench.tables.events.c.sequence == 1))
    holder.take(LANE)
    orphan, other = holder.claim()
    assert orphan.event is None
    assert other.event is not None
    assert holder.park(parked(orphan, "dead", delay=None, charge=0, blocks=False)) == {orphan.id}


# -- what is parked --------------------------------------------------------------------------------


def test_a_parked_head_blocks_its_own_handler_and_key_only(bench: Bench) -> None:
    holder = bench.holder()
    bench.publish(
        new_event(KEY),
        new_event(KEY, handlers=("a", "b")),
        new_event(OTHER_KEY),
        new_event(KEY),
    )
    holder.take(LANE)
    head, *_ = holder.exchange(limit=1).startable
    holder.park(parked(head, blocks=True))
    claimed = holder.claim()
    assert [(d.handler, d.key) for d in claimed] == [("b", KEY), ("a", OTHER_KEY)]


def test_events_without_a_key_do_not_wait_for_one_another(bench: Bench) -> None:
    holder = bench.holder()
    one = new_event()
    bench.publish(one)
    [(lane,)] = bench.read(select(bench.tables.deliveries.c.lane))
    holder.take(lane)
    [head] = holder.claim()
    holder.park(parked(head, blocks=True))
    with bench.engine.begin() as connection:
        connection.execute(
            bench.tables.deliveries.insert(),
            {"event_id": one.event.id, "lane": lane, "handler": "a"},
        )
    assert len(holder.claim()) == 1


def test_a_dead_letter_that_does_not_block_lets_its_key_go_on(bench: Bench) -> None:
    holder = bench.holder()
    bench.publish(new_event(KEY), new_event(KEY))
    holder.take(LANE)
    head, follower = holder.claim()
    holder.park(parked(head, "dead", delay=None, blocks=False))
    assert ids(holder.claim()) == [follower.id]


def test_one_parked_later_does_not_hold_up_those_before_it(bench: Bench) -> None:
    holder = bench.holder()
    bench.publish(new_event(KEY), new_event(KEY))
    holder.take(LANE)
    head, follower = holder.claim()
    holder.park(parked(follower, blocks=True))
    assert ids(holder.claim()) == [head.id]


def test_what_is_due_comes_back_as_the_first_of_its_key(bench: Bench) -> None:
    holder = bench.holder()
    bench.publish(new_event(KEY), new_event(KEY))
    holder.take(LANE)
    head, follower = holder.claim()
    holder.park(parked(head, delay=0))
    assert bench.parked() == [head.id]
    assert holder.claim() == []
    assert holder.promote() == [LANE]
    again, after = holder.claim()
    assert ids([again, after]) == [head.id, follower.id]
    assert (again.attempts, again.claims) == (1, 1)
    assert bench.read(select(bench.tables.deliveries.c.last_error).order_by("id")) == [
        ("it failed",),
        (None,),
    ]


def test_what_is_not_due_is_not_moved(bench: Bench) -> None:
    holder = bench.holder()
    bench.publish(new_event(KEY), new_event(OTHER_KEY))
    holder.take(LANE)
    later, never = holder.claim()
    holder.park(parked(later, delay=3600), parked(never, "dead", delay=None))
    assert holder.promote() == []
    assert bench.parked() == ids([later, never])


def test_requeueing_twice_at_once_has_one_effect(bench: Bench) -> None:
    holder = bench.holder()
    bench.publish(new_event(KEY), new_event(OTHER_KEY))
    holder.take(LANE)
    dead, waits = holder.claim()
    holder.park(parked(dead, "dead", delay=None), parked(waits))
    first, second = bench.connect(), bench.connect()
    both = ids([dead, waits])
    assert bench.store.requeue(first, both) == {dead.id}
    with waiting(second, lambda: bench.store.requeue(second, both)) as late:
        first.commit()
        assert late.result() == set()
    second.commit()
    [again] = holder.claim()
    assert (again.id, again.attempts) == (dead.id, 0)
    assert again.claims == dead.claims + 2  # parked once, requeued once


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


def test_after_a_lost_reply_the_lane_tells_what_was_claimed(bench: Bench) -> None:
    holder = bench.holder()
    bench.publish(new_event(KEY), new_event(OTHER_KEY))
    holder.take(LANE)
    before = holder.leases[LANE]
    reply = holder.exchange(room=1)
    holder.leases[LANE] = before  # as if it had never arrived

    assert holder.exchange().leases == {}
    state = bench.store.read_lanes(holder.connection, [LANE])[LANE]
    assert (state.lease.epoch, state.lease.version) == (before.epoch, before.version + 1)
    assert (state.started, state.prefetched) == (ids(reply.startable), ids(reply.prefetched))


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


# -- locks of others -------------------------------------------------------------------------------


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


def test_parking_steps_over_a_locked_delivery_and_says_so(bench: Bench) -> None:
    holder = bench.holder()
    bench.publish(new_event(KEY), new_event(OTHER_KEY))
    holder.take(LANE)
    locked, free = holder.claim()
    with bench.connect() as other:
        bench.lock_delivery(other, locked.id)
        reply = bench.store.park(holder.connection, holder.id, [parked(locked), parked(free)])
        assert reply == ({free.id}, {locked.id})


def test_promoting_steps_over_a_row_that_an_operator_has_locked(bench: Bench) -> None:
    holder = bench.holder()
    bench.publish(new_event(KEY), new_event(OTHER_KEY))
    holder.take(LANE)
    first, second = holder.claim()
    holder.park(parked(first, delay=0), parked(second, delay=0))
    rows = bench.tables.parked
    with bench.connect() as other:
        other.execute(select(rows.c.id).where(rows.c.id == first.id).with_for_update())
        assert holder.promote() == [LANE]
    assert bench.parked() == [first.id]


def test_handing_back_steps_over_a_lane_that_somebody_has_locked(bench: Bench) -> None:
    holder = bench.holder()
    holder.take(1, 2)
    with bench.connect() as other:
        bench.lock_lane(other, 1)
        back = bench.store.relinquish(holder.connection, holder.id, list(holder.leases.values()))
    assert back == {2}
    assert bench.lane(1).holder == holder.id
