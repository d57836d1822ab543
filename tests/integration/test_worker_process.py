"""``python -m sqlalchemy_relaybus.worker``: signals, exit codes, crashes and start-up errors."""

from __future__ import annotations

import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, func, select, text

import alembic_relaybus
from sqlalchemy_relaybus import RelayBus
from sqlalchemy_relaybus.settings import settings
from sqlalchemy_relaybus.testing.server import PrivatePostgres, private_postgres
from tests.support.databases import SETTINGS, open_engine
from tests.support.proxy import proxy_to
from tests.support.workers import (
    WorkerProcess,
    drained,
    eventually,
    held_lanes,
    holders,
    publish,
    ready,
    terminated,
    worker_process,
)

APP = """
import asyncio, os, sys, threading, time
from sqlalchemy_relaybus import Context, Event, Fixed, NoRetry, RelayBus

bus = RelayBus()

def note(*what):
    with open("ledger", "a") as file:
        file.write(" ".join(map(str, (*what, os.getpid()))) + "\\n")

@bus.handler("quick", name="quick")
async def quick(event: Event, context: Context):
    note("quick", event.key, event.payload, context.attempt)

@bus.handler("slow", name="slow", retry=Fixed(wait=0, max_attempts=3))
async def slow(event: Event, context: Context):
    note("began", event.payload, context.attempt)
    await asyncio.sleep(event.payload)
    note("ended", event.payload, context.attempt)

@bus.handler("stuck", name="stuck")
def stuck(event: Event, context: Context):
    note("stuck", event.payload, context.attempt)
    time.sleep(600)

@bus.handler("stubborn", name="stubborn")
async def stubborn(event: Event):
    note("stubborn")
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            pass

@bus.handler("thread", name="thread")
def thread(event: Event):
    threading.Thread(target=time.sleep, args=(600,), daemon=False).start()
    note("thread")
"""

QUICK = (
    *("--poll-interval", "0.01", "--max-poll-interval", "0.1"),
    *("--lease-duration", "2", "--grace", "10"),
)


@pytest.fixture
def bus() -> RelayBus:
    """A publisher's bus: the events of the application."""
    bus = RelayBus()
    for name in ("quick", "slow", "stuck", "stubborn", "thread"):
        bus.handler(name, name=name)(lambda event: None)
    return bus


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory for a Unix socket, whose path may not be long."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="rb-") as directory:
        yield Path(directory)


def ledger(directory: Path) -> list[list[str]]:
    path = directory / "ledger"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def noted(directory: Path, *what: object) -> list[list[str]]:
    wanted = [str(word) for word in what]
    return [row for row in ledger(directory) if row[: len(wanted)] == wanted]


def listed(bus: RelayBus, engine: Engine) -> int:
    """How many workers are on the list of those alive."""
    with engine.connect() as connection:
        return connection.scalar(select(func.count()).select_from(bus.tables.workers)) or 0


def suspects(bus: RelayBus, engine: Engine) -> set[str]:
    """Which deliveries are, each as handler and payload."""
    suspects, deliveries, events = bus.tables.suspects, bus.tables.deliveries, bus.tables.events
    query = select(deliveries.c.handler + ":" + events.c.payload).where(
        deliveries.c.lane == suspects.c.lane,
        deliveries.c.id == suspects.c.id,
        deliveries.c.event_id == events.c.id,
    )
    with engine.connect() as connection:
        return set(connection.scalars(query))


# -- signals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(
    app: Path, bus: RelayBus, engine: Engine, database_url: str, number: signal.Signals
) -> None:
    publish(bus, engine, "quick", *range(20))
    with worker_process(app, *QUICK, url=database_url) as worker:
        worker.until(lambda: len(noted(app, "quick")) == 20)
        publish(bus, engine, "slow", 1)
        worker.until(lambda: noted(app, "began", 1))
        worker.signal(number)
        assert worker.wait() == 0
        assert "Traceback" not in worker.output
    assert noted(app, "ended", 1, 1)  # what ran was let end, and is completed
    assert ready(bus, engine) == 0
    assert not held_lanes(bus, engine)
    assert listed(bus, engine) == 0


def test_a_stuck_plain_handler(app: Path, bus: RelayBus, engine: Engine, database_url: str) -> None:
    """Gone within the grace, with code 3; the delivery and its lane are free for others."""
    publish(bus, engine, "stuck", 1)
    publish(bus, engine, "slow", 0.5)
    with worker_process(app, *QUICK, "--grace", "3", url=database_url) as worker:
        worker.until(lambda: noted(app, "stuck") and noted(app, "began"))
        began = time.monotonic()
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 3
        assert 1.5 < time.monotonic() - began < 3.5
        assert "1 handlers still running" in worker.output
    assert noted(app, "ended")
    assert ready(bus, engine) == 1
    assert not held_lanes(bus, engine)
    assert listed(bus, engine) == 0
    with worker_process(app, *QUICK, url=database_url) as worker:  # uncharged, and at once
        worker.until(lambda: noted(app, "stuck", 1, 1)[1:])


def test_stuck_coroutines(app: Path, bus: RelayBus, engine: Engine, database_url: str) -> None:
    """One is cancelled and given back: code 0. One that ignores that is left behind: code 3."""
    publish(bus, engine, "slow", 600)
    with worker_process(app, *QUICK, "--grace", "1", url=database_url) as worker:
        worker.until(lambda: noted(app, "began"))
        assert terminated(worker) == 0
        assert "Traceback" not in worker.output
    assert ready(bus, engine) == 1
    assert not held_lanes(bus, engine)
    publish(bus, engine, "stubborn", 1)
    with worker_process(app, *QUICK, "--grace", "1", url=database_url) as worker:
        worker.until(lambda: noted(app, "stubborn") and noted(app, "began", 600, 1)[1:])
        assert terminated(worker) == 3
        assert "Traceback" not in worker.output
    assert ready(bus, engine) == 2
    assert not held_lanes(bus, engine)


def test_a_second_signal_ends_at_once(
    app: Path, bus: RelayBus, engine: Engine, database_url: str
) -> None:
    publish(bus, engine, "stuck", 1)
    with worker_process(app, *QUICK, "--grace", "60", url=database_url) as worker:
        worker.until(lambda: noted(app, "stuck"))
        worker.signal(signal.SIGTERM)
        eventually(lambda: listed(bus, engine) == 1)
        time.sleep(0.2)
        assert worker.process.poll() is None
        worker.signal(signal.SIGINT)
        assert worker.wait(5) == 128 + signal.SIGINT


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_application_is_imported(
    tmp_path: Path, database_url: str, number: signal.Signals
) -> None:
    (tmp_path / "app.py").write_text(
        "import pathlib, time\npathlib.Path('importing').touch()\ntime.sleep(600)\n"
    )
    with worker_process(tmp_path, url=database_url) as worker:
        worker.until((tmp_path / "importing").exists)
        worker.signal(number)
        assert worker.wait(5) == 128 + number
        assert "Traceback" not in worker.output


def test_a_thread_that_a_handler_left(
    app: Path, bus: RelayBus, engine: Engine, database_url: str
) -> None:
    publish(bus, engine, "thread", 1)
    with worker_process(app, *QUICK, url=database_url) as worker:
        worker.until(lambda: noted(app, "thread"))
        drained(bus, engine)
        assert terminated(worker) == 0


# -- crashes ---------------------------------------------------------------------------------------


def test_a_killed_worker_is_replaced(
    app: Path, bus: RelayBus, engine: Engine, database_url: str
) -> None:
    """After its lease, and no attempt is counted for what it had started."""
    publish(bus, engine, "slow", 600)
    publish(bus, engine, "slow", *[0.3] * 5, key="k")
    options = (*QUICK, "--concurrency", "3")
    with worker_process(app, *options, url=database_url) as first:
        first.until(lambda: noted(app, "began", 600) and noted(app, "began", 0.3))
        first.signal(signal.SIGKILL)
        first.wait()
        killed = time.monotonic()
        with worker_process(app, *options, url=database_url) as second:
            second.until(lambda: len(noted(app, "began", 600, 1)) == 2)
            assert time.monotonic() - killed < 2 + 10
            second.until(lambda: ready(bus, engine) == 1)
            assert "took over lane" in second.output
            pid = str(second.process.pid)
    mine = [int(row[2]) for row in noted(app, "began", 0.3) if row[-1] == pid]
    assert 4 <= len(mine) <= 5
    assert set(mine) == {1}
    eventually(lambda: not suspects(bus, engine) - {"slow:600"})  # what ended is suspect no more


def test_a_kill_with_much_in_flight_slows_nothing_down(
    app: Path, bus: RelayBus, engine: Engine, database_url: str
) -> None:
    """Suspects of one crash run as everything does, all at once."""
    options = (*QUICK, "--concurrency", "200")
    publish(bus, engine, "slow", *[2] * 200)
    with worker_process(app, *options, url=database_url) as first:
        first.until(lambda: len(noted(app, "began")) == 200)
        first.signal(signal.SIGKILL)
        first.wait()
    with worker_process(app, *options, url=database_url) as second:
        second.until(lambda: len(noted(app, "ended")) == 200)
        pid = str(second.process.pid)
        eventually(lambda: not suspects(bus, engine))
    mine = [row[0] for row in ledger(app) if row[-1] == pid]
    assert mine.index("ended") >= 150  # how many had begun by then


@pytest.fixture
def own_server() -> Iterator[PrivatePostgres]:
    """A server that may be stopped."""
    with private_postgres(SETTINGS) as server:
        yield server


def test_the_database_goes_away_and_comes_back(
    app: Path, bus: RelayBus, own_server: PrivatePostgres
) -> None:
    """It is waited for, without a flood of messages, and nothing is lost."""
    url = own_server.create_database("shop")
    with open_engine(url) as engine, worker_process(app, *QUICK, "--setup", url=url) as worker:
        worker.until_started()
        sent = 0
        for how in ("immediate", "fast"):
            for _ in range(20):
                publish(bus, engine, "quick", sent, key=f"k{sent % 3}")
                sent += 1
            publish(bus, engine, "slow", 1)
            worker.until(lambda: noted(app, "began", 1))
            own_server.stop(how)
            worker.until(lambda: "the database failed" in worker.output)
            time.sleep(1)
            own_server.start()
            engine.dispose()
            expected = set(range(sent))
            worker.until(
                lambda: {int(row[2]) for row in noted(app, "quick")} == expected  # noqa: B023
            )
            drained(bus, engine)
        assert worker.output.count("the database failed") < 30
        assert "Traceback" not in worker.output
        assert terminated(worker) == 0
        assert not held_lanes(bus, engine)
    for key in range(3):
        first = dict.fromkeys(int(row[2]) for row in noted(app, "quick", f"k{key}"))
        assert list(first) == sorted(first)


def test_stopped_while_the_database_is_away(app: Path, own_server: PrivatePostgres) -> None:
    url = own_server.create_database("shop")
    with worker_process(app, *QUICK, "--grace", "2", "--setup", url=url) as worker:
        worker.until_started()
        own_server.stop("immediate")
        worker.until(lambda: "the database failed" in worker.output)
        began = time.monotonic()
        assert terminated(worker) == 3
        assert time.monotonic() - began < 5
        assert "Traceback" not in worker.output


# -- several workers -------------------------------------------------------------------------------


def test_two_processes_share_the_lanes(
    app: Path, bus: RelayBus, engine: Engine, database_url: str
) -> None:
    options = (*QUICK, "--concurrency", "20", "--prefetch", "20")
    with worker_process(app, *options, url=database_url) as first:
        for _ in range(4):
            publish(bus, engine, "slow", *[0.05] * 1_000)
        first.until(lambda: sum(holders(bus, engine).values()) > 200)
        with worker_process(app, *options, url=database_url) as second:
            second.until(
                lambda: (
                    len(shares := holders(bus, engine)) == 2
                    and all(90 <= share <= 140 for share in shares.values())
                ),
                lambda: (holders(bus, engine), ready(bus, engine)),
                15,
            )
            second.signal(signal.SIGTERM)
            assert terminated(first) == 0
            assert second.wait() == 0


def test_setup_twice_at_once(app: Path, empty_database_url: str) -> None:
    with (
        worker_process(app, "--setup", url=empty_database_url) as one,
        worker_process(app, url=empty_database_url, environment={"RELAYBUS_SETUP": "1"}) as two,
    ):
        for worker in (one, two):
            worker.until_started()
        for worker in (one, two):
            assert terminated(worker) == 0
            assert "Traceback" not in worker.output


def test_variables(app: Path, bus: RelayBus, engine: Engine, database_url: str) -> None:
    environment = {
        "RELAYBUS_APP": "app:bus",
        "RELAYBUS_URL": database_url.replace("postgresql+psycopg", "postgresql"),
        "RELAYBUS_OWNER": "the owner",
        "RELAYBUS_CONCURRENCY": "1",
        "RELAYBUS_LOG_LEVEL": "debug",
        "RELAYBUS_LISTEN": "no",
    }
    with worker_process(app, app=None, environment=environment) as worker:
        worker.until_started()
        assert "worker the owner runs quick, slow" in worker.output
        eventually(lambda: listed(bus, engine) == 1)
        with engine.connect() as connection:
            assert connection.scalar(select(bus.tables.workers.c.owner)) == "the owner"
        assert terminated(worker) == 0


# -- what is wrong at the start --------------------------------------------------------------------


def _closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


#: Nothing of what is wrong needs a database to be seen.
UNREACHABLE = f"postgresql+psycopg://u@127.0.0.1:{_closed_port()}/d"
EMPTY_BUS = "from sqlalchemy_relaybus import RelayBus\nbus = RelayBus()\n"
TWICE = (
    EMPTY_BUS
    + "@bus.handler('a', name='h')\ndef a(event): ...\n"
    + "@bus.handler('b', name='h')\ndef b(event): ...\n"
)
WRONG: dict[str, tuple[dict[str, Any], int, str]] = {
    "unknown database": ({"url": "nosuchdb://host/x"}, 1, "'nosuchdb' is no database"),
    "no url": ({"url": "just text"}, 1, "the database URL cannot be"),
    "asyncio driver": ({"url": "postgresql+asyncpg://u@h/d"}, 1, "asyncpg"),
    "unreachable": (
        {},
        1,
        "the database cannot be reached",
    ),
    "url missing": ({"url": None}, 2, "--url"),
    "app missing": ({"app": None}, 2, "--app"),
    "app without colon": ({"app": "app"}, 2, "'app' does not name a module and a bus in it"),
    "app of a wrong form": ({"app": "a-b:bus"}, 2, "'a-b:bus' does not name a module"),
    "another store": ({"url": "sqlite:///made.db"}, 1, "there is no store for 'sqlite'"),
    "another store with setup": (
        {"url": "sqlite:///made.db", "arguments": ["--setup"]},
        1,
        "the migrations know PostgreSQL, not 'sqlite'",
    ),
    "dependency missing": (
        {"source": "import json\nimport no_such_dependency\n"},
        1,
        "importing 'app' failed: ModuleNotFoundError: No module named 'no_such_dependency' (",
    ),
    "syntax": ({"source": "import json\nx = (\n"}, 1, "SyntaxError: '(' was never closed"),
    "raises": ({"source": "\nraise KeyError\n"}, 1, "'app' failed: KeyError: "),
    "module missing": ({"app": "nothere.bus:bus"}, 1, "no module 'nothere'"),
    "attribute missing": ({"app": "app:nobus"}, 1, "has no 'nobus'"),
    "not a bus": ({"app": "app:note"}, 1, "of type function, not a RelayBus"),
    "no handlers": ({"source": EMPTY_BUS}, 1, "the bus has no handlers"),
    "name twice": (
        {"source": TWICE},
        1,
        "DuplicateHandlerError: a handler named 'h'",
    ),
    "out of bounds": ({"arguments": ["--concurrency", "0"]}, 2, "concurrency"),
    "owner unprintable": ({"arguments": ["--owner", "a\tb"]}, 2, "setting owner"),
    "variable out of bounds": ({"environment": {"RELAYBUS_GRACE": "-1"}}, 2, "grace"),
    "not a number": ({"arguments": ["--lease-duration", "soon"]}, 2, "lease-duration"),
    "poll intervals": (
        {"arguments": ["--poll-interval", "5", "--max-poll-interval", "1"]},
        2,
        "max_poll_interval",
    ),
    "unknown option": ({"arguments": ["--nonsense"]}, 2, "--nonsense"),
}


@pytest.mark.parametrize("what", WRONG)
def test_one_line_says_what_is_wrong(what: str, app: Path) -> None:
    given, code, words = WRONG[what]
    if "source" in given:
        (app / "app.py").write_text(given["source"])
    with worker_process(
        app,
        *given.get("arguments", ()),
        app=given.get("app", "app:bus"),
        url=given.get("url", UNREACHABLE),
        environment=given.get("environment"),
    ) as worker:
        assert_one_line(worker, code, words)
    assert not (app / "made.db").exists()  # by SQLite, for which a connection is enough


def assert_one_line(worker: WorkerProcess, code: int, words: str) -> None:
    assert worker.wait() == code, worker.output
    assert words in worker.output
    lines = worker.output.splitlines()
    assert len(lines) == 1, worker.output
    assert lines[0].startswith("relaybus: ")
    assert "Traceback" not in worker.output


def test_a_database_without_the_tables(app: Path, empty_database_url: str) -> None:
    with worker_process(app, url=empty_database_url) as worker:
        assert_one_line(worker, 1, "relaybus migrate upgrade")


@pytest.mark.parametrize("version", [1, 99])
def test_a_database_of_another_version(
    app: Path, engine: Engine, database_url: str, version: int
) -> None:
    with engine.begin() as connection:
        connection.execute(text("UPDATE relaybus_schema_version SET version = :v"), {"v": version})
    with worker_process(app, url=database_url) as worker:
        age = "newer" if version > 2 else "older"
        assert_one_line(worker, 1, f"schema is version {version}, {age}")


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ("import json\nimport no_such_dependency\n", "app.py:2"),
        ("import json\nx = (\n", "app.py:2"),
        ("import other\n", "other.py:3"),
        # raised by the standard library, or by this one, at the instance of the application
        ("import json\n\njson.loads('{')\n", "app.py:3"),
        (TWICE, "app.py:5"),
        ("\nimport ast\nast.literal_eval('(')\n", "app.py:3"),
    ],
)
def test_what_the_application_raises_has_its_place(tmp_path: Path, source: str, place: str) -> None:
    (tmp_path / "app.py").write_text(source)
    (tmp_path / "other.py").write_text("\ndef f(x):\n    return 1 / x\n\n\nf(0)\n")
    with worker_process(tmp_path, url=UNREACHABLE) as worker:
        assert_one_line(worker, 1, f"({tmp_path / place})")
    with worker_process(tmp_path, "--log-level", "debug", url=UNREACHABLE) as worker:
        assert worker.wait() == 1
        assert worker.output.count("Traceback") == 1
        assert f"({tmp_path / place})" in worker.output.splitlines()[-1]


@pytest.mark.parametrize(
    ("target", "words"),
    [("base", "relaybus migrate upgrade --url URL'"), ("relaybus_0001", "version 1, older")],
)
def test_the_tables_go_while_it_runs(
    app: Path, engine: Engine, database_url: str, target: str, words: str
) -> None:
    """It says once what to do and ends, instead of trying again for ever."""
    with worker_process(app, *QUICK, url=database_url) as worker:
        worker.until_started()
        with engine.connect() as connection:
            alembic_relaybus.downgrade(connection, target)
        assert worker.wait() == 1
        last = worker.output.splitlines()[-1]
        assert last.startswith("relaybus: ")
        assert words in last
        assert worker.output.count("relaybus migrate upgrade") == 1
        assert "Traceback" not in worker.output


def test_setup_says_in_one_line_what_it_did(app: Path, empty_database_url: str) -> None:
    for said in ("the tables were brought to relaybus_0002", "are at relaybus_0002 already"):
        with worker_process(app, "--setup", url=empty_database_url) as worker:
            worker.until_started()
            setup, started = worker.output.splitlines()
            assert said in setup
            assert " runs " in started
            assert terminated(worker) == 0


def test_help_tells_the_variables(app: Path) -> None:
    with worker_process(app, "--help", app=None) as worker:
        assert worker.wait() == 0
        words = " ".join(worker.output.split())
    for name in ("APP", "URL", "LOG_LEVEL", *(setting.name.upper() for setting in settings())):
        assert f"[env var: RELAYBUS_{name}" in words


def test_a_network_that_swallows_everything(
    app: Path, bus: RelayBus, engine: Engine, database_url: str, short_path: Path
) -> None:
    """The pump hangs in a statement; the process is gone soon after its grace all the same."""
    with (
        proxy_to(database_url, short_path) as proxy,
        worker_process(app, *QUICK, "--grace", "1", url=proxy.url) as worker,
    ):
        publish(bus, engine, "quick", 1)
        worker.until(lambda: noted(app, "quick"))
        proxy.stall()
        began = time.monotonic()
        assert terminated(worker) == 3
        assert time.monotonic() - began < 4
        assert "does not end within its grace" in worker.output
