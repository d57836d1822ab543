"""An event that is published again with the same id runs no handler twice.

The event's row lists every handler that ever had a delivery of it, and outlives the deliveries.
Publishing locks that row and adds deliveries only for handlers that it does not list, so that it
makes no difference whether the earlier ones wait, run, are dead or have long been completed. It
holds for as long as the event is kept.
"""

from __future__ import annotations

from uuid import uuid4

import pytest
from sqlalchemy import Engine, delete, select

from sqlalchemy_relaybus import Event, RelayBus
from tests.support.stores import Bench, key_on, new_event, parked, waiting
from tests.support.workers import Runs, drained, publish, working

LANE = 7
KEY, OTHER_KEY = key_on(LANE), key_on(LANE, 1)


@pytest.fixture
def bus() -> RelayBus:
    return RelayBus()


def test_the_same_id_twice_in_one_flush_is_one_event(bench: Bench) -> None:
    id = uuid4()
    bench.publish(new_event(KEY, id=id), new_event(), new_event(KEY, id=id, handlers=("a", "b")))
    assert bench.handlers_of(id) == ["a", "b"]
    assert len(bench.events()) == 2
    assert (id, ["a", "b"]) in bench.events()


@pytest.mark.parametrize("transactions", [1, 2])
def test_the_same_id_again_adds_nothing(bench: Bench, transactions: int) -> None:
    id = uuid4()
    with bench.connect() as connection:
        for _ in range(2):
            bench.store.publish(connection, [new_event(KEY, id=id)])
            if transactions == 2:
                connection.commit()
        connection.commit()
    assert bench.handlers_of(id) == ["a"]
    assert bench.events() == [(id, ["a"])]


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
    assert bench.handlers_of(id) == ["a", "b"]
    assert bench.events() == [(id, ["a", "b"])]
    # all on the lane and key of the one that is stored
    deliveries = bench.tables.deliveries
    key = KEY if commits else OTHER_KEY
    assert set(bench.read(select(deliveries.c.lane, deliveries.c.key))) == {(LANE, key)}


def test_a_handler_that_came_later_gets_its_delivery_and_the_others_none(bench: Bench) -> None:
    id = uuid4()
    bench.publish(new_event(KEY, id=id))
    bench.publish(new_event(KEY, id=id, handlers=("a", "b")))
    assert bench.handlers_of(id) == ["a", "b"]
    assert bench.events() == [(id, ["a", "b"])]


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
    assert bench.handlers_of(id) == ["a", "b"]
    assert bench.events() == [(id, ["a", "b"])]


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
    assert bench.handlers_of(id) == ["a"]
    assert len(bench.events()) == 2
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
    assert sorted(id for id, _ in bench.events()) == [low, high]
    assert len(bench.deliveries()) == 2


# -- with a worker ---------------------------------------------------------------------------------


def test_publishing_an_id_again_after_completion(bus: RelayBus, engine: Engine) -> None:
    runs = Runs()

    @bus.handler("step", name="h")
    async def h(event: Event) -> None:
        runs.add("h", event.payload)

    publish(bus, engine, "step", 1, id="order-7", key="k")
    with working(bus, engine):
        drained(bus, engine)
        publish(bus, engine, "step", 2, id="order-7", key="k")
        publish(bus, engine, "step", 3, key="k")
        drained(bus, engine)
    assert runs.rows == [("h", 1), ("h", 3)]

    @bus.handler("step", name="later")
    async def later(event: Event) -> None:
        runs.add("later", event.payload)

    publish(bus, engine, "step", 4, id="order-7", key="k")
    with working(bus, engine):
        drained(bus, engine)
    assert runs.rows == [("h", 1), ("h", 3), ("later", 1)]
