"""The verdict finds what is wrong: each promise is broken once, in evidence that is good else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from uuid import UUID

import pytest

from tests.chaos.app import ECHO, HANDLERS, ORDER, RELAY, TRANSACTIONAL, echo_id, echo_key
from tests.chaos.evidence import (
    Dead,
    Effect,
    Ending,
    Evidence,
    Fault,
    Published,
    Run,
    Stored,
    Transaction,
)
from tests.chaos.verdict import Required, judge

KEY = "k"
FIRST, SECOND, RELAYED, BURIED = (UUID(int=n) for n in range(1, 5))
TYPES = {FIRST: ORDER, SECOND: ORDER, RELAYED: RELAY, BURIED: ORDER}


def good() -> Evidence:
    """Four events of one key, each handled by everybody in turn, one of them buried."""
    evidence = Evidence(endings={"w0.0": Ending(0, 0.0, 100.0), "w1.0": Ending(0, 0.0, 100.0)})
    at = 0.0
    for n, (id, type) in enumerate(TYPES.items(), start=1):
        published = Published(id, KEY, type, id == BURIED)
        evidence.transactions.append(Transaction("p0", at, [published], committed=True))
        evidence.stored[id] = Stored(type, KEY, n)
        evidence.orders.add(id)
        at += 1
        events = {id: (type, KEY, n)}
        if type == RELAY:
            for m, handler in enumerate(HANDLERS[RELAY], start=1):
                echo = echo_id(id, handler)
                events[echo] = ECHO, str(echo_key(KEY)), m
                evidence.stored[echo] = Stored(*events[echo])
        for event, (its_type, key, sequence) in events.items():
            for handler in HANDLERS[its_type]:
                buried = event == BURIED and handler == "flaky"
                run = Run(event, key, sequence, handler, "w0.0", 1, at, at + 0.5)
                run.outcome = "buried" if buried else "done"
                evidence.runs.append(run)
                if buried:
                    evidence.dead.append(Dead(event, handler, "this one is not wanted"))
                elif handler in TRANSACTIONAL:
                    evidence.effects.append(Effect(event, handler, "w0.0"))
            at += 1
    return evidence


def run_of(evidence: Evidence, event: UUID, handler: str) -> Run:
    return next(run for run in evidence.runs if (run.event, run.handler) == (event, handler))


def again(evidence: Evidence, after: float, worker: str = "w1.0") -> Run:
    """A second run of the first event by a plain handler."""
    first = run_of(evidence, FIRST, "coroutine")
    assert first.ended is not None
    second = replace(first, worker=worker, began=first.began + after, ended=first.ended + after)
    evidence.runs.append(second)
    return second


def test_nothing_is_wrong_with_good_evidence() -> None:
    verdict = judge(good())
    assert not verdict.problems, verdict.told()
    assert verdict.figures["expected_deliveries"] == 3 * 5 + 2 + 2 * 2


def lost(evidence: Evidence) -> None:
    evidence.runs.remove(run_of(evidence, SECOND, "function"))


def lost_effect(evidence: Evidence) -> None:
    evidence.effects.remove(Effect(SECOND, "tx.function", "w0.0"))


def lost_event(evidence: Evidence) -> None:
    del evidence.stored[SECOND]


def half_committed(evidence: Evidence) -> None:
    evidence.orders.remove(SECOND)


def uncommitted(evidence: Evidence) -> None:
    evidence.runs.append(replace(run_of(evidence, FIRST, "function"), event=UUID(int=99)))


def rolled_back(evidence: Evidence) -> None:
    evidence.dropped.add(SECOND)


def effect_twice(evidence: Evidence) -> None:
    evidence.effects.append(Effect(FIRST, "tx.function", "w0.0"))


def effect_of_nobody(evidence: Evidence) -> None:
    place = evidence.effects.index(Effect(FIRST, "tx.function", "w0.0"))
    evidence.effects[place] = Effect(FIRST, "tx.function", "w1.0")


def swapped_runs(evidence: Evidence) -> None:
    first, second = (run_of(evidence, id, "function") for id in (FIRST, SECOND))
    first.began, second.began = second.began, first.began
    first.ended, second.ended = second.ended, first.ended


def swapped_effects(evidence: Evidence) -> None:
    first, second = (
        evidence.effects.index(Effect(id, "tx.function", "w0.0")) for id in (FIRST, SECOND)
    )
    rows = evidence.effects
    rows[first], rows[second] = rows[second], rows[first]


def swapped_commits(evidence: Evidence) -> None:
    first, second = evidence.transactions[:2]
    first.at, second.at = second.at, first.at


def repeated(evidence: Evidence) -> None:
    again(evidence, 20)


def repeated_long_after_a_fault(evidence: Evidence) -> None:
    evidence.faults.append(Fault("stop", "w0.0", -10.0, -5.0))
    again(evidence, 20)


def repeated_when_another_was_hit(evidence: Evidence) -> None:
    evidence.faults.append(Fault("stop", "w1.0", 2.0, 8.0))
    again(evidence, 20)


def retried(evidence: Evidence) -> None:
    again(evidence, 20).attempt = 2


def overlapping(evidence: Evidence) -> None:
    run_of(evidence, FIRST, "coroutine").ended = 50.0


def overlapping_too_early(evidence: Evidence) -> None:
    """As if a lane was taken over before its lease had run out."""
    run_of(evidence, FIRST, "coroutine").ended = 50.0
    moved = run_of(evidence, SECOND, "coroutine")
    moved.worker = "w1.0"
    evidence.faults.append(Fault("stop", "w0.0", moved.began - 1, 60.0))


def overlapping_in_one_process(evidence: Evidence) -> None:
    evidence.faults.append(Fault("stop", "w0.0", 1.2, 60.0))
    run_of(evidence, FIRST, "coroutine").ended = 50.0


def convicted(evidence: Evidence) -> None:
    evidence.dead.append(Dead(FIRST, "function", "its worker died 3 times while it ran"))


def buried(evidence: Evidence) -> None:
    evidence.dead.append(Dead(FIRST, "function", "8 attempts are used up"))


def not_buried(evidence: Evidence) -> None:
    evidence.dead.clear()


def left(evidence: Evidence) -> None:
    evidence.left["deliveries"] = 1


def ended_by_itself(evidence: Evidence) -> None:
    evidence.endings["w0.0"] = Ending(1, 0.0, 100.0)


def an_error(evidence: Evidence) -> None:
    evidence.errors.append("w0.0: Traceback (most recent call last):")


def misnumbered(evidence: Evidence) -> None:
    run_of(evidence, FIRST, "function").sequence = 7


def unordered_echo(evidence: Evidence) -> None:
    evidence.transactions[0].events = [Published(FIRST, KEY, RELAY, False)]
    evidence.stored[echo_id(FIRST, "tx.relay")] = Stored(ECHO, str(echo_key(KEY)), 9)


BREAKS: list[tuple[Callable[[Evidence], None], str]] = [
    (lost, "lost: not handled"),
    (lost_effect, "lost: not handled"),
    (lost_event, "stored events: lost"),
    (half_committed, "the application's rows differ"),
    (uncommitted, "handled without a commit"),
    (rolled_back, "rolled back and stored"),
    (effect_twice, "effects that happened more than once"),
    (effect_of_nobody, "effects of runs that did not return"),
    (swapped_runs, "out of order"),
    (swapped_effects, "out of order"),
    (swapped_commits, "numbered out of the order of commits"),
    (repeated, "repeated without a reason"),
    (repeated_long_after_a_fault, "repeated without a reason"),
    (repeated_when_another_was_hit, "repeated without a reason"),
    (retried, "retried without a failure"),
    (overlapping, "overlapping runs"),
    (overlapping_too_early, "overlapping runs"),
    (overlapping_in_one_process, "overlapping runs"),
    (convicted, "buried for crashes"),
    (buried, "dead letters: not expected"),
    (not_buried, "dead letters: missing"),
    (left, "left in deliveries"),
    (ended_by_itself, "ended by itself"),
    (an_error, "errors in the logs"),
    (misnumbered, "handled with another key or number"),
    (unordered_echo, "published out of order by a handler"),
]


@pytest.mark.parametrize(
    ("spoil", "words"), BREAKS, ids=lambda value: getattr(value, "__name__", "")
)
def test_what_is_wrong_is_found(spoil: Callable[[Evidence], None], words: str) -> None:
    evidence = good()
    spoil(evidence)
    assert words in "\n".join(judge(evidence).told())


def test_what_a_fault_excuses() -> None:
    """A worker stops in the first event; another takes over, and handles that one again."""
    evidence = good()
    evidence.faults.append(Fault("stop", "w0.0", 1.2, 20.0))
    for run in evidence.runs:
        run.worker = "w1.0"
        run.began += 5
        run.ended = run.began + 0.5
    evidence.effects = [effect._replace(worker="w1.0") for effect in evidence.effects]
    first = run_of(evidence, FIRST, "coroutine")
    evidence.runs.append(replace(first, worker="w0.0", began=1.0, ended=20.1))
    verdict = judge(evidence)
    assert not verdict.problems, verdict.told()
    assert verdict.figures["repeats"] == {"stop": 1}
    assert verdict.figures["zombies"] == 1


@pytest.mark.parametrize(("events", "excused"), [((FIRST,), True), ((FIRST, SECOND), False)])
def test_one_run_may_start_late(events: tuple[UUID, ...], excused: bool) -> None:
    evidence = good()
    evidence.faults.append(Fault("stop", "w1.0", 0.5, 50.0))
    for n, event in enumerate(events):
        began = 50.001 + n / 100
        first = run_of(evidence, event, "coroutine")
        evidence.runs.append(replace(first, worker="w1.0", began=began, ended=began + 0.005))
    verdict = judge(evidence)
    assert (not verdict.problems) is excused, verdict.told()
    assert verdict.figures["repeats"]["late start"] == 1


def test_too_little_happened() -> None:
    assert "too few kills: 1; 0 of 1" in judge(good(), Required(kills=1)).told()
