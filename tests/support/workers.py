"""Running workers in tests: in a thread or as a process, and waiting for what they do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, func, or_, select, update
from sqlalchemy.orm import Session

from sqlalchemy_relaybus import Event, RelayBus
from sqlalchemy_relaybus.worker import Worker

#: Longest wait for anything, seconds: far more than it takes on a busy machine.
LIMIT = float(os.environ.get("TEST_LIMIT", 30))
#: Settings that make a worker quick to look and to notice.
QUICK: Mapping[str, Any] = {
    "poll_interval": 0.01,
    "max_poll_interval": 0.1,
    "lease_duration": 5.0,
    "grace": 10.0,
}
ROOT = Path(__file__).parents[2]


def eventually(condition: Callable[[], Any], what: object = "", limit: float = LIMIT) -> Any:
    """Wait until *condition* gives something true, and return that."""
    end = time.monotonic() + limit
    while not (found := condition()):
        if time.monotonic() > end:
            told = what() if callable(what) else what
            raise AssertionError(f"not within {limit:g} s: {told or condition}")
        time.sleep(0.01)
    return found


# -- in this process -------------------------------------------------------------------------------


class Running:
    """A worker at work in a thread."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        #: what ``run()`` returned or raised
        self.result: bool | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="worker-under-test", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self.worker.run()
        except BaseException as error:  # noqa: BLE001 - given to whoever stops it
            self.error = error

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def holder(self) -> Any:
        return self.worker._holder

    def stop(self, grace: float | None = None) -> bool | None:
        """Stop it; what ``run()`` returned."""
        self.worker.stop(grace)
        self._thread.join(LIMIT + (grace or 0))
        assert not self.alive, "the worker does not end"
        if self.error is not None:
            raise self.error
        return self.result


@contextmanager
def working(bus: RelayBus, engine: Engine, **settings: Any) -> Iterator[Running]:
    """A worker in a thread for the length of the block; it must end without an error."""
    running = Running(Worker(bus, engine, **{**QUICK, **settings}))
    try:
        yield running
    finally:
        if running.alive or running.error is not None:
            running.stop()


class Runs:
    """What handlers did, in order: outside the bus, and safe to write from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.rows: list[tuple[Any, ...]] = []

    def add(self, *row: Any) -> int:
        with self._lock:
            self.rows.append(row)
            return len(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def wait(self, count: int, limit: float = LIMIT) -> list[tuple[Any, ...]]:
        """Wait until there are *count* rows or more."""
        eventually(lambda: len(self.rows) >= count, lambda: f"{len(self)} of {count} runs", limit)
        return self.rows


def publish(
    bus: RelayBus, engine: Engine, type: str, *payloads: Any, **options: Any
) -> list[Event]:
    """Publish events in one transaction of their own."""
    with Session(engine) as session, session.begin():
        return [bus.publish(session, type, payload, **options) for payload in payloads]


def drained(bus: RelayBus, engine: Engine, limit: float = LIMIT) -> None:
    """Wait until nothing is ready and nothing will be."""
    deliveries, parked = bus.tables.deliveries, bus.tables.parked
    # in one statement: what is promoted meanwhile must not be missed in both
    query = select(
        select(func.count()).select_from(deliveries).scalar_subquery(),
        select(func.count())
        .where(or_(parked.c.available_at.is_not(None), parked.c.status == "behind"))
        .scalar_subquery(),
    )

    def left() -> tuple[int, int]:
        with engine.connect() as connection:
            ready, waiting = connection.execute(query).one()
            return ready, waiting

    eventually(lambda: left() == (0, 0), lambda: f"ready and waiting: {left()}", limit)


def ready(bus: RelayBus, engine: Engine) -> int:
    """How many deliveries are ready or running."""
    with engine.connect() as connection:
        return connection.scalar(select(func.count()).select_from(bus.tables.deliveries)) or 0


def waiting(bus: RelayBus, engine: Engine) -> int:
    """How many deliveries are parked and come back by themselves."""
    parked = bus.tables.parked
    with engine.connect() as connection:
        return (
            connection.scalar(select(func.count()).where(parked.c.available_at.is_not(None))) or 0
        )


def dead(bus: RelayBus, engine: Engine) -> list[Any]:
    """The dead letters, oldest first."""
    parked = bus.tables.parked
    with engine.connect() as connection:
        return list(
            connection.execute(
                select(parked).where(parked.c.status == "dead").order_by(parked.c.id)
            )
        )


def held_lanes(bus: RelayBus, engine: Engine, holder: Any = None) -> set[int]:
    """The lanes that somebody holds, or *holder*."""
    lanes = bus.tables.lanes
    query = select(lanes.c.lane).where(lanes.c.holder.is_not(None))
    if holder is not None:
        query = query.where(lanes.c.holder == holder)
    with engine.connect() as connection:
        return set(connection.scalars(query))


def holders(bus: RelayBus, engine: Engine) -> dict[Any, int]:
    """How many lanes each holder has."""
    lanes = bus.tables.lanes
    query = (
        select(lanes.c.holder, func.count())
        .where(lanes.c.holder.is_not(None))
        .group_by(lanes.c.holder)
    )
    with engine.connect() as connection:
        return {row[0]: row[1] for row in connection.execute(query)}


def steal(bus: RelayBus, engine: Engine, lanes: set[int], seconds: float = 60) -> None:
    """Give *lanes* to a holder that does not exist, as a takeover by a stranger would."""
    table = bus.tables.lanes
    chosen = table.c.lane.in_(lanes)
    with engine.begin() as connection:
        # which is what a completion in REPEATABLE READ would run into
        connection.execute(select(table.c.lane).where(chosen).with_for_update())
        connection.execute(
            update(table)
            .where(chosen)
            .values(
                epoch=table.c.epoch + 1,
                version=0,
                holder=func.gen_random_uuid(),
                lease_expires_at=func.clock_timestamp() + timedelta(seconds=seconds),
            )
        )


# -- as a process ----------------------------------------------------------------------------------


class WorkerProcess:
    """``python -m sqlalchemy_relaybus.worker`` with an application of the test's own."""

    def __init__(
        self,
        directory: Path,
        *arguments: str,
        app: str | None = "app:bus",
        url: str | None = None,
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.log = directory / f"worker-{len(list(directory.glob('worker-*')))}.log"
        command = [*prefix, sys.executable, "-W", "error", "-m", "sqlalchemy_relaybus.worker"]
        if app is not None:
            command += ["--app", app]
        if url is not None:
            command += ["--url", url]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *arguments],
                cwd=directory,
                env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def output(self) -> str:
        """What it has written so far."""
        return self.log.read_text(errors="replace")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, limit: float = LIMIT) -> int:
        """Wait for its end; its exit code."""
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the worker does not end:\n{self.output}") from None

    def until(self, condition: Callable[[], Any], what: object = "", limit: float = LIMIT) -> Any:
        """Wait for *condition* while the process runs."""

        def check() -> Any:
            found = condition()
            if not found and self.process.poll() is not None:
                raise AssertionError(f"the worker ended:\n{self.output}")
            return found

        return eventually(check, what or (lambda: self.output), limit)

    def until_started(self) -> None:
        """Wait until it works."""
        self.until(lambda: " runs " in self.output)

    def end(self) -> None:
        """Kill it if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@contextmanager
def worker_process(directory: Path, *arguments: str, **options: Any) -> Iterator[WorkerProcess]:
    """A worker process for the length of the block."""
    process = WorkerProcess(directory, *arguments, **options)
    try:
        yield process
    finally:
        process.end()


def terminated(process: WorkerProcess) -> int:
    """Stop *process* by SIGTERM; its exit code."""
    process.signal(signal.SIGTERM)
    return process.wait()
