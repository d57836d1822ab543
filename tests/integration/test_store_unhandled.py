"""Deliveries of handlers that no worker has: out of the way, kept, and given back in order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, select

from sqlalchemy_relaybus import Event, RelayBus
from tests.support.stores import Bench, ids, key_on, new_event
from tests.support.workers import Runs, drained, eventually, publish, working

LANE = 7
KEY = key_on(LANE)


@pytest.fixture
def bench(engine: Engine) -> Iterator[Bench]:
    with Bench(engine) as bench:
        yield bench


def unhandled(bench: Bench) -> list[tuple[int, str]]:
    parked = bench.tables.parked
    return [
        (id, handler)
        for id, handler in bench.read(
            select(parked.c.id, parked.c.handler)
            .where(parked.c.status == "unhandled")
            .order_by(parked.c.id)
        )
    ]


def test_they_are_set_aside_by_the_holder_alone_and_lowest_first(bench: Bench) -> None:
    zombie, holder = bench.holder("a"), bench.holder("a")
    bench.publish(*(new_event(KEY, handlers=("a", "gone")) for _ in range(3)))
    mine = bench.deliveries()[::2]
    zombie.take(LANE, lease=-1)
    holder.take(LANE)
    store = bench.store
    stale = list(zombie.leases.values())
    assert store.set_aside(zombie.connection, zombie.id, stale, ["a"], 10) == 0
    leases = list(holder.leases.values())
    assert store.set_aside(holder.connection, holder.id, leases, ["a"], 2) == 2
    first, second = unhandled(bench)
    assert first[0] < second[0] < max(bench.deliveries())
    assert ids(holder.claim()) == mine


def test_later_ones_of_the_key_stay_behind_them(bench: Bench) -> None:
    holder, other = bench.holder("a"), bench.holder("gone")
    bench.publish(new_event(KEY, handlers=("gone",)))
    holder.take(LANE)
    leases = list(holder.leases.values())
    assert bench.store.set_aside(holder.connection, holder.id, leases, ["a"], 10) == 1
    ((id, _),) = unhandled(bench)
    bench.publish(new_event(KEY, handlers=("gone",)))
    bench.store.relinquish(holder.connection, holder.id, leases)
    other.take(LANE)
    assert other.claim() == []
    assert bench.store.reclaim(other.connection, ["else"], 10) == 0
    assert bench.store.reclaim(other.connection, ["gone"], 10) == 1
    assert ids(other.claim()) == [id, *(each for each in bench.deliveries() if each != id)]


def test_a_locked_one_is_left_for_later(bench: Bench) -> None:
    holder = bench.holder("a")
    bench.publish(*(new_event(KEY, handlers=("gone",)) for _ in range(2)))
    first, second = bench.deliveries()
    holder.take(LANE)
    leases = list(holder.leases.values())
    with bench.connect() as other:
        bench.lock_delivery(other, first)
        assert bench.store.set_aside(holder.connection, holder.id, leases, ["a"], 10) == 1
    assert [id for id, _ in unhandled(bench)] == [second]


def test_a_worker_sets_them_aside_and_the_right_one_takes_them_back(engine: Engine) -> None:
    ours, theirs = RelayBus(), RelayBus()
    runs = Runs()

    @ours.handler("step", name="ours")
    def mine(event: Event) -> None:
        runs.add("ours", event.payload)

    @theirs.handler("step", name="theirs")
    def other(event: Event) -> None:
        runs.add("theirs", event.payload)

    ours.route("step", to=["theirs"])
    publish(ours, engine, "step", *range(5), key="k")
    with Bench(engine) as bench:
        with working(ours, engine, lease_duration=1.0):
            runs.wait(5)
            eventually(lambda: len(unhandled(bench)) == 5)
        publish(ours, engine, "step", 5, key="k")
        with working(ours, engine), working(theirs, engine):
            drained(ours, engine)
            eventually(lambda: unhandled(bench) == [])
            drained(ours, engine)
    assert [n for name, n in runs.rows if name == "theirs"] == [0, 1, 2, 3, 4, 5]
    assert [n for name, n in runs.rows if name == "ours"] == [0, 1, 2, 3, 4, 5]
