"""The verdict: what the bus promises, held against the evidence, with nothing left to chance.

What a fault excuses is said here and nowhere else. A fault hits a run if it hit the run's worker
at a moment between the begin of the run and that of the next one of the same delivery (or of the
same key). It lasts from its begin until a lease after its end: a worker that could not reach the
database goes on with what it has until its leases run out, and starts nothing after.

Order and effects are excused by nothing. Permitted, and counted, are:

* **repeats**: a delivery runs again at the same attempt, if its worker was hit in between;
* **overlaps**: two runs of one handler and key at a time, in two workers, if the one that began
  first was hit, and not killed, half a lease or more before the other began: it is a zombie that
  does not know yet. (It renews when a third of its lease is over, so two thirds are left when it
  is hit.)
* **late starts**: a repeat or an overlap whose second run is the zombie's. It was allowed to start
  just before its process stood still, and starts when that is over: one run each time, at once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import pairwise
from typing import Any
from uuid import UUID

from tests.chaos.app import ECHO, HANDLERS, ORDER, RELAY, TRANSACTIONAL, echo_id, echo_key
from tests.chaos.evidence import Dead, Ending, Evidence, Fault, Published, Run, group
from tests.chaos.faults import EVERYBODY
from tests.chaos.fleet import LEASE

#: A process that stood still begins what it was just about to within this time, seconds.
WAKING = 0.5
#: Examples told of each kind of problem.
_EXAMPLES = 3
#: Faults in which a process stands still and goes on.
_STANDSTILLS = frozenset({"stop", "stall"})


@dataclass
class Verdict:
    """Problems, and what was counted on the way."""

    problems: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    figures: dict[str, Any] = field(default_factory=dict)

    def complain(self, kind: str, example: object) -> None:
        self.problems[kind].append(str(example))

    def told(self) -> list[str]:
        """The problems in words."""
        return [
            f"{kind}: {len(examples):,}; {'; '.join(examples[:_EXAMPLES])}"
            for kind, examples in self.problems.items()
        ]


@dataclass(frozen=True)
class Required:
    """What must have happened for a run to mean anything."""

    kills: int = 0
    crashes: int = 0
    takeovers: int = 0
    writes_refused: int = 0


def judge(evidence: Evidence, required: Required | None = None) -> Verdict:
    """Hold *evidence* against what is promised, and its figures against what is *required*."""
    return _Judge(evidence).judge(required or Required())


class _Judge:
    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._verdict = Verdict()
        self._faults: dict[str, list[Fault]] = {}
        #: of each worker the runs that started late
        self._late: dict[str, list[Run]] = defaultdict(list)

    def judge(self, required: Required) -> Verdict:
        evidence, verdict = self._evidence, self._verdict
        verdict.figures |= {
            "committed": len(self.committed),
            "expected_deliveries": sum(
                len(HANDLERS[event.type]) for event in self.expected.values()
            ),
            "runs": len(evidence.runs),
        }
        self._judge_publishing()
        self._judge_handled()
        self._judge_effects()
        self._judge_order()
        self._judge_repeats()
        self._judge_overlaps()
        self._judge_remains()
        self._judge_processes()
        self._count(required)
        return verdict

    # -- what should have happened -------------------------------------------------------------

    @cached_property
    def committed(self) -> dict[UUID, Published]:
        """The events whose commit returned, or turned out to have happened."""
        return {
            event.id: event
            for transaction in self._evidence.transactions
            for event in transaction.events
            if transaction.committed or event.id in self._evidence.orders
        }

    @cached_property
    def expected(self) -> dict[UUID, Published]:
        """The same, and what handlers publish about them."""
        echoes = {
            id: Published(id, echo_key(event.key), ECHO, False)
            for event in self.committed.values()
            if event.type == RELAY
            for id in (echo_id(event.id, handler) for handler in HANDLERS[RELAY])
        }
        return self.committed | echoes

    def _hits(self, worker: str, since: float, until: float) -> Iterator[Fault]:
        """The faults that hit *worker* at a moment between the two."""
        if worker not in self._faults:
            hits = [each for each in self._evidence.faults if fnmatchcase(worker, each.victim)]
            # what hit one worker tells more than what hit all
            self._faults[worker] = sorted(hits, key=lambda fault: fault.victim == EVERYBODY)
        for fault in self._faults[worker]:
            if fault.began <= until and fault.ended + LEASE >= since:
                yield fault

    # -- publishing ----------------------------------------------------------------------------

    def _judge_publishing(self) -> None:
        """Rows and events are stored together or not at all, numbered as they were committed."""
        evidence, verdict = self._evidence, self._verdict
        verdict.figures |= {
            "transactions": len(evidence.transactions),
            "of_unknown_outcome": sum(not each.committed for each in evidence.transactions),
            "rolled_back_events": len(evidence.dropped),
        }
        for id in self.committed.keys() ^ evidence.orders:
            verdict.complain("the application's rows differ from what was committed", id)
        for id in self.expected.keys() ^ evidence.stored.keys():
            kind = "lost" if id in self.expected else "of no commit"
            verdict.complain(f"stored events: {kind}", id)
        for id in self.committed.keys() & evidence.dropped:
            verdict.complain("rolled back and stored", id)
        for id, event in self.expected.items():
            stored = evidence.stored.get(id)
            if stored is not None and (stored.type, stored.key) != (event.type, event.key):
                verdict.complain("stored events: changed", (id, stored, event))
        self._judge_numbers()

    def _judge_numbers(self) -> None:
        """Within a key, numbers are in the order of commits.

        A publisher notes a moment when it has its keys and before it commits. Whoever has a key
        next gets it after that commit, so these moments are in the order of commits, too.
        """
        moments: dict[UUID, set[tuple[str, float, bool]]] = defaultdict(set)
        for transaction in self._evidence.transactions:
            for event in transaction.events:
                moments[event.id].add(
                    (transaction.publisher, transaction.at, transaction.committed)
                )
        keys: dict[str, list[tuple[int, float, UUID]]] = defaultdict(list)
        for id, event in self.committed.items():
            _, at, committed = min(moments[id], key=lambda moment: moment[1])
            stored = self._evidence.stored.get(id)
            if event.key is None or stored is None or stored.sequence is None:
                continue
            # whose commit it was is known of those that one publisher published and did commit
            if committed and len({publisher for publisher, _, _ in moments[id]}) == 1:
                keys[event.key].append((stored.sequence, at, id))
        for key, events in keys.items():
            events.sort()
            for (number, before, _), (following, after, id) in _pairs(events):
                if number == following or before > after:
                    self._verdict.complain("numbered out of the order of commits", (key, id))

    # -- handling ------------------------------------------------------------------------------

    @cached_property
    def _groups(self) -> dict[tuple[UUID, str], list[Run]]:
        return group(self._evidence.runs)

    @cached_property
    def _done(self) -> dict[tuple[UUID, str], float]:
        """When each delivery of a plain handler was done for the first time."""
        return {
            delivery: min(ends)
            for delivery, runs in self._groups.items()
            if delivery[1] not in TRANSACTIONAL
            and (ends := [run.ended for run in runs if run.outcome == "done" and run.ended])
        }

    def _buried(self, event: Published, handler: str) -> bool:
        return event.bury and event.type == ORDER and handler == "flaky"

    def _judge_handled(self) -> None:
        """All that was committed is handled, and nothing else."""
        verdict, evidence = self._verdict, self._evidence
        effects = {(effect.event, effect.handler) for effect in evidence.effects}
        for id, event in self.expected.items():
            for handler in HANDLERS[event.type]:
                if self._buried(event, handler):
                    continue
                done = effects if handler in TRANSACTIONAL else self._done
                if (id, handler) not in done:
                    verdict.complain("lost: not handled", (id, handler))
        for id, handler in self._groups:
            if id not in self.expected:
                verdict.complain("handled without a commit", (id, handler))
            elif handler not in HANDLERS[self.expected[id].type]:
                verdict.complain("handled by whom it is not for", (id, handler))
        for run in evidence.runs:
            stored = evidence.stored.get(run.event)
            if stored is not None and (run.key, run.sequence) != (stored.key, stored.sequence):
                verdict.complain("handled with another key or number than stored", run)

    def _judge_effects(self) -> None:
        """Transactional effects happen once, and only where a run has returned."""
        counts = Counter((effect.event, effect.handler) for effect in self._evidence.effects)
        self._verdict.figures["effects"] = counts.total()
        for delivery, count in counts.items():
            if count > 1:
                self._verdict.complain("effects that happened more than once", (delivery, count))
            if delivery[0] not in self.expected:
                self._verdict.complain("effects without a commit", delivery)
        returned = {
            (run.event, run.handler, run.worker)
            for run in self._evidence.runs
            if run.outcome == "done"
        }
        for effect in set(self._evidence.effects) - returned:
            self._verdict.complain("effects of runs that did not return", effect)

    def _judge_order(self) -> None:
        """Within a key each handler is done with the events in the order of their commits."""
        lines: dict[tuple[str, str], list[tuple[float, UUID]]] = defaultdict(list)
        for (id, handler), at in self._done.items():
            self._queue(lines, id, handler, at)
        for n, effect in enumerate(self._evidence.effects):
            self._queue(lines, effect.event, effect.handler, n)
        stored = self._evidence.stored
        for (handler, key), events in lines.items():
            events.sort()
            numbers = [stored[id].sequence or 0 for _, id in events]
            for (_, id), (before, after) in zip(events[1:], _pairs(numbers), strict=True):
                if before > after:
                    self._verdict.complain("out of order", (handler, key, id))
        self._verdict.figures["lines_in_order"] = len(lines)
        self._judge_echoes()

    def _queue(
        self,
        lines: dict[tuple[str, str], list[tuple[float, UUID]]],
        id: UUID,
        handler: str,
        at: float,
    ) -> None:
        stored = self._evidence.stored.get(id)
        if stored is not None and stored.key is not None:
            lines[handler, stored.key].append((at, id))

    def _judge_echoes(self) -> None:
        """What a transactional handler publishes is numbered in the order of its events."""
        stored = self._evidence.stored
        keys: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for id, event in self.committed.items():
            echo = stored.get(echo_id(id, "tx.relay"))
            if event.type == RELAY and event.key is not None and echo is not None and id in stored:
                keys[event.key].append((stored[id].sequence or 0, echo.sequence or 0))
        for key, numbers in keys.items():
            numbers.sort()
            for (_, before), (_, after) in _pairs(numbers):
                if before >= after:
                    self._verdict.complain("published out of order by a handler", (key, after))

    # -- repeats and overlaps ------------------------------------------------------------------

    def _judge_repeats(self) -> None:
        """A delivery runs again if it failed, and else only if its worker was hit."""
        causes: Counter[str] = Counter()
        retries = 0
        for (_, handler), runs in self._groups.items():
            attempts: dict[int, list[Run]] = defaultdict(list)
            for run in runs:
                attempts[run.attempt].append(run)
            for same in attempts.values():
                for before, after in _pairs(same):
                    if before.outcome == "snoozed" and (before.ended or 0) <= after.began:
                        continue
                    causes[self._excuse("repeated without a reason", before, after)] += 1
            for attempt, (first, *_) in attempts.items():
                if attempt == 1:
                    continue
                retries += 1
                earlier = attempts.get(attempt - 1, ())
                failed = any(run.outcome == "failed" for run in earlier)
                # a commit may fail after its handler has returned
                if not failed and not (
                    handler in TRANSACTIONAL
                    and any(any(self._hits(run.worker, run.began, first.began)) for run in earlier)
                ):
                    self._verdict.complain("retried without a failure", first)
        self._verdict.figures |= {"retries": retries, "repeats": _counted(causes)}

    def _excuse(self, kind: str, before: Run, after: Run) -> str:
        """What hit the worker of *before* until *after*; a problem where nothing did."""
        for fault in self._hits(before.worker, before.began, after.began):
            return fault.kind.partition(":")[0]
        if self._starts_late(after):
            return "late start"
        self._verdict.complain(kind, (before, after))
        return "nothing"

    def _starts_late(self, run: Run) -> bool:
        """Whether *run* is what its process was about to start when it was made to stand still."""
        late = self._late[run.worker]
        if any(each is run for each in late):
            return True
        for fault in self._hits(run.worker, run.began, run.began):
            if fault.kind in _STANDSTILLS and run.began <= fault.ended + WAKING:
                if any(abs(each.began - run.began) <= 2 * WAKING for each in late):
                    return False  # one was about to; whatever else starts should have been stopped
                late.append(run)
                return True
        return False

    def _judge_overlaps(self) -> None:
        """One handler is at one event of a key at a time, but for zombies."""
        lines: dict[tuple[str, str], list[Run]] = defaultdict(list)
        for run in sorted(self._evidence.runs, key=lambda run: run.began):
            if run.key is not None:
                lines[run.handler, run.key].append(run)
        causes: Counter[str] = Counter()
        zombies: set[int] = set()
        for line in lines.values():
            going_on: list[Run] = []
            for run in line:
                going_on = [each for each in going_on if (each.ended or run.began) > run.began]
                for first in going_on:
                    causes[self._zombie(first, run)] += 1
                    zombies.add(id(first))
                going_on.append(run)
        self._verdict.figures |= {"zombies": len(zombies), "overlaps": _counted(causes)}

    def _zombie(self, first: Run, second: Run) -> str:
        """Which fault made a zombie of one of two runs that overlap; a problem where none did."""
        if first.worker != second.worker:
            for fault in self._hits(first.worker, first.began, second.began):
                if fault.kind != "kill" and second.began >= fault.began + LEASE / 2:
                    return fault.kind.partition(":")[0]
            if self._starts_late(second):
                return "late start"
        self._verdict.complain("overlapping runs of one handler and key", (first, second))
        return "nothing"

    # -- what is left --------------------------------------------------------------------------

    def _judge_remains(self) -> None:
        """Nothing is left but the dead letters that were asked for."""
        verdict, evidence = self._verdict, self._evidence
        expected = {
            (id, "flaky") for id, event in self.committed.items() if self._buried(event, "flaky")
        }
        found: dict[tuple[UUID, str], Dead] = {}
        for dead in evidence.dead:
            if (dead.event, dead.handler) in found:
                verdict.complain("dead letters: twice", dead)
            found[dead.event, dead.handler] = dead
        for delivery in expected - found.keys():
            if delivery[0] in self.expected:
                verdict.complain("dead letters: missing", delivery)
        for delivery in found.keys() - expected:
            convicted = "its worker died" in (found[delivery].error or "")
            kind = "buried for crashes" if convicted else "dead letters: not expected"
            verdict.complain(kind, found[delivery])
        for table, count in evidence.left.items():
            if count:
                verdict.complain(f"left in {table}", count)
        verdict.figures |= {"dead_letters": len(found), "suspects_left": evidence.suspects}

    def _judge_processes(self) -> None:
        """Workers end when they are told to, or killed, or cannot reach the server at the start."""
        for name, ending in self._evidence.endings.items():
            if not self._may_end(name, ending):
                self._verdict.complain("ended by itself", (name, ending))
        for run in self._evidence.runs:
            if run.outcome is None and self._evidence.endings[run.worker].code != -9:
                self._verdict.complain("runs without an end", run)
        for error in self._evidence.errors:
            self._verdict.complain("errors in the logs", error)

    def _may_end(self, name: str, ending: Ending) -> bool:
        kinds = {fault.kind for fault in self._hits(name, ending.began, ending.at)}
        if ending.code == -9:
            return "kill" in kinds
        if ending.code in (-15, 143):  # it was told to end before it ran
            return all(run.worker != name for run in self._evidence.runs)
        # 1: no database at the start; 3: none at the end
        return ending.code == 0 or (ending.code in (1, 3) and bool(kinds - {"kill", "stall"}))

    # -- counts --------------------------------------------------------------------------------

    def _count(self, required: Required) -> None:
        faults = self._evidence.faults
        kills = [fault.in_flight for fault in faults if fault.kind == "kill"]
        # a process that was stopped on purpose notes that it stood still as well
        stalls = sum(
            fault.kind == "stall"
            and not any(each.kind == "stop" for each in self._hits(fault.victim, *fault[2:4]))
            for fault in faults
        )
        figures = {
            "kills": sum(in_flight > 0 for in_flight in kills),
            "killed_in_flight": sum(kills),
            "crashes": sum(fault.kind == "crash" for fault in faults),
            "faults": _counted(Counter(each.kind for each in faults if each.kind != "stall")),
            "stalls": stalls,
            "takeovers": 0,
            "writes_refused": 0,
            **self._evidence.logged,
        }
        self._verdict.figures |= figures
        for name, least in vars(required).items():
            if figures[name] < least:
                self._verdict.complain(f"too few {name}", f"{figures[name]} of {least}")


def _pairs(values: list[Any]) -> Iterable[tuple[Any, Any]]:
    return pairwise(values)


def _counted(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items()))
