"""A stop while a handler is stuck, where the worker is process 1 of its container.

Elsewhere the stop waited for ever for a call that never returned; and in a container the signal was
ignored altogether, because the kernel gives process 1 none that it has no handler for.

Right is: nothing new after the first signal, what runs may end, the process is gone within its
grace, its lanes are free at once, and what was stuck runs again elsewhere, uncharged.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from sqlalchemy_relaybus import RelayBus
from tests.support.workers import (
    ROOT,
    WorkerProcess,
    drained,
    eventually,
    held_lanes,
    publish,
    ready,
    worker_process,
)

APP = """
import asyncio, os, pathlib, socket, threading, time
from sqlalchemy_relaybus import Context, Event, RelayBus

bus = RelayBus()

def note(*what):
    with open("ledger", "a") as file:
        file.write(" ".join(map(str, (*what, os.getpid()))) + "\\n")

def silent():
    return "127.0.0.1", int(os.environ["SILENT"])

@bus.handler("plain", name="plain")
def plain(event: Event, context: Context):
    with socket.create_connection(silent()) as connection:
        note("stuck", context.attempt)
        connection.recv(1)

@bus.handler("coroutine", name="coroutine")
async def coroutine(event: Event, context: Context):
    reader, writer = await asyncio.open_connection(*silent())
    note("stuck", context.attempt)
    try:
        await reader.read(1)
    finally:
        writer.close()

@bus.handler("blocking", name="blocking")
async def blocking(event: Event, context: Context):
    plain(event, context)

@bus.handler("quick", name="quick")
def quick(event: Event):
    note("quick", event.payload)

@bus.handler("slow", name="slow")
def slow(event: Event):
    note("began")
    while not pathlib.Path("finish").exists():
        time.sleep(0.01)
    note("ended")

@bus.handler("thread", name="thread")
def thread(event: Event):
    threading.Thread(target=time.sleep, args=(600,), daemon=False).start()
    note("thread")
"""
GRACE = 3.0
#: A loop that is blocked cannot be closed; a second after its grace the process ends without that.
SPARE = 2.0
OPTIONS = (
    *("--poll-interval", "0.01", "--max-poll-interval", "0.1", "--grace", f"{GRACE:g}"),
    # longer than anything here is waited for: no lane comes free by itself
    *("--lease-duration", "120", "--lane-linger", "60"),
)
UNSHARE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")

#: Stops at the import of the module that STOP_AT names, until there is a file "go".
SITECUSTOMIZE = """
import os, pathlib, sys, time

class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ.get("STOP_AT"):
            sys.meta_path.remove(self)
            pathlib.Path("importing").touch()
            while not os.path.exists("go"):
                time.sleep(0.01)

sys.meta_path.insert(0, Stop())
"""


@pytest.fixture(scope="module", autouse=True)
def namespaces() -> None:
    """Skip where no process namespace can be made; but not in the build, which must see these."""
    try:
        done = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, timeout=30)
        problem = done.stderr.strip() if done.returncode else ""
    except FileNotFoundError as error:
        problem = str(error)
    if problem:
        if os.environ.get("CI"):
            pytest.fail(f"no process namespace can be made here: {problem}")
        pytest.skip(f"no process namespace can be made here: {problem}")


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of a service that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=10) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


@pytest.fixture
def bus() -> RelayBus:
    """A publisher's bus: the events of the application."""
    bus = RelayBus()
    for name in ("plain", "coroutine", "blocking", "quick", "slow", "thread"):
        bus.route(name, to=[name])
    return bus


class First(WorkerProcess):
    """A worker that is process 1; signals come from outside its namespace, as a container's do."""

    def __init__(self, directory: Path, *arguments: str, **options: Any) -> None:
        super().__init__(directory, *arguments, **options, prefix=UNSHARE)
        parent = self.process.pid
        children = Path(f"/proc/{parent}/task/{parent}/children")
        self.pid = int(self.until(lambda: children.read_text().split())[0])

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def begin_stop(self) -> float:
        """The first signal, noted by the worker; when it was sent."""

        def threads() -> set[str]:
            return set(os.listdir(f"/proc/{self.pid}/task"))

        before = threads()
        began = time.monotonic()
        self.signal(signal.SIGTERM)
        # The thread that passes the stop on has done so when it ends. Nothing else to be seen from
        # outside tells the moment from which nothing more is begun.
        self.until(lambda: before - threads())
        return began


@contextmanager
def first(directory: Path, *arguments: str, **options: Any) -> Iterator[First]:
    process = First(directory, *arguments, **options)
    try:
        yield process
    finally:
        process.end()


def noted(directory: Path, *what: object) -> list[str]:
    """The lines of the ledger that begin so."""
    path = directory / "ledger"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if line.startswith(" ".join(map(str, what)))]


# -- a stuck handler -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stuck", "code"),
    [
        ("plain", 3),
        ("coroutine", 0),  # it is cancelled, and so has ended
        ("blocking", 3),  # a coroutine that blocks its loop: nothing can be cancelled
    ],
)
def test_it_is_gone_within_its_grace_and_another_goes_on(
    app: Path,
    bus: RelayBus,
    engine: Engine,
    database_url: str,
    silent: int,
    stuck: str,
    code: int,
) -> None:
    environment = {"SILENT": str(silent)}
    publish(bus, engine, stuck, {})
    publish(bus, engine, "slow", {})
    with first(app, *OPTIONS, url=database_url, environment=environment) as one:
        one.until(lambda: noted(app, "stuck") and noted(app, "began"))
        publish(bus, engine, "quick", "before")
        one.until(lambda: noted(app, "quick before 1"))
        began = one.begin_stop()
        publish(bus, engine, "quick", "after")
        (app / "finish").touch()
        assert one.wait() == code
        assert time.monotonic() - began < GRACE + SPARE, one.output
        assert "Traceback" not in one.output
    assert noted(app, "ended 1")  # what could end has, and is completed
    assert ready(bus, engine) == 2
    assert not noted(app, "quick after")
    assert not held_lanes(bus, engine)
    assert noted(app, "stuck") == ["stuck 1 1"]
    with worker_process(app, *OPTIONS, url=database_url, environment=environment) as two:
        two.until(lambda: noted(app, "quick after") and noted(app, "stuck")[1:])
        assert noted(app, "stuck")[1] == f"stuck 1 {two.process.pid}"  # its first attempt still


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(
    app: Path,
    bus: RelayBus,
    engine: Engine,
    database_url: str,
    silent: int,
    number: signal.Signals,
) -> None:
    publish(bus, engine, "plain", {})
    options = (*OPTIONS, "--grace", "100")
    with first(app, *options, url=database_url, environment={"SILENT": str(silent)}) as one:
        one.until(lambda: noted(app, "stuck"))
        one.begin_stop()
        one.signal(number)
        assert one.wait(10) == 128 + number


def test_a_thread_that_a_handler_left(
    app: Path, bus: RelayBus, engine: Engine, database_url: str
) -> None:
    """It is no daemon, so Python itself would wait for it."""
    publish(bus, engine, "thread", {})
    with first(app, *OPTIONS, url=database_url) as one:
        one.until(lambda: noted(app, "thread 1"))
        drained(bus, engine)
        one.signal(signal.SIGTERM)
        assert one.wait(10) == 0
    assert not held_lanes(bus, engine)


# -- before it works -------------------------------------------------------------------------------


def imports(directory: Path, module: str, url: str) -> First:
    """Process 1, at the import of *module*."""
    (directory / "sitecustomize.py").write_text(SITECUSTOMIZE)
    path = f"{directory}{os.pathsep}{ROOT}"
    one = First(directory, url=url, environment={"PYTHONPATH": path, "STOP_AT": module})
    one.until((directory / "importing").exists)
    return one


def test_during_the_import_of_the_application(app: Path, database_url: str) -> None:
    one = imports(app, "app", database_url)
    try:
        one.signal(signal.SIGTERM)
        assert one.wait(10) == 128 + signal.SIGTERM
    finally:
        one.end()


@pytest.mark.parametrize("module", ["sqlalchemy", "click"])
def test_during_the_import_of_the_library(app: Path, database_url: str, module: str) -> None:
    one = imports(app, module, database_url)
    try:
        one.signal(signal.SIGTERM)
        (app / "go").touch()
        eventually(lambda: one.process.poll() is not None or " runs " in one.output)
        assert one.process.poll() == 128 + signal.SIGTERM
    finally:
        one.end()


def test_while_the_database_does_not_answer(app: Path, silent: int) -> None:
    """The application is loaded, and the first connection hangs."""
    url = f"postgresql+psycopg://u@127.0.0.1:{silent}/d"
    with first(app, *OPTIONS, "--grace", "1", url=url) as one:
        connections = Path("/proc/net/tcp")
        port = f":{silent:04X} "
        # its end and ours of a connection that is established, beside the listener
        one.until(lambda: connections.read_text().count(port) > 1)
        one.signal(signal.SIGTERM)
        began = time.monotonic()
        assert one.wait(10) == 3
        assert time.monotonic() - began < 4


def test_the_same_again_without_a_signal_works(
    app: Path, bus: RelayBus, engine: Engine, database_url: str
) -> None:
    """So that the tests above end for the reason that they give."""
    one = imports(app, "app", database_url)
    try:
        (app / "go").touch()
        publish(bus, engine, "quick", "now")
        one.until(lambda: noted(app, "quick now 1"))
        one.signal(signal.SIGTERM)
        assert one.wait(10) == 0
    finally:
        one.end()
