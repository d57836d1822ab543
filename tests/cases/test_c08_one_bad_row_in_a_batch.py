"""One row of a batch that cannot be written.

Elsewhere a change of many rows in one statement met a single conflicting one, was rolled back as a
whole and tried again for ever, and everything else stood still behind it.

Right is: what is good in the batch is committed at the second try at the latest. What is not is
told, kept, and tried again at a measured pace, until it can be written.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, defaultdict
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, select, text, update

from sqlalchemy_relaybus import Bury, Context, Event, RelayBus
from sqlalchemy_relaybus.stores.base import Exchange, Exchanged
from sqlalchemy_relaybus.stores.postgresql.store import PostgreSQLStore
from tests.support.stores import key_on
from tests.support.workers import (
    LIMIT,
    Runs,
    dead,
    drained,
    eventually,
    publish,
    ready,
    steal,
    working,
)

LANES = range(10, 20)
STOLEN, LOCKED, BURIED = 10, 11, 12
EACH = 10


class Exchanges:
    """Counts the exchanges that named each finished delivery, and those that deleted it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.named: Counter[int] = Counter()
        self.deleted: set[int] = set()
        self.largest = self.calls = 0
        original = PostgreSQLStore.exchange

        def exchange(
            store: PostgreSQLStore, connection: Connection, holder: Any, request: Exchange
        ) -> Exchanged:
            ids = [delivery.id for delivery in request.finished]
            self.calls += 1
            self.named.update(ids)
            self.largest = max(self.largest, len(ids))
            reply = original(store, connection, holder, request)
            self.deleted |= reply.deleted
            return reply

        monkeypatch.setattr(PostgreSQLStore, "exchange", exchange)


def test_the_others_of_the_batch_are_completed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A lane with another epoch, a locked row, and a dead letter that the table refuses."""
    exchanges = Exchanges(monkeypatch)
    bus = RelayBus()
    runs, go = Runs(), threading.Event()

    @bus.handler("step", name="step")
    async def step(event: Event, context: Context) -> None:
        runs.add(event.payload, context.fence)
        while not go.is_set():  # they end in the same turn of the loop, or nearly
            await asyncio.sleep(0.05)
        if event.payload == [BURIED, 0]:
            raise Bury("poison")

    ids: dict[tuple[int, int], int] = {}
    deliveries, lanes = bus.tables.deliveries, bus.tables.lanes
    for lane in LANES:
        for n in range(EACH):
            publish(bus, engine, "step", [lane, n], key=key_on(lane, n))
    with engine.begin() as connection:
        connection.execute(
            text("ALTER TABLE relaybus_parked ADD CONSTRAINT no CHECK (last_error <> 'poison')")
        )
        for id, lane in connection.execute(
            select(deliveries.c.id, deliveries.c.lane).order_by(deliveries.c.id)
        ):
            ids[lane, sum(known == lane for known, _ in ids)] = id

    settings = {"lease_duration": 10.0, "completion_window": 0.25, "batch": 200}
    with working(bus, engine, **settings) as worker:
        runs.wait(len(LANES) * EACH)
        with engine.connect() as other, other.begin():
            steal(bus, engine, {STOLEN}, seconds=600)
            query = select(deliveries.c.id).where(deliveries.c.id == ids[LOCKED, 0])
            other.execute(query.with_for_update())
            go.set()
            bad = {ids[LOCKED, 0], ids[BURIED, 0], *(ids[STOLEN, n] for n in range(EACH))}
            eventually(lambda: ready(bus, engine) == len(bad), lambda: caplog.text)
            good = set(ids.values()) - bad
            assert exchanges.deleted == good
            assert exchanges.largest > EACH * (len(LANES) - 1) / 2  # or they were no batch
            assert max(exchanges.named[id] for id in good) <= 2
            # all that is wrong is told
            eventually(lambda: "could not be recorded as dead" in caplog.text)
            eventually(lambda: f"lost the lease on lane {STOLEN} " in caplog.text)
            assert "somebody else holds a lock" in caplog.text
            # and neither it nor new work makes the worker spin
            calls = exchanges.calls
            publish(bus, engine, "step", ["more", 0], key=key_on(LOCKED, 1))
            runs.wait(len(LANES) * EACH + 1)
            time.sleep(2)
            assert exchanges.calls - calls < 100
            assert caplog.text.count("could not be recorded") < 50
            assert worker.alive
        with engine.begin() as connection:
            connection.execute(text("ALTER TABLE relaybus_parked DROP CONSTRAINT no"))
            connection.execute(
                update(lanes)
                .where(lanes.c.lane == STOLEN)
                .values(lease_expires_at=text("clock_timestamp()"))
            )
        drained(bus, engine)
    (letter,) = dead(bus, engine)
    assert (letter.id, letter.last_error, letter.attempts) == (ids[BURIED, 0], "poison", 1)
    ran: dict[str, list[int]] = defaultdict(list)
    for payload, fence in runs.rows:
        ran[str(payload)].append(fence)
    for lane, n in ids:
        assert len(ran[str([lane, n])]) == (2 if lane == STOLEN else 1)


def test_a_batch_of_dead_letters_with_one_that_is_refused(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    bus = RelayBus()
    go = threading.Event()
    runs = Runs()

    @bus.handler("step", name="step")
    async def step(event: Event) -> None:
        runs.add(event.payload)
        while not go.is_set():
            await asyncio.sleep(0.05)
        raise Bury("poison" if event.payload == 7 else "bad")

    publish(bus, engine, "step", *range(20), key=None)
    with engine.begin() as connection:
        connection.execute(
            text("ALTER TABLE relaybus_parked ADD CONSTRAINT no CHECK (last_error <> 'poison')")
        )
    with working(bus, engine, lease_duration=10.0):
        runs.wait(20)
        go.set()
        eventually(lambda: len(dead(bus, engine)) == 19)
        eventually(lambda: "could not be recorded as dead" in caplog.text)
        with engine.begin() as connection:
            connection.execute(text("ALTER TABLE relaybus_parked DROP CONSTRAINT no"))
        eventually(lambda: len(dead(bus, engine)) == 20, limit=LIMIT)
        assert ready(bus, engine) == 0
    assert len(runs) == 20
