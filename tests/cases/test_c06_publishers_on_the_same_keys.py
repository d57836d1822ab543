"""Many transactions that publish on the same keys, each in another order.

Elsewhere transactions that touched the same shared rows in different orders were ended by the
database as victims of a deadlock.

Right is: what a transaction publishes in one flush locks the counters of its keys in one order
that is the same for all, whatever the order of the calls. So there is no deadlock at all, every
event is there, and the order of a key is the order of the commits, by the database's own record
of these.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
from sqlalchemy import Engine, create_engine, func, select, text
from sqlalchemy.orm import Session

import alembic_relaybus
from sqlalchemy_relaybus import Event, RelayBus
from sqlalchemy_relaybus.testing.server import private_postgres
from tests.support.databases import SETTINGS
from tests.support.workers import Runs, drained, working

THREADS = 40
KEYS = [f"key-{n}" for n in range(20)]


@pytest.fixture
def recording() -> Iterator[Engine]:
    """A database on a server that records when transactions committed."""
    with private_postgres({**SETTINGS, "track_commit_timestamp": "on"}) as server:
        url = server.create_database("shop")
        engine = create_engine(url, pool_size=THREADS, max_overflow=5)
        try:
            alembic_relaybus.migrate(engine)
            yield engine
        finally:
            engine.dispose()


@pytest.mark.parametrize(
    "transactions",
    [1_200, pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.timeout(500)])],
)
def test_no_deadlock_and_the_order_of_the_commits(recording: Engine, transactions: int) -> None:
    bus = RelayBus()
    ran = Runs()

    @bus.handler("step", name="step")
    async def step(event: Event) -> None:
        ran.add(event.key, event.sequence)

    start = threading.Barrier(THREADS)

    def publisher(number: int) -> list[str]:
        chance = Random(number)
        used: list[str] = []
        start.wait(60)
        for each in range(transactions // THREADS):
            keys = chance.sample(KEYS, 5)
            with Session(recording) as session, session.begin():
                for key in keys:
                    bus.publish(session, "step", [number, each], key=key)
            used += keys
        return used

    with ThreadPoolExecutor(THREADS) as pool:
        published = Counter(itertools.chain.from_iterable(pool.map(publisher, range(THREADS))))

    events, deliveries = bus.tables.events, bus.tables.deliveries
    with recording.connect() as connection:
        stored = connection.execute(
            select(
                events.c.key,
                events.c.sequence,
                deliveries.c.id,
                func.pg_xact_commit_timestamp(text("relaybus_events.xmin")),
            )
            .join(deliveries, deliveries.c.event_id == events.c.id)
            .order_by(events.c.key, events.c.sequence)
        ).all()
        deadlocks = connection.scalar(
            text("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
        )
    assert deadlocks == 0
    assert sum(published.values()) == 5 * transactions
    assert Counter(row[0] for row in stored) == published
    order: dict[str, list[int]] = defaultdict(list)
    for one, other in itertools.pairwise(stored):
        if one[0] == other[0]:
            assert other[1] == one[1] + 1
            assert one[2] < other[2]
            assert one[3] <= other[3], (one, other)
    for key, sequence, *_ in stored:
        order[key].append(sequence)

    with working(bus, recording):
        drained(bus, recording, 120)
    handled: dict[str, list[int]] = defaultdict(list)
    for key, sequence in ran.rows:
        handled[key].append(sequence)
    assert handled == order
