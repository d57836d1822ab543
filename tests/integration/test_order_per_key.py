"""Events of one key reach a handler in the order in which they were committed, one at a time.

Publishers lock the key's counter until they commit, and draw ids under that lock: within a key ids
are in the order of commits. A key lives in one lane, a lane belongs to one worker at a time, claims
are made in the order of ids, and the worker runs those of a handler and key one after another.
What an event that waits does to the later ones of its key: ``test_order_per_key_waiting.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.orm import Session

from sqlalchemy_relaybus import Context, Event, Fixed, RelayBus
from tests.support.orders import TYPE, make_bus, published
from tests.support.stores import Bench, ids, key_on, new_event, parked, waiting
from tests.support.workers import Runs, dead, drained, publish, ready, working

LANE = 7
KEY, OTHER_KEY = key_on(LANE), key_on(LANE, 1)


@pytest.fixture
def bus() -> RelayBus:
    return RelayBus()


# -- publishing ------------------------------------------------------------------------------------


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
    assert bench.handlers_of(first.event.id) == ["a", "b"]


def test_events_of_several_flushes_are_stored_in_the_order_of_publishing(engine: Engine) -> None:
    bus = make_bus()
    with Session(engine) as session:
        for n in range(10):
            bus.publish(session, TYPE, str(n), key="k")
            if n % 3 == 0:
                session.flush()
        session.commit()
    assert published(engine) == [str(n) for n in range(10)]


# -- claiming --------------------------------------------------------------------------------------


def test_a_lane_is_claimed_in_the_order_of_ids(bench: Bench) -> None:
    holder = bench.holder()
    bench.publish(*(new_event(key_on(LANE, n % 3)) for n in range(9)))
    holder.take(LANE)
    first = holder.exchange(per_lane=4).startable
    second = holder.exchange(per_lane=4, started=first).startable
    assert ids(first) + ids(second) == bench.deliveries()[:8]


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


# -- running ---------------------------------------------------------------------------------------


@pytest.mark.timeout(150)
def test_order_and_exclusion_per_key_with_three_workers(bus: RelayBus, engine: Engine) -> None:
    """With failures, time limits, hand-overs and late joiners: no overlap, no inversion."""
    ledger = Runs()
    chance = random.Random(7)
    lock = threading.Lock()
    current: dict[tuple[str, str], int] = {}
    overlaps: list[Any] = []
    completed: set[tuple[str, str, int]] = set()

    def begin(handler: str, event: Event) -> None:
        assert event.key is not None
        with lock:
            if (handler, event.key) in current:
                overlaps.append((handler, event.key, event.payload))
            current[handler, event.key] = event.payload
            fails = chance.random() < 0.05 and (handler, event.key, event.payload) not in completed
        if fails:
            end(handler, event)
            raise RuntimeError("now and then")

    def end(handler: str, event: Event, *, done: bool = False) -> None:
        assert event.key is not None
        with lock:
            current.pop((handler, event.key), None)
            if done:
                completed.add((handler, event.key, event.payload))
                ledger.add(handler, event.key, event.payload)

    retry = Fixed(wait=0.02, max_attempts=50)

    @bus.handler("step", name="coroutine", retry=retry)
    async def coroutine(event: Event) -> None:
        begin("coroutine", event)
        await asyncio.sleep(0.001)
        end("coroutine", event, done=True)

    @bus.handler("step", name="plain", retry=retry)
    def plain(event: Event) -> None:
        begin("plain", event)
        time.sleep(0.0005)
        end("plain", event, done=True)

    @bus.handler("step", name="transactional", retry=retry, mode="transactional")
    def transactional(event: Event, session: Session) -> None:
        begin("transactional", event)
        session.execute(text("SELECT 1"))
        end("transactional", event, done=True)

    keys, each = 20, 40
    with contextlib.ExitStack() as stack:
        settings = {"lane_linger": 0.2, "lease_duration": 2.0, "concurrency": 20, "prefetch": 20}
        stack.enter_context(working(bus, engine, **settings))
        leaver = None
        for n in range(each):
            with Session(engine) as session, session.begin():
                for key in range(keys):
                    bus.publish(session, "step", n, key=f"k{key}")
            if n == 10:
                leaver = stack.enter_context(working(bus, engine, **settings))
            if n == 20:
                stack.enter_context(working(bus, engine, **settings))
            if n == 30 and leaver is not None:
                assert leaver.stop() is True
        drained(bus, engine, 90)
    assert not overlaps
    assert not dead(bus, engine)
    for handler in ("coroutine", "plain", "transactional"):
        for key in range(keys):
            mine = [n for h, k, n in ledger.rows if (h, k) == (handler, f"k{key}")]
            assert mine == list(range(each)), (handler, key, mine)


def test_two_services_on_one_bus(engine: Engine) -> None:
    """Neither holds on to a lane whose first delivery only the other can run."""
    runs = Runs()
    both = RelayBus()
    services = [RelayBus(), RelayBus()]
    for n, service in enumerate(services):
        for bus in (both, service):

            @bus.handler("step", name=f"h{n}")
            async def h(event: Event, context: Context) -> None:
                runs.add(context.handler, event.key, event.payload)

    for n in range(10):
        for key in range(10):
            publish(both, engine, "step", n, key=f"k{key}")
    with (
        working(services[0], engine, lease_duration=1.0),
        working(services[1], engine, lease_duration=1.0),
    ):
        drained(both, engine, 60)
    assert len(runs) == 200
    for name in ("h0", "h1"):
        for key in range(10):
            assert [r[2] for r in runs.rows if r[:2] == (name, f"k{key}")] == list(range(10))


@pytest.mark.timeout(150)
def test_two_saturated_workers_with_other_handlers_on_the_same_lanes(engine: Engine) -> None:
    """A lane that both have work on goes to and fro: each starts within two lease lengths."""
    lease, lanes, seconds = 3.0, range(4), 12.0
    runs, both = Runs(), RelayBus()
    services = [RelayBus(), RelayBus()]
    for n, service in enumerate(services):
        for bus in (both, service):

            @bus.handler("step", name=f"h{n}")
            async def h(event: Event, context: Context) -> None:
                assert event.created_at is not None
                waited = datetime.now(UTC) - event.created_at
                runs.add(context.handler, event.key, event.payload, waited.total_seconds())
                await asyncio.sleep(0.02)

    keys = [key_on(lane, n) for lane in lanes for n in range(8)]
    settings = {"lease_duration": lease, "concurrency": 2, "prefetch": 2}
    with working(services[0], engine, **settings), working(services[1], engine, **settings):
        publish_until, n = time.monotonic() + seconds, 0
        while time.monotonic() < publish_until:
            # always more than both can begin at once, and never more than a fraction of a second's
            if ready(both, engine) < 24:
                publish(both, engine, "step", n, key=keys[n % len(keys)])
                n += 1
            else:
                time.sleep(0.005)
        drained(both, engine, 60)
    assert len(runs) == 2 * n
    for name in ("h0", "h1"):
        for key in keys:
            mine = [row[2] for row in runs.rows if row[:2] == (name, key)]
            assert mine == sorted(mine)
        longest = max(row[3] for row in runs.rows if row[0] == name)
        assert longest < 2 * lease, (name, longest, n)
