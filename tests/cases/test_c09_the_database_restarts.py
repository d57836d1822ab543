"""The database stops and comes back under running workers.

Elsewhere a worker ended then, or lived on with a listening connection that was dead, so that only
slow polling was left.

Right is: nobody has to restart a worker. It tells that it waits, at a bounded rate, listens again,
and every event is delivered. Only what was not completed at the cut may run twice.

The workers here look for work by themselves once a minute, so that what runs sooner was found
through a notification.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

import alembic_relaybus
from sqlalchemy_relaybus import RelayBus
from sqlalchemy_relaybus.testing.server import PrivatePostgres, private_postgres
from tests.support.databases import SETTINGS
from tests.support.ledger import NOTE, by_key, first_runs, is_increasing, ledger, left, steadily
from tests.support.workers import (
    WorkerProcess,
    drained,
    eventually,
    publish,
    terminated,
    worker_process,
)

APP = """
@bus.handler("step", name="step")
async def step(event: Event, context: Context):
    note("ran", event, context)

@bus.handler("held", name="held")
async def held(event: Event, context: Context):
    note("held", event, context)
    while not pathlib.Path("go").exists():
        await asyncio.sleep(0.01)
"""
POLL = 60
BACK = "reached the database again"
OPTIONS = (
    *("--poll-interval", str(POLL), "--max-poll-interval", str(POLL)),
    *("--lease-duration", "10", "--grace", "20"),
)
#: Far more than a notification takes on a busy machine, far less than the next look.
SOON = POLL / 3


@pytest.fixture
def own() -> Iterator[PrivatePostgres]:
    """A server that may be stopped; what it has committed survives that."""
    with private_postgres({**SETTINGS, "fsync": "on"}) as server:
        yield server


def listeners(engine: Engine) -> set[int]:
    """The server processes of the connections that listen."""
    query = text(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() "
        "AND query LIKE 'LISTEN %'"
    )
    with engine.connect() as connection:
        return set(connection.scalars(query))


def waits_for_a_lock(engine: Engine) -> bool:
    with engine.connect() as connection:
        query = text("SELECT count(*) FROM pg_locks WHERE NOT granted")
        return bool(connection.scalar(query))


class Cuts:
    """The server's stops, and what was completed at each."""

    def __init__(self, server: PrivatePostgres, bus: RelayBus, engine: Engine) -> None:
        self._server = server
        self._bus = bus
        self._engine = engine
        self.published: set[UUID] = set()
        self.completed: list[set[tuple[str, UUID]]] = []

    def cut(self, workers: list[WorkerProcess], away: float) -> None:
        seen = [worker.output.count("the database failed") for worker in workers]
        known = {(type, id) for id in self.published.copy() for type in ("step", "held")}
        self.completed.append(known - left(self._bus, self._engine))
        self._server.stop("immediate")
        for worker, count in zip(workers, seen, strict=True):
            worker.until(
                lambda w=worker, c=count: w.output.count("the database failed") > c  # type: ignore[misc]
            )
        time.sleep(away)
        reached = [worker.output.count(BACK) for worker in workers]
        self._server.start()
        for worker, count in zip(workers, reached, strict=True):
            worker.until(lambda w=worker, c=count: w.output.count(BACK) > c)  # type: ignore[misc]


def deliver_soon(directory: Path, bus: RelayBus, engine: Engine, worker: WorkerProcess) -> None:
    """An event that is published now is handled long before the next look for work."""
    (event,) = publish(bus, engine, "step", -1)
    worker.until(lambda: event.id in {row.event for row in ledger(directory)}, limit=SOON)


@pytest.mark.parametrize(
    ("cuts", "away"),
    [
        (2, 0.5),
        pytest.param(5, 60, marks=[pytest.mark.long, pytest.mark.timeout(900)]),
    ],
)
def test_workers_come_back_with_it(
    tmp_path: Path, own: PrivatePostgres, cuts: int, away: float
) -> None:
    (tmp_path / "app.py").write_text(NOTE + APP)
    url = own.create_database("shop")
    bus = RelayBus()
    for type in ("step", "held"):
        bus.route(type, to=[type])
    engine = create_engine(url, poolclass=NullPool)  # no connection outlives a cut
    alembic_relaybus.migrate(engine)
    cutter = Cuts(own, bus, engine)

    def load(n: int) -> None:
        try:
            for event in publish(bus, engine, "step", n, key=f"key-{n % 7}"):
                cutter.published.add(event.id)
        except DBAPIError:
            pass  # not published, or not known to be

    with (
        worker_process(tmp_path, *OPTIONS, url=url) as one,
        worker_process(tmp_path, *OPTIONS, url=url) as two,
    ):
        workers = [one, two]
        eventually(lambda: len(listeners(engine)) == 2)
        deliver_soon(tmp_path, bus, engine, one)
        with steadily(load):
            for number in range(cuts):
                (tmp_path / "go").unlink(missing_ok=True)
                (event,) = publish(bus, engine, "held", -1)
                cutter.published.add(event.id)
                one.until(lambda e=event: e.id in _ids(tmp_path, "held"))  # type: ignore[misc]
                if number % 2:
                    # not in the middle of the handler, but of the batch that completes it
                    _cut_in_a_completion(engine, event.id, tmp_path, cutter, workers, away)
                else:
                    cutter.cut(workers, away)
                (tmp_path / "go").touch()
                eventually(lambda: len(listeners(engine)) == 2)
                for worker in workers:
                    assert worker.process.poll() is None
                deliver_soon(tmp_path, bus, engine, one)
        drained(bus, engine, POLL * 1.5)

        # only the sessions that listen
        before = listeners(engine)
        with engine.connect() as connection:
            for pid in before:
                connection.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
        eventually(lambda: len(listeners(engine) - before) == 2)
        deliver_soon(tmp_path, bus, engine, two)

        for worker in workers:
            told = worker.output.count("the database failed")
            assert told < cuts * (20 + away)  # at first often, then every few seconds
            assert "Traceback" not in worker.output
            assert terminated(worker) == 0

    ran = ledger(tmp_path, "ran", "held")
    assert {row.event for row in ran} >= cutter.published
    times = Counter(row.about for row in ran)
    for about, count in times.items():
        if count > 1:
            # not completed at one cut at least for each time that it ran again
            assert count - 1 <= sum(about not in completed for completed in cutter.completed)
    for (_, key), rows in by_key(row for row in ran if row.what == "ran").items():
        if key != "None":
            assert is_increasing(first_runs(rows))


def _ids(directory: Path, what: str) -> set[UUID]:
    return {row.event for row in ledger(directory, what)}


def _cut_in_a_completion(
    engine: Engine,
    event: UUID,
    directory: Path,
    cutter: Cuts,
    workers: list[WorkerProcess],
    away: float,
) -> None:
    with engine.connect() as other:
        other.execute(
            text("SELECT FROM relaybus_deliveries WHERE event_id = :event FOR UPDATE"),
            {"event": event},
        )
        (directory / "go").touch()
        eventually(lambda: waits_for_a_lock(engine))
        cutter.cut(workers, away)
        other.invalidate()
