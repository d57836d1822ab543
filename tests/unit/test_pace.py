"""When a worker looks for work: without a clock of its own."""

from __future__ import annotations

import itertools
from typing import Any

from sqlalchemy_relaybus.settings import Settings
from sqlalchemy_relaybus.worker.pace import (
    HINT_PAUSE,
    LEAST_LANES,
    MOST_HINT_PAUSE,
    MOST_LANES,
    Pace,
)


def pace(**settings: Any) -> Pace:
    return Pace(Settings(poll_interval=0.05, max_poll_interval=1.0, **settings))


def looks(pace: Pace, start: float, end: float, *, hints: float = 0, fruit: int = 0) -> list[float]:
    """When it looks from *start* to *end*, with a hint every *hints* seconds."""
    times: list[float] = []
    step = 0.001
    for n in range(round((end - start) / step)):
        now = start + n * step
        if hints and n % round(hints / step) == 0:
            pace.hint()
        if pace.due(now, starved=True):
            pace.looking(now)
            pace.claimed(fruit, 200, more=False)
            times.append(now)
    return times


def test_without_work_it_looks_about_once_a_second() -> None:
    quiet = pace()
    looks(quiet, 0, 5)
    assert 20 <= len(looks(quiet, 5, 25)) <= 27  # jitter: 0.75 to 1 s


def test_what_was_claimed_makes_it_look_again_at_once_and_often() -> None:
    busy = pace()
    looks(busy, 0, 5)
    busy.claimed(1, 200, more=False)
    assert busy.due(5.0, starved=True)
    assert not busy.due(5.0, starved=False) or busy.next_look <= 5.0
    busy.looking(5.0)
    assert busy.look_at <= 5.05


def test_a_hint_is_followed_at_once() -> None:
    quiet = pace()
    looks(quiet, 0, 5)
    busy_from = quiet.look_at - 0.2
    assert not quiet.due(busy_from, starved=True)
    quiet.hint()
    assert quiet.due(busy_from, starved=True)


def test_hints_that_lead_to_nothing_are_followed_less_and_less() -> None:
    quiet = pace()
    times = looks(quiet, 0, 10, hints=0.002)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert gaps[0] <= 2 * HINT_PAUSE
    assert all(gap <= MOST_HINT_PAUSE + 0.002 for gap in gaps)
    assert len(times) <= 10 / MOST_HINT_PAUSE + 10


def test_hints_that_lead_to_work_are_all_followed() -> None:
    busy = pace()
    assert len(looks(busy, 0, 1, hints=0.01, fruit=1)) >= 100


def test_what_is_due_soon_is_not_slept_through() -> None:
    quiet = pace()
    looks(quiet, 0, 5)
    quiet.looking(5.0)
    quiet.expect(5.01)
    assert not quiet.due(5.005, starved=True)
    assert quiet.due(5.011, starved=True)


def test_few_lanes_are_served_while_they_fill_the_batch() -> None:
    wide = pace()
    assert wide.width == LEAST_LANES
    for _ in range(10):
        wide.claimed(10, 200, more=True)
    assert wide.width == MOST_LANES
    for _ in range(10):
        wide.claimed(10, 200, more=False)
    assert wide.width == MOST_LANES
    for _ in range(10):
        wide.claimed(200, 200, more=True)
    assert wide.width == LEAST_LANES
