"""The processes of a run: publishers, and workers in places that never stay empty."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import make_url

from tests.chaos.app import BEAT_VARIABLE, URL_VARIABLE
from tests.chaos.ledger import DIRECTORY_VARIABLE, NAME_VARIABLE, PARENT_VARIABLE, Ledger
from tests.support.workers import ROOT

#: Seconds: what a dead worker's lanes wait for.
LEASE = 2.5
#: How long a process may take to end once it is asked to, seconds.
PATIENCE = 30.0
_SETTINGS = (
    *("--lease-duration", f"{LEASE:g}", "--grace", "10"),
    *("--poll-interval", "0.02", "--max-poll-interval", "0.5"),
    *("--concurrency", "32", "--prefetch", "32", "--threads", "8", "--pool-size", "8"),
)


class Member:
    """A process of the fleet, and its log."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log
        self.began = time.monotonic()
        self._works = False
        #: something is being done to it, so nothing else is
        self.busy = False

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def works(self) -> bool:
        """Whether it is a worker that has come so far as to heed signals."""
        if not self._works:
            self._works = b" runs " in self.log.read_bytes()
        return self._works and self.alive

    def pause(self) -> None:
        """Stop the process where it is, and return when it has stopped."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)


class Fleet:
    """Starts processes in *directory*, and another worker in the place of each that ended.

    *worker_urls*, *publisher_urls*: how the one in each place reaches the database.
    """

    def __init__(
        self,
        directory: Path,
        ledger: Ledger,
        worker_urls: list[str],
        publisher_urls: list[str],
        seed: int,
    ) -> None:
        self._directory = directory
        self._ledger = ledger
        self._worker_urls = worker_urls
        self._publisher_urls = publisher_urls
        self._seed = seed
        self._generations = [0] * len(worker_urls)
        self.workers: list[Member] = []
        self.publishers: list[Member] = []

    def start(self, rate: float) -> None:
        """Start all; each publisher commits *rate* transactions a second."""
        self.workers = [self._start_worker(place) for place in range(len(self._worker_urls))]
        for number, unnamed in enumerate(self._publisher_urls):
            name = f"p{number}"
            url = _named(unnamed, name)
            arguments = ["--url", url, "--seed", self._seed, "--number", number, "--rate", rate]
            self.publishers.append(self._start(name, url, "tests.chaos.load", *arguments))

    @property
    def complete(self) -> bool:
        """Whether every worker works."""
        return all(worker.works for worker in self.workers)

    def tend(self) -> None:
        """Note which workers have ended, and start others in their places."""
        for place, worker in enumerate(self.workers):
            if not worker.alive:
                self._note_end(worker)
                self.workers[place] = self._start_worker(place)

    def stop_publishers(self) -> None:
        self._stop(self.publishers)

    def stop_workers(self) -> None:
        self._stop(self.workers)

    def end(self) -> None:
        """Kill whatever runs."""
        for member in (*self.workers, *self.publishers):
            if member.alive:
                member.process.kill()
            member.process.wait()

    def _stop(self, members: list[Member]) -> None:
        for member in members:
            member.process.terminate()
        for member in members:
            try:
                member.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait()
            self._note_end(member)

    def _note_end(self, member: Member) -> None:
        code = member.process.returncode
        self._ledger.note("ended", member=member.name, code=code, began=member.began)

    def _start_worker(self, place: int) -> Member:
        name = f"w{place}.{self._generations[place]}"
        self._generations[place] += 1
        url = _named(self._worker_urls[place], name)
        arguments = ["--app", "tests.chaos.app:bus", "--url", url, "--owner", name, *_SETTINGS]
        module = "sqlalchemy_relaybus.worker"
        return self._start(name, url, module, *arguments, **{BEAT_VARIABLE: "1"})

    def _start(
        self, name: str, url: str, module: str, *arguments: object, **variables: str
    ) -> Member:
        own = {
            DIRECTORY_VARIABLE: str(self._directory),
            NAME_VARIABLE: name,
            PARENT_VARIABLE: str(os.getpid()),
            URL_VARIABLE: url,
            **variables,
        }
        log = self._directory / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, arguments)],
                cwd=ROOT,
                env={**os.environ, **own},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # a Ctrl-C is for the run, which then ends these
            )
        return Member(name, process, log)


def _named(url: str, name: str) -> str:
    """*url* with connections that the server lists under *name*."""
    named = make_url(url).update_query_dict({"application_name": name})
    return named.render_as_string(hide_password=False)


@contextmanager
def fleet(
    directory: Path, ledger: Ledger, worker_urls: list[str], publisher_urls: list[str], seed: int
) -> Iterator[Fleet]:
    """A fleet for the length of the block."""
    fleet = Fleet(directory, ledger, worker_urls, publisher_urls, seed)
    try:
        yield fleet
    finally:
        fleet.end()
