"""A transactional handler that is stopped half-way.

Elsewhere a handler that was aborted counted as one that had returned, so the first half of what it
had written was committed.

Right is: what it wrote and its completion are all there, or nothing of them is; whether the worker
is stopped or killed, the handler's time is up, or its lane has changed hands. A commit or a
rollback of its own is an error that is told, and keeps nothing.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from sqlalchemy import Engine, text, update
from sqlalchemy.orm import Session

from sqlalchemy_relaybus import Context, Event, NoRetry, RelayBus
from tests.support.ledger import NOTE, ledger
from tests.support.workers import (
    WorkerProcess,
    dead,
    drained,
    eventually,
    held_lanes,
    publish,
    ready,
    steal,
    terminated,
    worker_process,
    working,
)

APP = """
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

INSERT = text("INSERT INTO effects VALUES (:row, :attempt, :fence)")
LIMIT = float(os.environ.get("LIMIT", "0")) or None

def row(number, context):
    return INSERT, {"row": number, "attempt": context.attempt, "fence": context.fence}

def wait(context):
    return not pathlib.Path(f"go-{context.fence}-{context.attempt}").exists()

@bus.handler("plain", name="plain", mode="transactional", timeout=LIMIT, retry=Fixed(wait=0))
def plain(event: Event, context: Context, session: Session):
    session.execute(*row(1, context))
    note("first", event, context)
    while wait(context):
        time.sleep(0.01)
    session.execute(*row(2, context))
    note("second", event, context)

@bus.handler("coroutine", name="coroutine", mode="transactional", timeout=LIMIT,
             retry=Fixed(wait=0))
async def coroutine(event: Event, context: Context, session: AsyncSession):
    await session.execute(*row(1, context))
    note("first", event, context)
    while wait(context):
        await asyncio.sleep(0.01)
    await session.execute(*row(2, context))
    note("second", event, context)
"""
OPTIONS = (
    *("--poll-interval", "0.01", "--max-poll-interval", "0.1"),
    *("--lease-duration", "2", "--grace", "2"),
)


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(NOTE + APP)
    return tmp_path


@pytest.fixture
def effects(engine: Engine) -> Engine:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE effects (n int, attempt int, fence int)"))
    return engine


@pytest.fixture
def bus() -> RelayBus:
    bus = RelayBus()
    for type in ("plain", "coroutine"):
        bus.route(type, to=[type])
    return bus


def written(engine: Engine) -> list[tuple[int, int, int]]:
    """Row, attempt and fence of what is committed."""
    with engine.connect() as connection:
        query = text("SELECT n, attempt, fence FROM effects ORDER BY fence, attempt, n")
        return [(n, attempt, fence) for n, attempt, fence in connection.execute(query)]


def in_transaction(engine: Engine) -> int:
    """How many sessions are in a transaction and wait for their client."""
    query = text(
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE datname = current_database() AND state LIKE 'idle in transaction%'"
    )
    with engine.connect() as connection:
        return connection.scalar(query) or 0


def go(app: Path, fence: int, attempt: int = 1) -> None:
    (app / f"go-{fence}-{attempt}").touch()


def halfway(app: Path, bus: RelayBus, engine: Engine, worker: WorkerProcess, kind: str) -> None:
    publish(bus, engine, kind, 1, key="k")
    worker.until(lambda: ledger(app, "first"))
    assert in_transaction(engine) == 1
    assert written(engine) == []


def assert_nothing(bus: RelayBus, engine: Engine) -> None:
    """It is as if it had never begun."""
    eventually(lambda: in_transaction(engine) == 0)
    assert written(engine) == []
    assert ready(bus, engine) == 1


def assert_done_by_another(app: Path, bus: RelayBus, engine: Engine, url: str) -> None:
    """The next worker does all of it, once, as the first attempt that it is."""
    go(app, 2)
    with worker_process(app, *OPTIONS, url=url) as worker:
        worker.until(lambda: ledger(app, "second"))
        drained(bus, engine)
        assert terminated(worker) == 0
    assert written(engine) == [(1, 1, 2), (2, 1, 2)]
    assert not dead(bus, engine)


@pytest.mark.parametrize(
    ("kind", "number", "code"),
    [
        ("plain", signal.SIGTERM, 3),  # left behind in its thread
        ("coroutine", signal.SIGTERM, 0),  # cancelled, and so has ended
        ("plain", signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_the_worker_is_stopped_or_killed(
    app: Path,
    bus: RelayBus,
    effects: Engine,
    database_url: str,
    kind: str,
    number: signal.Signals,
    code: int,
) -> None:
    with worker_process(app, *OPTIONS, url=database_url) as worker:
        halfway(app, bus, effects, worker, kind)
        worker.signal(number)
        assert worker.wait() == code
        assert "Traceback" not in worker.output
    assert_nothing(bus, effects)
    assert_done_by_another(app, bus, effects, database_url)


@pytest.mark.parametrize("kind", ["plain", "coroutine"])
def test_its_time_is_up(
    app: Path, bus: RelayBus, effects: Engine, database_url: str, kind: str
) -> None:
    """A plain function goes on all the same; what it completes then is refused."""
    limit = {"LIMIT": "1.5"}
    go(app, 1, attempt=2)
    with worker_process(app, *OPTIONS, url=database_url, environment=limit) as worker:
        halfway(app, bus, effects, worker, kind)
        worker.until(lambda: [row.attempt for row in ledger(app, "second")] == [2])
        drained(bus, effects)
        go(app, 1)
        if kind == "plain":
            worker.until(lambda: [row.attempt for row in ledger(app, "second")] == [2, 1])
        eventually(lambda: in_transaction(effects) == 0)
        assert "ran longer than 1.5 s" in worker.output or "TimeoutError" in worker.output
        assert terminated(worker) == 0
    assert written(effects) == [(1, 2, 1), (2, 2, 1)]
    assert [row.attempt for row in ledger(app, "first")] == [1, 2]
    assert not dead(bus, effects)


@pytest.mark.parametrize("kind", ["plain", "coroutine"])
def test_its_lane_has_changed_hands(
    app: Path, bus: RelayBus, effects: Engine, database_url: str, kind: str
) -> None:
    with worker_process(app, *OPTIONS, url=database_url) as worker:
        halfway(app, bus, effects, worker, kind)
        steal(bus, effects, held_lanes(bus, effects), seconds=600)
        go(app, 1)
        worker.until(lambda: ledger(app, "second"))
        assert_nothing(bus, effects)
        worker.until(lambda: "refused" in worker.output or "lost the lease" in worker.output)
        go(app, 3)
        with effects.begin() as connection:  # the thief is gone
            connection.execute(
                update(bus.tables.lanes)
                .where(bus.tables.lanes.c.holder.is_not(None))
                .values(lease_expires_at=text("clock_timestamp()"))
            )
        drained(bus, effects)
        assert terminated(worker) == 0
    assert written(effects) == [(1, 1, 3), (2, 1, 3)]


@pytest.mark.parametrize("how", ["commit", "rollback"])
def test_it_ends_its_transaction_itself(
    effects: Engine, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    bus = RelayBus()
    insert = text("INSERT INTO effects VALUES (:n, 1, 1)")

    @bus.handler("step", name="step", mode="transactional", retry=NoRetry())
    def step(event: Event, context: Context, session: Session) -> None:
        session.execute(insert, {"n": 1})
        getattr(session, how)()
        if how == "commit":  # never reached; after a rollback SQLAlchemy itself refuses more
            session.execute(insert, {"n": 2})

    publish(bus, effects, "step", 1)
    with working(bus, effects):
        eventually(lambda: dead(bus, effects))
    assert written(effects) == []
    (letter,) = dead(bus, effects)
    assert "ended the transaction that its delivery completes in" in letter.last_error
    assert "is dead, at attempt 1" in caplog.text
