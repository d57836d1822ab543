"""``python -m sqlalchemy_relaybus.worker``: exit codes, settings and start-up errors."""

from __future__ import annotations

import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select, text

import alembic_relaybus
from sqlalchemy_relaybus import RelayBus
from sqlalchemy_relaybus.settings import settings
from tests.support.application import QUICK, application_bus, listed
from tests.support.workers import (
    WorkerProcess,
    eventually,
    holders,
    publish,
    ready,
    terminated,
    worker_process,
)


@pytest.fixture
def bus() -> RelayBus:
    return application_bus()


# -- signals ---------------------------------------------------------------------------------------


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


def test_a_misspelled_variable_is_told(app: Path) -> None:
    """Before what is missing for it."""
    with worker_process(app, app=None, environment={"RELAYBUS_AP": "app:bus"}) as worker:
        assert worker.wait() == 2
        told, missing = worker.output.splitlines()
    assert told == ("relaybus: ignoring unknown variables: RELAYBUS_AP (do you mean RELAYBUS_APP?)")
    assert "Missing option '--app'" in missing


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
    "unknown database": ({"url": "nosuchdb://host/x"}, 2, "there is no store for 'nosuchdb'"),
    "no url": ({"url": "just text"}, 2, "the database URL cannot be"),
    "port": ({"url": "postgresql://h:abc/d"}, 2, "the database URL cannot be read"),
    "unsupported database": ({"url": "mysql://h/d"}, 2, "works with postgresql only"),
    "psycopg2": ({"url": "postgresql+psycopg2://h/d"}, 2, "use psycopg (3), with a URL such as"),
    "asyncio driver": ({"url": "postgresql+asyncpg://u@h/d"}, 2, "asyncpg"),
    "unreachable": (
        {},
        1,
        "the database cannot be reached",
    ),
    "url missing": ({"url": None}, 2, "--url"),
    "app missing": ({"app": None}, 2, "--app"),
    "app without colon": ({"app": "app"}, 2, "'app' does not name a module and a bus in it"),
    "app of a wrong form": ({"app": "a-b:bus"}, 2, "'a-b:bus' does not name a module"),
    "another store": ({"url": "sqlite:///made.db"}, 2, "there is no store for 'sqlite'"),
    "another store with setup": (
        {"url": "sqlite:///made.db", "arguments": ["--setup"]},
        2,
        "there is no store for 'sqlite' databases",
    ),
    "dependency missing": (
        {"source": "import json\nimport no_such_dependency\n"},
        1,
        "importing 'app' failed: ModuleNotFoundError: No module named 'no_such_dependency' (",
    ),
    "syntax": ({"source": "import json\nx = (\n"}, 1, "SyntaxError: '(' was never closed"),
    "raises": ({"source": "\nraise KeyError\n"}, 1, "'app' failed: KeyError: "),
    "module missing": ({"app": "nothere.bus:bus"}, 2, "no module 'nothere'"),
    "attribute missing": ({"app": "app:nobus"}, 2, "has no 'nobus'"),
    "not a bus": ({"app": "app:note"}, 2, "of type function, not a RelayBus"),
    "no handlers": ({"source": EMPTY_BUS}, 2, "the bus has no handlers"),
    "name twice": (
        {"source": TWICE},
        1,
        "DuplicateHandlerError: a handler named 'h'",
    ),
    "out of bounds": (
        {"arguments": ["--concurrency", "0"]},
        2,
        "'0' is not a whole number from 1 to 10000",
    ),
    "owner unprintable": ({"arguments": ["--owner", "a\tb"]}, 2, "setting owner"),
    "variable out of bounds": (
        {"environment": {"RELAYBUS_GRACE": "-1"}},
        2,
        "'-1' is not a number of s",
    ),
    "not a number": (
        {"arguments": ["--lease-duration", "soon"]},
        2,
        "'soon' is not a number of seconds from 1 to 3600",
    ),
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
