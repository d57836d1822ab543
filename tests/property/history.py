"""What a history is made of: the choices of its steps. And what became of all histories."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from typing import TypeVar

from hypothesis import note

T = TypeVar("T")


class Choices:
    """The choices of one step, from a number that Hypothesis draws for it.

    Hypothesis asks the same of a history whenever it repeats it. A store need not give the same
    answers (which of the free lanes, which of the longest due), and what a step may choose among
    depends on them: so the number is all that Hypothesis knows of. It shortens a history by whole
    steps, and those that stay choose what they chose before, where they still can.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def one(self, values: Sequence[T], what: str) -> T:
        """One of *values*: what stands there twice is twice as likely."""
        value = self._random.choice(values)
        note(f"  {what}: {value}")
        return value

    def some(self, values: Sequence[T], what: str, most: int | None = None) -> list[T]:
        """Some of *values*, at least one and at most *most*, in any order."""
        count = self._random.randint(1, min(most or len(values), len(values)))
        chosen = self._random.sample(values, count)
        note(f"  {what}: {chosen}")
        return chosen


class Statistics:
    """What all machines of a run have done."""

    def __init__(self, every: float | None = None) -> None:
        self.examples = 0
        self.steps = 0
        self.claimed = 0
        self.refused = 0
        self._began = time.monotonic()
        self._every = every
        self._told = self._began

    def __str__(self) -> str:
        return (
            f"{self.examples} histories, {self.steps} steps, {self.claimed} deliveries claimed, "
            f"{self.refused} writes refused, {time.monotonic() - self._began:.0f} s"
        )

    def tell(self) -> None:
        """Print progress now and then, where that is wanted."""
        now = time.monotonic()
        if self._every is not None and now - self._told >= self._every:
            self._told = now
            print(self, file=sys.stderr, flush=True)
