"""Publishing: with the caller's transaction, once for each id and handler, in order of a key."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, delete, event, select, text
from sqlalchemy.orm import Session

from sqlalchemy_relaybus import RelayBus
from sqlalchemy_relaybus.event import Event
from sqlalchemy_relaybus.lanes import lane_of_event
from sqlalchemy_relaybus.stores.base import NewEvent
from tests.support.stores import Bench, ids, key_on, new_event, parked, waiting

LANE = 7
KEY, OTHER_KEY = key_on(LANE), key_on(LANE, 1)


@pytest.fixture
def bench(engine: Engine) -> Iterator[Bench]:
    with Bench(engine) as bench:
        yield bench


def handlers_of(bench: Bench, id: UUID) -> list[str]:
    """The handlers of the deliveries of event *id*, in the order of the deliveries."""
    deliveries = bench.tables.deliveries
    found = bench.read(
        select(deliveries.c.handler).where(deliveries.c.event_id == id).order_by(deliveries.c.id)
    )
    return [handler for (handler,) in found]


def events(bench: Bench) -> list[tuple[Any, ...]]:
    """Id and handlers of every event."""
    return bench.read(select(bench.tables.events.c.id, bench.tables.events.c.handlers))


# -- the caller's transaction ----------------------------------------------------------------------


def test_events_commit_and_roll_back_with_the_callers_transaction(bench: Bench) -> None:
    with bench.connect() as connection:
        bench.store.publish(connection, [new_event(KEY), new_event(delay=60)])
        assert (bench.deliveries(), bench.parked(), events(bench)) == ([], [], [])
        connection.rollback()
        assert (bench.deliveries(), bench.parked(), events(bench)) == ([], [], [])
        bench.store.publish(connection, [new_event(KEY), new_event(delay=60)])
        connection.commit()
    assert (len(bench.deliveries()), len(bench.parked()), len(events(bench))) == (1, 1, 2)


def test_each_handler_has_a_delivery_on_the_lane_of_the_key_or_else_of_the_event(
    bench: Bench,
) -> None:
    keyed, keyless = new_event(KEY, handlers=("b", "a")), new_event(handlers=("a",))
    bench.publish(keyed, keyless)
    rows = bench.read(
        select(text("event_id, handler, lane, key"), bench.tables.deliveries.c.attempts)
    )
    assert rows == [
        (keyed.event.id, "b", LANE, KEY, 0),
        (keyed.event.id, "a", LANE, KEY, 0),
        (keyless.event.id, "a", lane_of_event(keyless.event.id), None, 0),
    ]


def test_an_event_that_no_handler_takes_is_stored_alone(bench: Bench) -> None:
    bench.publish(new_event(handlers=()), new_event(id=uuid4(), handlers=()))
    assert [handlers for _, handlers in events(bench)] == [[], []]
    assert bench.deliveries() == []


# -- one id, once for each handler -----------------------------------------------------------------


def test_the_same_id_twice_in_one_flush_is_one_event(bench: Bench) -> None:
    id = uuid4()
    bench.publish(new_event(KEY, id=id), new_event(), new_event(KEY, id=id, handlers=("a", "b")))
    assert handlers_of(bench, id) == ["a", "b"]
    assert len(events(bench)) == 2
    assert (id, ["a", "b"]) in events(bench)


@pytest.mark.parametrize("transactions", [1, 2])
def test_the_same_id_again_adds_nothing(bench: Bench, transactions: int) -> None:
    id = uuid4()
    with bench.connect() as connection:
        for _ in range(2):
            bench.store.publish(connection, [new_event(KEY, id=id)])
            if transactions == 2:
                connection.commit()
        connection.commit()
    assert handlers_of(bench, id) == ["a"]
    assert events(bench) == [(id, ["a"])]


@pytest.mark.parametrize("commits", [True, False])
def test_two_transactions_with_the_same_id_make_one_event(bench: Bench, commits: bool) -> None:
    id = uuid4()
    first, second = bench.connect(), bench.connect()
    bench.store.publish(first, [new_event(KEY, id=id)])
    again = new_event(OTHER_KEY, id=id, handlers=("a", "b"))
    with waiting(second, lambda: bench.store.publish(second, [again])) as rival:
        if commits:
            first.commit()
        else:
            first.rollback()
        rival.result()
    second.commit()
    assert handlers_of(bench, id) == ["a", "b"]
    assert events(bench) == [(id, ["a", "b"])]
    # all on the lane and key of the one that is stored
    deliveries = bench.tables.deliveries
    key = KEY if commits else OTHER_KEY
    assert set(bench.read(select(deliveries.c.lane, deliveries.c.key))) == {(LANE, key)}


def test_a_handler_that_came_later_gets_its_delivery_and_the_others_none(bench: Bench) -> None:
    id = uuid4()
    bench.publish(new_event(KEY, id=id))
    bench.publish(new_event(KEY, id=id, handlers=("a", "b")))
    assert handlers_of(bench, id) == ["a", "b"]
    assert events(bench) == [(id, ["a", "b"])]


def test_two_transactions_that_add_the_same_handler_add_it_once(bench: Bench) -> None:
    id = uuid4()
    bench.publish(new_event(KEY, id=id))
    again = new_event(None, id=id, handlers=("a", "b"))
    first, second = bench.connect(), bench.connect()
    bench.store.publish(first, [again])
    with waiting(second, lambda: bench.store.publish(second, [again])) as rival:
        first.commit()
        rival.result()
    second.commit()
    assert handlers_of(bench, id) == ["a", "b"]
    assert events(bench) == [(id, ["a", "b"])]


def test_a_handler_that_completed_never_runs_again_for_the_event(bench: Bench) -> None:
    id = uuid4()
    bench.publish(new_event(KEY, id=id))
    holder = bench.holder()
    holder.take(LANE)
    assert holder.exchange(finished=holder.claim()).deleted
    bench.publish(new_event(KEY, id=id))
    assert bench.deliveries() == []
    bench.publish(new_event(KEY, id=id, handlers=("a", "b")))
    assert [d.handler for d in holder.claim()] == ["b"]


def test_an_event_that_waits_is_not_added_to_again(bench: Bench) -> None:
    id = uuid4()
    bench.publish(new_event(KEY, id=id))
    holder = bench.holder()
    holder.take(LANE)
    holder.park(*(parked(delivery) for delivery in holder.claim()))
    bench.publish(new_event(KEY, id=id))
    assert bench.deliveries() == []


def test_an_event_that_is_purged_meanwhile_is_published_anew(bench: Bench) -> None:
    """Between the conflict with the stored event and the lock on it."""
    id = uuid4()
    bench.publish(new_event(KEY, id=id))
    holder = bench.holder()
    holder.take(LANE)
    holder.exchange(finished=holder.claim())
    stored = bench.tables.events
    retention, publisher = bench.connect(), bench.connect()
    retention.execute(select(stored.c.id).where(stored.c.id == id).with_for_update())
    again = [new_event(KEY, id=id), new_event(KEY)]
    with waiting(publisher, lambda: bench.store.publish(publisher, again)) as publishing:
        retention.execute(delete(stored).where(stored.c.id == id))
        retention.commit()
        publishing.result()
    publisher.commit()
    assert handlers_of(bench, id) == ["a"]
    assert len(events(bench)) == 2
    assert len(holder.claim()) == 2


def test_flushes_with_the_same_ids_in_opposite_order_do_not_deadlock(bench: Bench) -> None:
    """Both insert by id: whoever waits, waits for the lowest, and holds nothing yet."""
    low, high = sorted([uuid4(), uuid4()])
    first, second = bench.connect(), bench.connect()
    bench.store.publish(first, [new_event(id=low)])
    both = [new_event(id=high), new_event(id=low)]
    with waiting(second, lambda: bench.store.publish(second, both)) as rival:
        bench.store.publish(first, [new_event(id=high)])  # held by nobody
        first.commit()
        rival.result()
    second.commit()
    assert sorted(id for id, _ in events(bench)) == [low, high]
    assert len(bench.deliveries()) == 2


# -- the order of a key ----------------------------------------------------------------------------


def test_keys_are_locked_in_sorted_order(bench: Bench) -> None:
    """Whoever waits for a key holds none that comes after it: no deadlock."""
    low, high = sorted([KEY, OTHER_KEY])
    bench.publish(new_event(low), new_event(high))
    first, second = bench.connect(), bench.connect()
    bench.store.publish(first, [new_event(low)])
    with waiting(
        second, lambda: bench.store.publish(second, [new_event(high), new_event(low)])
    ) as rival:
        bench.store.publish(first, [new_event(high)])
        first.commit()
        rival.result()
    second.commit()
    assert len(bench.deliveries()) == 6


def test_within_a_key_ids_are_in_the_order_of_commits(bench: Bench) -> None:
    first, second = bench.connect(), bench.connect()
    before, after, late = new_event(KEY), new_event(KEY), new_event(KEY)
    bench.store.publish(first, [before])
    with waiting(second, lambda: bench.store.publish(second, [late])) as rival:
        bench.store.publish(first, [after])
        first.commit()
        rival.result()
    second.commit()
    holder = bench.holder()
    holder.take(LANE)
    claimed = holder.claim()
    assert [d.event for d in claimed] == [before.event, after.event, late.event]
    assert [d.event.sequence for d in claimed if d.event] == [1, 2, 3]


def test_within_a_flush_ids_are_in_the_order_of_publishing(bench: Bench) -> None:
    # in an order of their ids that is neither this one nor its reverse
    new = [new_event(KEY, id=uuid4()) for _ in range(20)]
    bench.publish(*new)
    holder = bench.holder()
    holder.take(LANE)
    claimed = holder.claim()
    assert [d.event for d in claimed] == [each.event for each in new]
    assert [d.event.sequence for d in claimed if d.event] == list(range(1, 21))


def test_a_transaction_left_open_holds_up_no_other_key(bench: Bench) -> None:
    first = bench.connect()
    bench.store.publish(first, [new_event(KEY)])
    bench.publish(new_event(OTHER_KEY), new_event(None))  # a lock would time out
    assert len(bench.deliveries()) == 2
    first.commit()
    # what committed late, with a lower id, is not passed over
    holder = bench.holder()
    holder.take(LANE)
    assert [d.key for d in holder.claim()] == [KEY, OTHER_KEY]


def test_a_delivery_that_commits_late_is_claimed_although_its_id_is_lower(bench: Bench) -> None:
    first = bench.connect()
    bench.store.publish(first, [new_event(KEY)])
    bench.publish(new_event(OTHER_KEY))
    holder = bench.holder()
    holder.take(LANE)
    claimed = holder.claim()
    first.commit()
    [late] = holder.exchange(started=claimed).startable
    assert late.id < claimed[0].id


def test_a_delayed_head_keeps_its_place_before_later_events_of_its_key(bench: Bench) -> None:
    delayed, follower, other = new_event(KEY, delay=0), new_event(KEY), new_event(OTHER_KEY)
    bench.publish(delayed, follower, other)
    holder = bench.holder()
    holder.take(LANE)
    [flows] = holder.claim()
    assert flows.event == other.event
    holder.exchange(finished=[flows], claim=False)
    assert holder.promote() == [LANE]
    claimed = holder.claim()
    assert [d.event for d in claimed] == [delayed.event, follower.event]
    assert ids(claimed) == sorted(ids(claimed))


def test_a_delay_counts_from_the_statement_and_not_from_the_transactions_start(
    bench: Bench,
) -> None:
    with bench.engine.begin() as connection:
        start = connection.scalar(text("SELECT now()"))
        while connection.scalar(text("SELECT clock_timestamp() - now() < interval '20 ms'")):
            pass
        bench.store.publish(connection, [new_event(delay=60)])
    [(due,)] = bench.read(select(bench.tables.parked.c.available_at))
    assert (due - start).total_seconds() > 60.02


def test_many_publishers_on_the_same_keys_neither_deadlock_nor_break_the_order(
    engine: Engine,
) -> None:
    bus = RelayBus(wake=False)

    @bus.handler("test.happened", name="a")
    def handle(event: Event) -> None: ...

    keys = [key_on(LANE, n) for n in range(20)]
    latch = threading.Barrier(8)

    def transactions(seed: int) -> None:
        choice = random.Random(seed)
        latch.wait(30)
        for _ in range(25):
            with Session(engine) as session:
                for key in choice.sample(keys, 5):
                    bus.publish(session, "test.happened", {}, key=key)
                session.commit()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(transactions, range(8))) == [None] * 8
    with Bench(engine) as bench:
        deliveries, stored = bench.tables.deliveries, bench.tables.events
        joined = deliveries.join(stored, stored.c.id == deliveries.c.event_id)
        rows = bench.read(
            select(deliveries.c.key, stored.c.sequence)
            .select_from(joined)
            .order_by(deliveries.c.id)
        )
    assert len(rows) == 8 * 25 * 5
    for key in keys:
        numbers = [number for each, number in rows if each == key]
        assert numbers == list(range(1, len(numbers) + 1))


def test_publishing_needs_no_more_than_one_statement_or_two_with_keys(bench: Bench) -> None:
    def statements(*new: NewEvent) -> int:
        seen: list[str] = []
        with bench.engine.connect() as connection:
            event.listen(connection, "before_cursor_execute", lambda *args: seen.append(args[2]))
            bench.store.publish(connection, new)
        return len(seen)

    assert statements(*(new_event() for _ in range(50))) == 1
    assert statements(*(new_event(KEY, delay=1) for _ in range(50))) == 2
    assert statements(*(new_event(id=uuid4()) for _ in range(50))) == 1


def test_an_id_again_under_another_key_keeps_the_order_of_the_stored_one(bench: Bench) -> None:
    first = new_event(KEY, id=uuid4())
    bench.publish(first)
    again = new_event(None, handlers=("b",), id=first.event.id)
    with bench.connect() as one, bench.connect() as two:
        bench.store.publish(one, [again])
        with waiting(two, lambda: bench.store.publish(two, [new_event(KEY)])) as later:
            one.commit()
            later.result()
        two.commit()
    assert handlers_of(bench, first.event.id) == ["a", "b"]
