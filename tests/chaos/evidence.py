"""The evidence: everything that is known of a run when it is over."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import Engine, func, select

from tests.chaos import ledger
from tests.chaos.app import bus
from tests.chaos.tables import effects, orders


class Published(NamedTuple):
    """An event as its publisher noted it."""

    id: UUID
    key: str | None
    type: str
    bury: bool


@dataclass
class Transaction:
    """A transaction that came as far as its commit."""

    publisher: str
    at: float
    events: list[Published]
    #: whether the commit returned; what became of it is not known otherwise
    committed: bool = False


@dataclass
class Run:
    """One run of a handler for an event."""

    event: UUID
    key: str | None
    sequence: int | None
    handler: str
    worker: str
    attempt: int
    began: float
    #: when its handler ended, or its process did
    ended: float | None = None
    #: done, failed, buried, snoozed or cancelled; none where its process died first
    outcome: str | None = None


class Fault(NamedTuple):
    """Something that was done to a worker, or to all of them; *victim* is a pattern."""

    kind: str
    victim: str
    began: float
    ended: float
    in_flight: int = 0


class Ending(NamedTuple):
    """How a process ended."""

    code: int
    began: float
    at: float


class Stored(NamedTuple):
    """An event as the bus stores it."""

    type: str
    key: str | None
    sequence: int | None


class Effect(NamedTuple):
    """A row that a transactional handler left, in the order of their numbers."""

    event: UUID
    handler: str
    worker: str


class Dead(NamedTuple):
    """A dead letter."""

    event: UUID
    handler: str
    error: str | None


@dataclass
class Evidence:
    """What the ledgers, the logs and the database say."""

    transactions: list[Transaction] = field(default_factory=list)
    dropped: set[UUID] = field(default_factory=set)
    runs: list[Run] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    endings: dict[str, Ending] = field(default_factory=dict)
    stored: dict[UUID, Stored] = field(default_factory=dict)
    orders: set[UUID] = field(default_factory=set)
    effects: list[Effect] = field(default_factory=list)
    dead: list[Dead] = field(default_factory=list)
    #: rows that should not be there any more, by table
    left: Counter[str] = field(default_factory=Counter)
    #: suspects that nobody has cleared yet; their deliveries are gone
    suspects: int = 0
    #: what workers logged, counted
    logged: Counter[str] = field(default_factory=Counter)
    #: errors in the logs that nothing explains
    errors: list[str] = field(default_factory=list)


def gather(directory: Path, engine: Engine) -> Evidence:
    """All of it, from the ledgers and logs in *directory* and the database."""
    evidence = Evidence()
    _read_conductor(evidence, directory)
    for name in ledger.names(directory):
        if name.startswith("p"):
            _read_publisher(evidence, name, ledger.read(directory, name))
        elif name.startswith("w"):
            _read_worker(evidence, name, ledger.read(directory, name))
    for log in sorted(directory.glob("*.log")):
        _read_log(evidence, log)
    _read_database(evidence, engine)
    return evidence


def _read_conductor(evidence: Evidence, directory: Path) -> None:
    for line in ledger.read(directory, ledger.CONDUCTOR):
        if line["what"] == "fault":
            evidence.faults.append(
                Fault(
                    line["kind"],
                    line["victim"],
                    line["began"],
                    line["at"],
                    line.get("in_flight", 0),
                )
            )
        elif line["what"] == "ended":
            evidence.endings[line["member"]] = Ending(line["code"], line["began"], line["at"])


def _read_publisher(evidence: Evidence, name: str, lines: Iterable[dict[str, Any]]) -> None:
    open_: dict[int, Transaction] = {}
    for line in lines:
        match line["what"]:
            case "dropped":
                evidence.dropped.update(map(UUID, line["events"]))
            case "committing":
                events = [Published(UUID(id), *rest) for id, *rest in line["events"]]
                transaction = Transaction(name, line["at"], events)
                open_[line["transaction"]] = transaction
                evidence.transactions.append(transaction)
            case "committed":
                open_[line["transaction"]].committed = True


def _read_worker(evidence: Evidence, name: str, lines: Iterable[dict[str, Any]]) -> None:
    runs: dict[int, Run] = {}
    for line in lines:
        match line["what"]:
            case "begin":
                runs[line["run"]] = Run(
                    UUID(line["event"]),
                    line["key"],
                    line["sequence"],
                    line["handler"],
                    name,
                    line["attempt"],
                    line["at"],
                )
            case "end":
                run = runs[line["run"]]
                run.ended, run.outcome = line["at"], line["outcome"]
            case "stalled":
                evidence.faults.append(Fault("stall", name, line["since"], line["at"]))
    for run in runs.values():
        if run.ended is None and name in evidence.endings:
            run.ended = evidence.endings[name].at
    evidence.runs += runs.values()


#: What is counted in the logs of workers.
_LOGGED = {
    "takeovers": re.compile(r"took over lane"),
    "leases_lost": re.compile(r"lost the lease on lane"),
    "writes_refused": re.compile(r"its outcome was refused"),
    "reconnections": re.compile(r"reached the database again"),
}
_ERROR = re.compile(r"^\S+ \S+ (ERROR|CRITICAL) |^Traceback")
#: What ends a worker is judged by its exit code. Dead letters are told as errors, with a traceback;
#: whether there may be any is judged elsewhere.
_EXPECTED = re.compile(
    r" is dead, at attempt \d+: this one is not wanted"
    r"|stopping without the database"
)


def _read_log(evidence: Evidence, log: Path) -> None:
    explained = False
    with log.open(errors="replace") as lines:
        for line in lines:
            for what, pattern in _LOGGED.items():
                evidence.logged[what] += bool(pattern.search(line))
            if not _ERROR.search(line):
                continue
            if _EXPECTED.search(line):
                explained = True
            elif not (explained and line.startswith("Traceback")):
                explained = False
                evidence.errors.append(f"{log.stem}: {line.rstrip()}")


def _read_database(evidence: Evidence, engine: Engine) -> None:
    tables = bus.tables
    events, parked = tables.events, tables.parked
    with engine.connect() as connection:
        for id, *rest in connection.execute(
            select(events.c.id, events.c.type, events.c.key, events.c.sequence)
        ):
            evidence.stored[id] = Stored(*rest)
        evidence.orders = set(connection.scalars(select(orders.c.event_id)))
        evidence.effects = [
            Effect(*row)
            for row in connection.execute(
                select(effects.c.event_id, effects.c.handler, effects.c.worker).order_by(
                    effects.c.n
                )
            )
        ]
        is_dead = parked.c.status == "dead"
        evidence.dead = [
            Dead(*row)
            for row in connection.execute(
                select(parked.c.event_id, parked.c.handler, parked.c.last_error).where(is_dead)
            )
        ]
        for name, query in {
            "deliveries": select(func.count()).select_from(tables.deliveries),
            "parked": select(func.count()).select_from(parked).where(~is_dead),
        }.items():
            evidence.left[name] = connection.scalar(query) or 0
        evidence.suspects = (
            connection.scalar(select(func.count()).select_from(tables.suspects)) or 0
        )


def group(runs: Iterable[Run]) -> dict[tuple[UUID, str], list[Run]]:
    """Runs by event and handler, each in the order in which they began."""
    groups: dict[tuple[UUID, str], list[Run]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.began):
        groups[run.event, run.handler].append(run)
    return groups
