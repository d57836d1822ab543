"""Dead letters that are requeued.

Elsewhere a requeued job kept its counters, so one more failure, or none, discarded it again.

Right is: it has its whole budget of attempts and begins again with the shortest pause. The text of
its last error stays until another takes its place. The requeued of one key run in their old order,
and before later events of the key that no worker has begun. Requeuing twice has one effect.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Engine, func, select, text

from sqlalchemy_relaybus import Context, Event, Exponential, Fixed, RelayBus
from sqlalchemy_relaybus.stores import store_for
from tests.support.ledger import is_increasing, steadily
from tests.support.workers import (
    Runs,
    dead,
    drained,
    eventually,
    publish,
    working,
)

KEYS = [f"key-{n}" for n in range(5)]


class Shop:
    """A handler that is broken, until it is repaired."""

    def __init__(self, retry: Fixed | Exponential) -> None:
        self.bus = RelayBus()
        self.runs = Runs()
        self.repaired = threading.Event()
        self.store = store_for("postgresql", self.bus.tables)

        @self.bus.handler("step", name="step", retry=retry)
        async def step(event: Event, context: Context) -> None:
            self.runs.add(event.key, event.payload, context.attempt)
            if not self.repaired.is_set():
                raise RuntimeError(f"broken for {event.payload}")

    def bury(self, engine: Engine, each: int = 10) -> list[int]:
        """Dead letters, so many of each key; their ids in order."""
        for key in KEYS:
            publish(self.bus, engine, "step", *range(each), key=key)
        with working(self.bus, engine):
            eventually(lambda: len(dead(self.bus, engine)) == each * len(KEYS))
        self.runs.rows.clear()
        return [row.id for row in dead(self.bus, engine)]

    def requeue(self, engine: Engine, ids: list[int]) -> set[int]:
        with engine.begin() as connection:
            return self.store.requeue(connection, ids)


@pytest.fixture
def shop() -> Shop:
    return Shop(Fixed(wait=0, max_attempts=3))


def test_all_at_once_before_what_came_later(engine: Engine, shop: Shop) -> None:
    """In whatever order their ids are given."""
    ids = shop.bury(engine)
    shop.repaired.set()
    for key in KEYS:
        publish(shop.bus, engine, "step", *range(10, 20), key=key)
    assert shop.requeue(engine, ids[::-1]) == set(ids)
    with working(shop.bus, engine):
        drained(shop.bus, engine)
    for key in KEYS:
        assert [row[1:] for row in shop.runs.rows if row[0] == key] == [(n, 1) for n in range(20)]
    assert not dead(shop.bus, engine)


def test_while_new_events_arrive_and_run(engine: Engine, shop: Shop) -> None:
    """Their place among those is open then; their own order is not, and each runs once."""
    ids = shop.bury(engine)
    shop.repaired.set()
    sent: dict[str, int] = defaultdict(lambda: 100)

    def load(n: int) -> None:
        key = KEYS[n % len(KEYS)]
        publish(shop.bus, engine, "step", sent[key], key=key)
        sent[key] += 1

    with working(shop.bus, engine):
        with steadily(load, pause=0.001):
            shop.runs.wait(50)
            assert shop.requeue(engine, ids) == set(ids)
            eventually(lambda: not dead(shop.bus, engine))
            shop.runs.wait(len(shop.runs) + 100)
        drained(shop.bus, engine)
    for key in KEYS:
        numbers = [row[1] for row in shop.runs.rows if row[0] == key]
        requeued, new = [n for n in numbers if n < 100], [n for n in numbers if n >= 100]
        assert requeued == list(range(10))
        assert new == list(range(100, sent[key]))
        assert is_increasing(new)
    assert {row[2] for row in shop.runs.rows} == {1}


def test_it_has_its_whole_budget_and_the_shortest_pause_again(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    shop = Shop(Exponential(base=0.1, factor=4, max_attempts=3, jitter=0))
    ids = shop.bury(engine, each=1)
    caplog.clear()
    deliveries = shop.bus.tables.deliveries
    with engine.begin() as connection:
        assert shop.store.requeue(connection, ids[:1]) == {ids[0]}
        row = connection.execute(select(deliveries).where(deliveries.c.id == ids[0])).one()
    assert (row.attempts, row.last_error) == (0, "RuntimeError: broken for 0")
    with working(shop.bus, engine):
        eventually(lambda: len(dead(shop.bus, engine)) == len(ids))
    assert [row[2] for row in shop.runs.rows] == [1, 2, 3]
    assert "failed at attempt 1: RuntimeError: broken for 0; next try in 0.1 s" in caplog.text
    assert "failed at attempt 2: RuntimeError: broken for 0; next try in 0.4 s" in caplog.text
    assert "is dead, at attempt 3" in caplog.text
    (letter,) = (row for row in dead(shop.bus, engine) if row.id == ids[0])
    assert (letter.attempts, letter.last_error) == (3, "RuntimeError: broken for 0")


def test_from_two_sessions_at_once(engine: Engine, shop: Shop) -> None:
    """The second waits for the first, and finds nothing left to do."""
    ids = shop.bury(engine, each=2)
    shop.repaired.set()
    waiting = text("SELECT count(*) FROM pg_stat_activity WHERE :pid = ANY(pg_blocking_pids(pid))")
    with ThreadPoolExecutor(1) as pool:
        with engine.begin() as first:
            pid = first.scalar(select(func.pg_backend_pid()))
            assert shop.store.requeue(first, ids) == set(ids)
            second = pool.submit(shop.requeue, engine, ids)

            def waits() -> bool:
                with engine.connect() as connection:
                    return bool(connection.scalar(waiting, {"pid": pid}))

            eventually(waits)
        assert second.result(30) == set()
    assert shop.requeue(engine, ids) == set()  # nor is there a third time
    with working(shop.bus, engine):
        drained(shop.bus, engine)
    assert sorted(shop.runs.rows) == sorted((key, n, 1) for key in KEYS for n in range(2))
    assert not dead(shop.bus, engine)


def test_one_that_is_requeued_and_undone(engine: Engine, shop: Shop) -> None:
    """It is dead until the requeuing transaction commits."""
    ids = shop.bury(engine, each=1)
    shop.repaired.set()
    with working(shop.bus, engine):
        with engine.connect() as connection, connection.begin() as transaction:
            assert shop.store.requeue(connection, ids) == set(ids)
            publish(shop.bus, engine, "step", 1, key=KEYS[0])
            shop.runs.wait(1)
            transaction.rollback()
        drained(shop.bus, engine)
    assert shop.runs.rows == [(KEYS[0], 1, 1)]
    assert [row.id for row in dead(shop.bus, engine)] == ids
