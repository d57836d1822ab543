"""The head of a key that cannot run yet, with much behind it.

Elsewhere one item that was not yet due, at the front of an ordered group, silently held back
everything behind it, and nobody could see why.

Right is: only its own key waits; what else is in the lane flows; those that wait are not read again
by every claim; the key, its age and its next try can be seen; and a key with a very long queue does
not make others wait for its end.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, func, select

from sqlalchemy_relaybus import Event, Fixed, RelayBus, admin
from sqlalchemy_relaybus.lanes import lane_of
from tests.support.plans import Planner, caught
from tests.support.stores import Bench, key_on, new_event, parked
from tests.support.workers import Runs, drained, eventually, publish, waiting, working

LANE = 7


@pytest.fixture
def bus() -> RelayBus:
    return RelayBus()


def keys() -> Iterator[str]:
    return (key for key in map("key-{}".format, itertools.count()) if lane_of(key) == LANE)


def test_only_its_own_key_waits_and_it_can_be_seen(bus: RelayBus, engine: Engine) -> None:
    runs = Runs()
    blocked, *others = itertools.islice(keys(), 51)

    @bus.handler("step", name="h", retry=Fixed(wait=600))
    async def h(event: Event) -> None:
        if event.key == blocked and event.payload == "head":
            raise RuntimeError("not today")
        runs.add(event.key, event.payload)

    publish(bus, engine, "step", "head", key=blocked)
    with working(bus, engine):
        eventually(lambda: waiting(bus, engine) == 1)
        publish(bus, engine, "step", *range(1000), key=blocked)
        for n in range(20):
            for other in others:
                publish(bus, engine, "step", n, key=other)
        runs.wait(1000)
        parked, deliveries = bus.tables.parked, bus.tables.deliveries
        aside = select(func.count()).where(parked.c.status == "behind")
        left = select(func.count()).select_from(deliveries)

        def counts() -> tuple[int, int]:
            with engine.connect() as connection:
                return connection.scalar(left) or 0, connection.scalar(aside) or 0

        eventually(lambda: counts()[0] <= 100 and sum(counts()) == 1000, counts)
        with engine.connect() as connection:
            (seen,) = admin.blocked_keys(connection, bus)
        assert (seen.handler, seen.key, seen.lane) == ("h", blocked, LANE)
        assert (seen.status, seen.attempts, seen.followers) == ("retrying", 1, 1000)
        assert seen.next_try is not None
        assert seen.last_error == "RuntimeError: not today"
    for other in others:
        assert [n for key, n in runs.rows if key == other] == list(range(20))


def test_claims_do_not_read_what_waits(engine: Engine) -> None:
    """Rows and pages of a claim, with a thousand followers of a blocked head in front."""

    def cost(followers: int) -> int:
        with Bench(engine) as bench:
            holder = bench.holder("a")
            key, other = key_on(LANE), key_on(LANE, 1)
            bench.publish(new_event(key, handlers=("a",)))
            holder.take(LANE)
            [head] = holder.claim()
            holder.park(parked(head))
            bench.publish(*(new_event(key, handlers=("a",)) for _ in range(followers)))
            bench.publish(*(new_event(other, handlers=("a",)) for _ in range(10)))
            while bench.store.hold_back(
                holder.connection,
                holder.id,
                list(holder.leases.values()),
                parking=[],
                beyond=64,
                limit=500,
            ):
                pass
            statement, parameters = caught(holder.connection, lambda: holder.exchange(limit=10))
            plan = Planner(holder.connection, statement, list(parameters)).explain(parameters)
            holder.expire(LANE)
            with engine.begin() as connection:
                for table in (bench.tables.deliveries, bench.tables.parked, bench.tables.events):
                    connection.execute(table.delete())
            return plan.removed

    assert cost(followers=1000) <= cost(followers=64) + 5


@pytest.mark.parametrize(
    ("hot", "cold"), [(3_000, 30), pytest.param(50_000, 100, marks=pytest.mark.long)]
)
def test_cold_keys_do_not_wait_for_a_hot_one(
    bus: RelayBus, engine: Engine, hot: int, cold: int
) -> None:
    """Also where they are behind it in the same lane."""
    runs = Runs()
    hot_key, *cold_keys = itertools.islice(keys(), 1 + cold)
    slow = True

    @bus.handler("step", name="h")
    async def h(event: Event) -> None:
        if event.key == hot_key and slow:
            await asyncio.sleep(0.02)
        runs.add(event.key, event.payload)

    publish(bus, engine, "step", *range(hot), key=hot_key)
    for key in cold_keys:
        publish(bus, engine, "step", *range(50), key=key)
    with working(bus, engine):
        eventually(lambda: len(of_others(runs, hot_key)) == 50 * cold, limit=100)
        assert len(runs) - 50 * cold < hot / 2
        slow = False
        drained(bus, engine, 300)
    for key in (hot_key, *cold_keys):
        numbers = [n for each, n in runs.rows if each == key]
        assert numbers == list(range(len(numbers)))
    assert len(runs) == hot + 50 * cold


def of_others(runs: Runs, key: str) -> list[object]:
    return [n for each, n in list(runs.rows) if each != key]
