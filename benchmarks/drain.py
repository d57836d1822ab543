"""How fast workers drain a backlog, and what it costs the database."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, Select, create_engine, func, select, text
from sqlalchemy.orm import Session

from alembic_relaybus import migrate
from benchmarks.bus import LATE, bus
from sqlalchemy_relaybus.testing.server import PrivatePostgres

#: Settings of the server that is measured; everything else is as it comes.
SETTINGS = {"shared_buffers": "256MB", "max_wal_size": "4GB", "autovacuum": "on"}
_PUBLISH_BATCH = 500


@dataclass(frozen=True, slots=True)
class Figures:
    """What one run gave. Everything but the rate is nearly the same on any machine."""

    kind: str
    workers: int
    keys: int
    deliveries: int
    #: from the start of the workers' first claim to the last deletion
    seconds: float
    #: of write-ahead log, per published event and per delivery drained
    wal_published: float
    wal_drained: float
    #: statements that are transactions of their own, or transactions, per delivery drained
    transactions: float
    #: share of the updates of lanes that wrote no index
    hot: float
    #: missing, or handled more than once: a run with any is worth nothing
    wrong: int

    @property
    def rate(self) -> float:
        """Deliveries a second."""
        return self.deliveries / self.seconds


def drain(
    server: PrivatePostgres,
    *,
    kind: str,
    events: int,
    workers: int,
    keys: int,
    told: Callable[[str], object],
) -> Figures:
    """Publish *events* (on so many *keys*; 0: without), then let *workers* processes drain them."""
    url = server.create_database(f"drain_{time.monotonic_ns()}")
    engine = create_engine(url)
    migrate(engine)
    told("publishing")
    before = _wal(engine)
    ids = _publish(engine, kind, events, keys)
    published = _wal(engine) - before
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE"))
    told("draining")
    before, transactions = _wal(engine), _transactions(engine)
    with tempfile.TemporaryDirectory() as ledgers:
        seconds = _work(engine, url, workers, ledgers)
        drained = _wal(engine) - before
        handled = _handled(Path(ledgers))
    transactions = _transactions(engine) - transactions
    updates, hot = _lane_updates(engine)
    engine.dispose()
    wrong = sum(handled[id] != 1 for id in ids) + sum(id not in ids for id in handled)
    return Figures(
        kind,
        workers,
        keys,
        events,
        seconds,
        published / events,
        drained / events,
        transactions / events,
        hot / updates if updates else 1.0,
        wrong,
    )


def _publish(engine: Engine, kind: str, events: int, keys: int) -> set[str]:
    ids = set()
    for start in range(0, events, _PUBLISH_BATCH):
        with Session(engine) as session, session.begin():
            for n in range(start, min(events, start + _PUBLISH_BATCH)):
                payload = {"n": n, "text": "x" * 100}
                key = f"key-{n % keys}" if keys else None
                ids.add(str(bus.publish(session, kind, payload, key=key).id))
    return ids


def _work(engine: Engine, url: str, workers: int, ledgers: str) -> float:
    command = [sys.executable, "-m", "sqlalchemy_relaybus.worker", "--log-level", "error"]
    command += ["--app", "benchmarks.bus:bus", "--url", url]
    environment = {**os.environ, "BENCHMARK_LEDGERS": ledgers}
    deliveries = select(func.count()).select_from(bus.tables.deliveries)
    processes = [subprocess.Popen(command, env=environment) for _ in range(workers)]
    try:
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            whole = _count(connection, deliveries)
            while _count(connection, deliveries) == whole:
                time.sleep(0.002)
            began = time.monotonic()
            while _count(connection, deliveries):
                time.sleep(0.01)
            seconds = time.monotonic() - began
            time.sleep(LATE)
            return seconds
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait(60)


def _count(connection: Connection, query: Select[Any]) -> int:
    return int(connection.scalar(query) or 0)


def _handled(ledgers: Path) -> Counter[str]:
    handled: Counter[str] = Counter()
    for file in ledgers.iterdir():
        handled.update(file.read_text().splitlines())
    return handled


def _wal(engine: Engine) -> int:
    with engine.connect() as connection:
        query = text("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')")
        return int(connection.scalar(query) or 0)


def _transactions(engine: Engine) -> int:
    with engine.connect() as connection:
        query = text("SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()")
        return int(connection.scalar(query) or 0)


def _lane_updates(engine: Engine) -> tuple[int, int]:
    with engine.connect() as connection:
        query = text(
            "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables "
            "WHERE relname = 'relaybus_lanes'"
        )
        updates, hot = connection.execute(query).one()
        return updates, hot
