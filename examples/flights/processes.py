"""Child processes that are gone when their block ends, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

#: Where ``python -m examples...`` and ``alembic`` find what they need.
ROOT = Path(__file__).resolve().parents[2]

#: Seconds that a child may take to end once it has been asked to.
STOP_TIMEOUT = 30


class DemoError(Exception):
    """Something went wrong that makes going on pointless; the message says what."""


class Child:
    """A process started by the demo, and its log file."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log

    @property
    def pid(self) -> int:
        return self.process.pid

    def check(self) -> None:
        """Raise if the process has ended: it should run until it is stopped."""
        if self.process.poll() is not None:
            raise DemoError(f"{self.name} ended, code {self.process.returncode}\n{self.tail()}")

    def finished(self) -> bool:
        """Whether the process has ended well. Raises if it has ended otherwise."""
        if self.process.poll() == 0:
            return True
        if self.process.returncode is not None:
            raise DemoError(f"{self.name} failed, code {self.process.returncode}\n{self.tail()}")
        return False

    def tail(self) -> str:
        """The end of the log."""
        said = self.log.read_text(errors="replace").strip().splitlines()
        return "\n".join([*said[-20:], f"(all of it: {self.log})"])

    def pause(self) -> None:
        """Stop the process where it is, and return when it has stopped."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> int:
        """End the process without a warning: the exit code."""
        self.process.kill()
        return self.process.wait()

    def stop(self) -> int:
        """Ask the process to end, insist after a while: the exit code."""
        self.process.terminate()
        self.resume()
        try:
            return self.process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            return self.kill()


class Processes:
    """Starts children with a log file each; leaving the context stops those that still run."""

    def __init__(self, logs: Path, environment: Mapping[str, str]) -> None:
        self._logs = logs
        self._environment = {**os.environ, **environment}
        self._children: list[Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        running = [child for child in self._children if child.process.poll() is None]
        try:
            for child in running:  # all at once, then wait for each
                child.process.terminate()
            for child in running:
                child.stop()
        finally:  # a second Ctrl-C comes here
            for child in running:
                child.process.kill()

    def set(self, name: str, value: str) -> None:
        """Set an environment variable for what is started from now on."""
        self._environment[name] = value

    def start(self, name: str, module: str, *arguments: str, talks: bool = False) -> Child:
        """Start ``python -m module``. *talks*: its standard input and output are pipes."""
        path = self._logs / f"{name}.log"
        with path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if talks else log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C is for the demo, which then stops these
            )
        child = Child(name, process, path)
        self._children.append(child)
        return child

    def run(self, name: str, module: str, *arguments: str) -> None:
        """Run ``python -m module`` to its end, which must be a good one."""
        child = self.start(name, module, *arguments)
        child.process.wait()
        child.finished()
