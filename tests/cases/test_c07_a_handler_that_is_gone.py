"""A handler that was renamed or removed while deliveries to it wait.

Elsewhere such deliveries were passed over in silence after a refactoring, or thrown away with a
line in a log.

Right is: they are kept, cost no attempt, and are told and counted. What other handlers have to do
goes on. A handler of the old name gets all of them, in order, whatever its function is called; one
of another name gets none of them.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from sqlalchemy import Engine, func, select

from sqlalchemy_relaybus import RelayBus
from tests.support.ledger import NOTE, by_key, ledger
from tests.support.workers import (
    WorkerProcess,
    eventually,
    publish,
    ready,
    terminated,
    worker_process,
)

HANDLER = """
@bus.handler("step", name="{name}", retry=Fixed(wait=0, max_attempts=2))
async def {function}(event: Event, context: Context):
    note("ran", event, context)
"""
OPTIONS = (
    *("--poll-interval", "0.01", "--max-poll-interval", "0.1", "--grace", "10"),
    # for so long a handler may be missing before its deliveries are moved out of the way
    *("--lease-duration", "1"),
)
KEYS = 5


@pytest.fixture
def bus() -> RelayBus:
    """The publisher, which knows both all the time."""
    bus = RelayBus()
    bus.route("step", to=["a", "b"])
    return bus


def deploy(directory: Path, **functions: str) -> None:
    """Write the application with these handlers, each with the name of its function."""
    code = (HANDLER.format(name=name, function=function) for name, function in functions.items())
    (directory / "app.py").write_text(NOTE + "".join(code))


def publish_steps(bus: RelayBus, engine: Engine, numbers: range) -> None:
    for key in range(KEYS):
        publish(bus, engine, "step", *(n for n in numbers if n % KEYS == key), key=f"key-{key}")


def by_status(bus: RelayBus, engine: Engine) -> dict[tuple[str, str, int], int]:
    """What an operator can count: parked deliveries by handler, status and attempts."""
    parked = bus.tables.parked
    columns = (parked.c.handler, parked.c.status, parked.c.attempts)
    with engine.connect() as connection:
        rows = connection.execute(select(*columns, func.count()).group_by(*columns))
        return {(row[0], row[1], row[2]): row[3] for row in rows}


def ran(directory: Path, handler: str) -> int:
    return sum(row.handler == handler for row in ledger(directory))


def assert_complete(directory: Path, handler: str, count: int) -> None:
    """It had every event once, at the first attempt, in the order of its key."""
    rows = [row for row in ledger(directory) if row.handler == handler]
    assert {row.attempt for row in rows} == {1}
    keys = by_key(rows)
    for key in range(KEYS):
        numbers = [int(row.payload) for row in keys[handler, f"key-{key}"]]
        assert numbers == list(range(key, count, KEYS))


@pytest.mark.parametrize(
    "seconds",
    [1, pytest.param(600, marks=[pytest.mark.long, pytest.mark.timeout(900)])],
)
def test_its_deliveries_wait_for_it(
    tmp_path: Path, bus: RelayBus, engine: Engine, database_url: str, seconds: int
) -> None:
    def aside(count: int) -> bool:
        """All that is left are so many for b, untouched."""
        counted = by_status(bus, engine)
        return counted == {("b", "unhandled", 0): count} and ready(bus, engine) == 0

    def told(worker: WorkerProcess) -> bool:
        return "deliveries aside, which wait for a worker with their handler" in worker.output

    publish_steps(bus, engine, range(100))
    deploy(tmp_path, a="a")
    with worker_process(tmp_path, *OPTIONS, url=database_url) as worker:
        worker.until(lambda: ran(tmp_path, "a") == 100)
        worker.until(lambda: aside(100))
        worker.until(lambda: told(worker))
        assert "none has b" in worker.output
        assert "WARNING" in worker.output
        time.sleep(seconds)  # while it runs nothing becomes of them
        publish_steps(bus, engine, range(100, 150))
        worker.until(lambda: ran(tmp_path, "a") == 150)
        worker.until(lambda: aside(150))
        assert terminated(worker) == 0
    assert ran(tmp_path, "b") == 0
    assert_complete(tmp_path, "a", 150)

    # another name is another handler, though the function is the old one
    deploy(tmp_path, a="a", c="b")
    with worker_process(tmp_path, *OPTIONS, url=database_url) as worker:
        worker.until_started()
        publish_steps(bus, engine, range(150, 160))
        worker.until(lambda: ran(tmp_path, "a") == 160)
        worker.until(lambda: aside(160))
        worker.until(lambda: told(worker))
        assert terminated(worker) == 0
    assert ran(tmp_path, "b") == ran(tmp_path, "c") == 0

    # the old name, on another function
    deploy(tmp_path, a="a", b="renamed")
    with worker_process(tmp_path, *OPTIONS, url=database_url) as worker:
        publish_steps(bus, engine, range(160, 200))
        worker.until(lambda: ran(tmp_path, "b") == 200, limit=60)
        eventually(lambda: not by_status(bus, engine) and ready(bus, engine) == 0)
        assert terminated(worker) == 0
    assert_complete(tmp_path, "a", 200)
    assert_complete(tmp_path, "b", 200)


def test_what_is_only_restarted_is_not_set_aside(
    tmp_path: Path, bus: RelayBus, engine: Engine, database_url: str
) -> None:
    """A missing handler is given the length of a lease to come back."""
    deploy(tmp_path, a="a")
    publish_steps(bus, engine, range(20))
    options = (*OPTIONS, "--lease-duration", "60")
    with worker_process(tmp_path, *options, url=database_url) as worker:
        worker.until(lambda: ran(tmp_path, "a") == 20)
        eventually(lambda: ready(bus, engine) == 20)
        assert terminated(worker) == 0
        assert "aside" not in worker.output
    deploy(tmp_path, a="a", b="b")
    with worker_process(tmp_path, *options, url=database_url) as worker:
        worker.until(lambda: ran(tmp_path, "b") == 20)
        assert terminated(worker) == 0
    assert by_status(bus, engine) == {}
    assert_complete(tmp_path, "b", 20)
