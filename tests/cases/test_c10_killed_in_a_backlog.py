"""Workers that are killed in the middle of a long backlog.

Elsewhere a killed worker left its work marked as running, and nobody ever picked it up.

Right is: all of it is done in the end; what a dead worker held stands still for the length of a
lease and one look for work at most; no key has a gap or an inversion; and only what was started
when a worker died, as the database has it, runs again.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Self
from uuid import UUID

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from sqlalchemy_relaybus import RelayBus
from tests.support.ledger import (
    NOTE,
    Run,
    by_key,
    first_runs,
    ledger,
    overlapping,
    runs,
)
from tests.support.workers import (
    WorkerProcess,
    drained,
    eventually,
    terminated,
    worker_process,
)

APP = """
@bus.handler("step", name="one")
async def one(event: Event, context: Context):
    note("began", event, context)
    await asyncio.sleep(PAUSE)
    note("ended", event, context)

@bus.handler("step", name="two")
def two(event: Event, context: Context):
    note("began", event, context)
    time.sleep(PAUSE / 10)
    note("ended", event, context)
"""
LEASE, POLL = 3.0, 0.2
OPTIONS = (
    *("--poll-interval", "0.01", "--max-poll-interval", str(POLL)),
    *("--lease-duration", f"{LEASE:g}", "--grace", "20", "--concurrency", "20"),
)
#: What starting and scheduling processes may take beside, seconds.
SPARE = 20.0


class Workers:
    """Worker processes that are killed, and what these had started then."""

    def __init__(self, directory: Path, engine: Engine, url: str) -> None:
        self._directory = directory
        self._engine = engine
        self._url = url
        self._stack = ExitStack()
        self.in_flight: Counter[tuple[str, UUID]] = Counter()
        self.killed: list[tuple[float, set[tuple[str, UUID]]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def start(self) -> WorkerProcess:
        worker = worker_process(self._directory, *OPTIONS, url=self._url)
        return self._stack.enter_context(worker)

    def kill(self, *workers: WorkerProcess) -> None:
        with self._engine.connect() as connection:
            holders = connection.execute(
                text("SELECT holder, split_part(owner, ':', 2)::int FROM relaybus_workers")
            ).all()
        pids = {worker.process.pid for worker in workers}
        mine = [holder for holder, pid in holders if pid in pids]
        assert len(mine) == len(pids)
        for worker in workers:
            worker.signal(signal.SIGKILL)
        for worker in workers:
            assert worker.wait() == -signal.SIGKILL
        now = time.monotonic()
        # the statement that it had sent may still be at work
        eventually(lambda: not self._busy_for_the_dead())
        # what is taken over meanwhile is suspect, by the same list
        query = text(
            "SELECT d.handler, d.event_id FROM relaybus_deliveries d "
            "JOIN relaybus_lanes l ON l.lane = d.lane "
            "WHERE (l.holder = ANY(:holders) AND d.id = ANY(l.started)) OR EXISTS "
            "(SELECT FROM relaybus_suspects s WHERE s.lane = d.lane AND s.id = d.id)"
        )
        with self._engine.connect() as connection:
            started = {(row[0], row[1]) for row in connection.execute(query, {"holders": mine})}
        self.in_flight.update(started)
        self.killed.append((now, started))

    def _busy_for_the_dead(self) -> int:
        """How many statements of the processes killed have not ended.

        A server process whose client is gone ends at once, or with its statement.
        """
        query = text(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
            "AND state = 'active' AND pid <> pg_backend_pid()"
        )
        # that of the living are short: a moment without any is soon found
        with self._engine.connect() as connection:
            return connection.scalar(query) or 0


@pytest.mark.parametrize(
    ("events", "keys", "pause", "kills", "every"),
    [
        (1_200, 400, 0.3, 1, 0.0),
        pytest.param(10_000, 500, 0.7, 4, 20.0, marks=[pytest.mark.long, pytest.mark.timeout(900)]),
    ],
)
def test_everything_is_done_and_nothing_else_twice(
    tmp_path: Path,
    engine: Engine,
    database_url: str,
    events: int,
    keys: int,
    pause: float,
    kills: int,
    every: float,
) -> None:
    (tmp_path / "app.py").write_text(NOTE + f"PAUSE = {pause}\n" + APP)
    bus = RelayBus()
    bus.route("step", to=["one", "two"])
    for start in range(0, events, 500):
        with Session(engine) as session, session.begin():
            for n in range(start, min(start + 500, events)):
                bus.publish(session, "step", n, key=f"key-{n % keys}")

    def progress(by: int, *workers: WorkerProcess) -> None:
        """Wait until each of *workers* has ended so many."""
        for worker in workers:
            worker.until(lambda w=worker: ended(w) >= by, limit=60)  # type: ignore[misc]

    def ended(worker: WorkerProcess) -> int:
        time.sleep(0.1)  # there is much to read
        return sum(row.pid == worker.process.pid for row in ledger(tmp_path, "ended"))

    with Workers(tmp_path, engine, database_url) as workers:
        one, two = workers.start(), workers.start()
        for _ in range(kills):
            progress(30, one)
            time.sleep(every)
            workers.kill(one)
            one = workers.start()
        progress(30, one, two)
        workers.kill(one, two)
        one, two = workers.start(), workers.start()
        drained(bus, engine, 120 if every == 0 else 500)
        for worker in (one, two):
            assert terminated(worker) == 0

    rows = ledger(tmp_path)
    done = runs(rows)
    assert not overlapping_by_key(done)
    for (handler, key), began in by_key(row for row in rows if row.what == "began").items():
        number = int(key.removeprefix("key-"))
        assert first_runs(began) == list(range(number, events, keys)), (handler, key)
    assert len({run.began.about for run in done if run.ended}) == 2 * events
    again = Counter(run.began.about for run in done) - Counter({r.began.about for r in done})
    assert again, "nothing was in flight, so this was no test"
    assert again <= workers.in_flight, again - workers.in_flight
    for killed, started in workers.killed:
        after = [run.began for run in done if run.began.at > killed]
        assert started <= {row.about for row in after}
        # the others of it may queue behind what else there is to do
        first = min(row.at for row in after if row.about in started)
        assert first - killed < LEASE + POLL + SPARE


def overlapping_by_key(done: list[Run]) -> list[tuple[Run, Run]]:
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in done:
        groups.setdefault((run.began.handler, run.began.key), []).append(run)
    return [pair for group in groups.values() for pair in overlapping(group)]
