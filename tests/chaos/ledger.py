"""Ledgers: what happened, written down by whoever did it, outside the bus.

Each process has a file of its own, to which it appends one line by one write. So a killed process
loses nothing that it has noted, and leaves at most its last line torn.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: The directory and the name of a process's ledger.
DIRECTORY_VARIABLE = "CHAOS_LEDGERS"
NAME_VARIABLE = "CHAOS_NAME"
#: The process id of whoever started it, with whom it ends.
PARENT_VARIABLE = "CHAOS_PARENT"
#: The ledger of whoever causes the faults.
CONDUCTOR = "conductor"


class Ledger:
    """The ledger of this process, to be written from any thread."""

    def __init__(self, directory: Path, name: str) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._file = os.open(_path(directory, name), flags, 0o644)
        self._pid = os.getpid()

    def note(self, what: str, **values: Any) -> float:
        """Append one line; its moment, on the clock that all processes of a machine share."""
        at = time.monotonic()
        line = json.dumps({"what": what, "at": at, "pid": self._pid, **values})
        os.write(self._file, line.encode() + b"\n")
        return at


def own_ledger() -> Ledger:
    """The one that this process was told to keep."""
    return Ledger(Path(os.environ[DIRECTORY_VARIABLE]), os.environ[NAME_VARIABLE])


def orphaned() -> bool:
    """Whether whoever started this process is gone."""
    return os.getppid() != int(os.environ[PARENT_VARIABLE])


def read(directory: Path, name: str) -> Iterator[dict[str, Any]]:
    """The lines of a ledger; nothing where there is none. A torn last line is left out."""
    path = _path(directory, name)
    if not path.exists():
        return
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield json.loads(line)


def names(directory: Path) -> list[str]:
    """Whose ledgers there are."""
    return sorted(path.stem for path in directory.glob("*.jsonl"))


def _path(directory: Path, name: str) -> Path:
    return directory / f"{name}.jsonl"
