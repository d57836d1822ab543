"""Processes that a test starts, reads from and stops."""

from __future__ import annotations

import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

#: How long to wait for anything, seconds: long, because it is only reached when a test fails.
PATIENCE = 60.0


class Process:
    """A running command; both of its outputs are read line by line. Killed at the end."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._popen = subprocess.Popen(
            list(command),
            cwd=cwd,
            env=None if env is None else dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._new: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            self._new.put(line.rstrip("\n"))
        self._new.put(None)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_for_line(self, text: str, patience: float = PATIENCE) -> str:
        """The next line that holds *text*."""
        while True:
            try:
                line = self._new.get(timeout=patience)
            except queue.Empty:
                raise AssertionError(f"no line with {text!r} in:\n{self.output}") from None
            if line is None:
                raise AssertionError(f"it ended without a line with {text!r}:\n{self.output}")
            self.lines.append(line)
            if text in line:
                return line

    def send(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def terminate(self) -> None:
        self.send(signal.SIGTERM)

    def wait(self, patience: float = PATIENCE) -> int:
        """Its exit code."""
        code = self._popen.wait(patience)
        self._reader.join(patience)
        while not self._new.empty():
            line = self._new.get()
            if line is not None:
                self.lines.append(line)
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._popen.poll() is None:
            self._popen.kill()
        self._popen.wait(PATIENCE)
        self._reader.join(PATIENCE)
        assert self._popen.stdout is not None
        self._popen.stdout.close()
