"""What handlers of worker processes did, in a file outside the bus.

The times are monotonic: on one machine all processes share that clock, so they can be compared.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event as Flag
from threading import Thread
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import Engine, select

from sqlalchemy_relaybus import RelayBus

#: The beginning of an application whose handlers note what they do.
NOTE = """
import asyncio, os, pathlib, time
from sqlalchemy_relaybus import Context, Event, Exponential, Fixed, NoRetry, RelayBus

bus = RelayBus()

def note(what, event, context):
    row = (what, context.handler, event.id, event.key, event.payload, context.attempt,
           context.fence, os.getpid(), time.monotonic())
    with open("ledger", "a") as file:  # one write at the end of the file: rows do not mix
        file.write(" ".join(map(str, row)) + "\\n")
"""


class Row(NamedTuple):
    """One line of the ledger."""

    what: str
    handler: str
    event: UUID
    key: str
    payload: str
    attempt: int
    fence: int
    pid: int
    at: float

    @property
    def about(self) -> tuple[str, UUID]:
        """The delivery: a handler and an event."""
        return self.handler, self.event


class Run(NamedTuple):
    """From a handler's beginning to its end; without one its process died."""

    began: Row
    ended: Row | None


def ledger(directory: Path, *what: str) -> list[Row]:
    """The rows so far, of those kinds or all, in the order in which they were written."""
    path = directory / "ledger"
    rows = []
    for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
        if line.endswith("\n"):
            kind, handler, event, key, payload, attempt, fence, pid, at = line.split()
            if not what or kind in what:
                row = (int(attempt), int(fence), int(pid), float(at))
                rows.append(Row(kind, handler, UUID(event), key, payload, *row))
    return rows


def runs(rows: Iterable[Row]) -> list[Run]:
    """Rows of the kinds began and ended, put together."""
    found: list[Run] = []
    open_: dict[tuple[object, ...], int] = {}
    for row in rows:
        run = (row.about, row.attempt, row.fence, row.pid)
        if row.what == "began":
            open_[run] = len(found)
            found.append(Run(row, None))
        elif row.what == "ended":
            found[open_[run]] = Run(found[open_[run]].began, row)
    return found


def overlapping(group: Iterable[Run]) -> list[tuple[Run, Run]]:
    """Pairs of runs of which the later began before the earlier had ended.

    One without an end counts for nothing: its process was killed.
    """
    ended = sorted((run for run in group if run.ended), key=lambda run: run.began.at)
    return [
        (one, other)
        for one, other in itertools.pairwise(ended)
        if one.ended is not None and other.began.at < one.ended.at
    ]


def by_key(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    """The rows of each handler and key, in order."""
    found: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        found[row.handler, row.key].append(row)
    return found


def first_runs(rows: Iterable[Row]) -> list[int]:
    """The payloads, which are numbers, in the order in which they came for the first time."""
    return list(dict.fromkeys(int(row.payload) for row in rows))


def left(bus: RelayBus, engine: Engine) -> set[tuple[str, UUID]]:
    """Handler and event of every delivery that is not completed, in one snapshot."""
    deliveries, parked = bus.tables.deliveries, bus.tables.parked
    query = select(deliveries.c.handler, deliveries.c.event_id).union_all(
        select(parked.c.handler, parked.c.event_id)
    )
    with engine.connect() as connection:
        return {(handler, event) for handler, event in connection.execute(query)}


@contextmanager
def steadily(action: Any, *, pause: float = 0.05) -> Iterator[Flag]:
    """Call *action* with 0, 1, 2, ... for the length of the block, or until the flag is set.

    An error of it is raised at the end.
    """
    stop = Flag()
    errors: list[BaseException] = []

    def go() -> None:
        try:
            for n in itertools.count():
                if stop.is_set():
                    return
                action(n)
                stop.wait(pause)
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    thread = Thread(target=go, name="steadily", daemon=True)
    thread.start()
    try:
        yield stop
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


def is_increasing(numbers: Sequence[int]) -> bool:
    return all(a < b for a, b in itertools.pairwise(numbers))
