"""Numbers that are given out before the commit.

Elsewhere a reader passed over a row that became visible later than rows of higher numbers; and a
scheme that was tied to transaction ids broke when the database was dumped and restored.

Right is: nothing is passed over. Publishers of one key commit one after another, those of other
keys of the lane are not held up by them, every process maps a key to the same lane, and a restored
database goes on where the dumped one was.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, func, select, text
from sqlalchemy.orm import Session

import alembic_relaybus
from sqlalchemy_relaybus import Event, RelayBus
from sqlalchemy_relaybus.lanes import lane_of
from sqlalchemy_relaybus.testing.server import PrivatePostgres, private_postgres
from tests.support.databases import SETTINGS, open_engine
from tests.support.ledger import NOTE, by_key, first_runs, ledger, left
from tests.support.stores import key_on
from tests.support.workers import (
    ROOT,
    Runs,
    dead,
    drained,
    eventually,
    held_lanes,
    publish,
    terminated,
    waiting,
    worker_process,
    working,
)

LANE = 7
ONE, TWO = key_on(LANE, 0), key_on(LANE, 1)


def waiting_for(engine: Engine, backend: int) -> int:
    """How many sessions wait for a lock of the session *backend*."""
    query = text("SELECT count(*) FROM pg_stat_activity WHERE :pid = ANY(pg_blocking_pids(pid))")
    with engine.connect() as connection:
        return connection.scalar(query, {"pid": backend}) or 0


@pytest.mark.parametrize("others", [0, 300])
def test_a_transaction_that_stays_open(engine: Engine, others: int) -> None:
    """The second of its key waits and runs after it; another key of the lane goes on meanwhile.

    So it does in any number: ids far beyond the open transaction's are claimed and completed.
    """
    bus = RelayBus()
    runs = Runs()

    @bus.handler("step", name="step")
    def step(event: Event) -> None:
        runs.add(event.key, event.payload)

    with working(bus, engine):
        with Session(engine) as first, first.begin():
            bus.publish(first, "step", "first", key=ONE)
            first.flush()  # it has its numbers and its lock
            backend = first.scalar(select(func.pg_backend_pid()))
            assert isinstance(backend, int)
            second = threading.Thread(
                target=publish, args=(bus, engine, "step", "second"), kwargs={"key": ONE}
            )
            second.start()
            eventually(lambda: waiting_for(engine, backend) == 1)
            for n in range(others + 1):
                publish(bus, engine, "step", n, key=TWO)
            runs.wait(others + 1)
            assert runs.rows == [(TWO, n) for n in range(others + 1)]
            assert waiting_for(engine, backend) == 1
            assert second.is_alive()
        second.join(30)
        assert not second.is_alive()
        runs.wait(others + 3)
        drained(bus, engine)
    assert runs.rows[others + 1 :] == [(ONE, "first"), (ONE, "second")]


PUBLISHER = """
import sys
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from sqlalchemy_relaybus import RelayBus

url, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
bus = RelayBus()
bus.route("step", to=["step"])
engine = create_engine(url)
for n in range(first, first + count):
    with Session(engine) as session, session.begin():
        for key in [*(f"key-{n}" for n in range(20)), "ключ", "鍵"]:
            bus.publish(session, "step", n, key=key)
engine.dispose()
print(hash("key"))
"""


def test_publishers_with_other_hash_seeds(
    tmp_path: Path, engine: Engine, database_url: str
) -> None:
    """Python's own hash of a text differs from process to process."""
    (tmp_path / "publisher.py").write_text(PUBLISHER)
    hashes = set()
    for number, seed in enumerate(("0", "1", "4711", "random")):
        done = subprocess.run(
            [sys.executable, "publisher.py", database_url, str(5 * number), "5"],
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed, "PATH": ""},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        hashes.add(done.stdout)
    assert len(hashes) == 4
    bus = RelayBus()
    runs = Runs()

    @bus.handler("step", name="step")
    async def step(event: Event) -> None:
        runs.add(event.key, event.payload)

    deliveries = bus.tables.deliveries
    with engine.connect() as connection:
        stored = connection.execute(select(deliveries.c.key, deliveries.c.lane).distinct()).all()
    assert len(stored) == 22
    assert all(lane == lane_of(key) for key, lane in stored)
    with working(bus, engine):
        drained(bus, engine)
    for key, _ in stored:
        assert [n for each, n in runs.rows if each == key] == list(range(20))


APP = """
@bus.handler("step", name="step")
async def step(event: Event, context: Context):
    note("ran", event, context)
    while event.key == "key-0" and not pathlib.Path("go").exists():
        await asyncio.sleep(0.01)

@bus.handler("later", name="later")
async def later(event: Event, context: Context):
    note("ran", event, context)

@bus.handler("dead", name="dead", retry=NoRetry())
async def dead(event: Event, context: Context):
    raise RuntimeError("dead")
"""
OPTIONS = (
    *("--poll-interval", "0.01", "--max-poll-interval", "0.1", "--grace", "10"),
    *("--lease-duration", "2"),
)


@pytest.fixture
def clusters() -> Iterator[tuple[PrivatePostgres, PrivatePostgres]]:
    """Two servers that have nothing to do with each other."""
    with private_postgres(SETTINGS) as old, private_postgres(SETTINGS) as new:
        yield old, new


def run(*command: object) -> None:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_dump_restored_into_a_new_cluster(
    tmp_path: Path, clusters: tuple[PrivatePostgres, PrivatePostgres]
) -> None:
    """Dumped while a worker holds lanes and runs what is in them."""
    old, new = clusters
    bus = RelayBus()
    for type in ("step", "later", "dead"):
        bus.route(type, to=[type])
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "app.py").write_text(NOTE + APP)
    url = old.create_database("shop")
    with open_engine(url) as engine:
        alembic_relaybus.migrate(engine)
        for n in range(200):
            publish(bus, engine, "step", n, key=f"key-{n % 5}")
        publish(bus, engine, "later", 0, 1, key="late", delay=1)
        publish(bus, engine, "dead", 0)
        with worker_process(tmp_path / "before", *OPTIONS, url=url) as worker:
            worker.until(lambda: len(ledger(tmp_path / "before")) >= 160)  # all but of key-0
            eventually(lambda: len(left(bus, engine)) <= 40 + 2 + 1 and dead(bus, engine))
            eventually(lambda: lane_of("key-0") in held_lanes(bus, engine))
            if waiting(bus, engine):  # it does not matter whether the delayed ones have run
                worker.until(lambda: not waiting(bus, engine))
            publish(bus, engine, "later", 2, 3, key="late", delay=3)
            dump = tmp_path / "dump.sql"
            run(
                *(old.bin("pg_dump"), "--no-owner", "-f", dump),
                "-d",
                url.replace("postgresql+psycopg", "postgresql"),
            )
            worker.end()

    restored = new.create_database("shop")
    run(
        *(new.bin("psql"), "-q", "-v", "ON_ERROR_STOP=1", "-f", dump),
        "-d",
        restored.replace("postgresql+psycopg", "postgresql"),
    )
    after = tmp_path / "after"
    (after / "go").touch()
    with open_engine(restored) as engine:
        undone = left(bus, engine)
        letters = dead(bus, engine)
        with worker_process(after, *OPTIONS, url=restored) as worker:
            added = [
                publish(bus, engine, "step", n, key=f"key-{n % 5}")[0] for n in range(200, 260)
            ]
            drained(bus, engine)
            assert terminated(worker) == 0
        assert len(dead(bus, engine)) == len(letters) == 1

    ran = ledger(after)
    expected = {about for about in undone if about[0] != "dead"}
    assert len([about for about in expected if about[0] == "step"]) == 40
    assert len([about for about in expected if about[0] == "later"]) == 2
    expected |= {("step", event.id) for event in added}
    assert [row.about for row in ran if row.about not in expected] == []
    assert {row.about for row in ran} == expected
    assert len(ran) == len(expected)
    keys = by_key(ran)
    assert first_runs(keys["step", "key-0"]) == list(range(0, 260, 5))
    for key in range(1, 5):
        assert first_runs(keys["step", f"key-{key}"]) == list(range(200 + key, 260, 5))
    assert first_runs(keys["later", "late"]) == [2, 3]
