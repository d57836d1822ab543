"""When a worker looks for work, and how many lanes an exchange serves: pure decisions."""

from __future__ import annotations

import random

from ..settings import Settings

#: Lanes served by one exchange: as few as fill the batch (a lane's row is written each time).
LEAST_LANES = 4
MOST_LANES = 64
#: Wait after a look that found nothing to claim until a hint causes another, seconds. It doubles
#: with each such look: hints about what others claim are not worth a statement each.
HINT_PAUSE = 0.005
MOST_HINT_PAUSE = 0.08


class Pace:
    """Looks often while that finds work and seldom while it does not. Times are monotonic."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._pause = settings.poll_interval
        self._hint_pause = 0.0
        self._looked_at = 0.0
        self._hinted = False
        #: when to look next
        self.look_at = 0.0
        #: something was claimed since the last look: there may be more
        self.hungry = True
        #: how many lanes to claim from at a time
        self.width = LEAST_LANES

    def hint(self) -> None:
        """There may be new work; from any thread."""
        self._hinted = True

    @property
    def next_look(self) -> float:
        """When to look next, a hint that waits for its turn included."""
        return (
            min(self.look_at, self._looked_at + self._hint_pause) if self._hinted else self.look_at
        )

    def due(self, now: float, *, starved: bool) -> bool:
        """Whether to look now; *starved*: there is room, and no held lane has anything."""
        return (self.hungry and starved) or now >= self.next_look

    def looking(self, now: float) -> None:
        """A look begins; :meth:`claimed` and :meth:`found` tell what it was good for."""
        self._hinted = self.hungry = False
        self._looked_at = now
        self._hint_pause = min(max(self._hint_pause * 2, HINT_PAUSE), MOST_HINT_PAUSE)
        # jitter keeps the workers from looking all at once
        self.look_at = now + self._pause * random.uniform(0.75, 1.0)
        self._pause = min(self._pause * 2, self._settings.max_poll_interval)

    def expect(self, at: float) -> None:
        """Something is due at *at*: look then at the latest."""
        self.look_at = min(self.look_at, at)

    def claimed(self, total: int, limit: int, *, more: bool) -> None:
        """An exchange claimed *total* of at most *limit*; *more*: other lanes are ready."""
        if total:
            self.hungry = True
            self._hint_pause = 0.0
            self._pause = self._settings.poll_interval
        # every lane served costs a write of its row, now and when its deliveries finish
        if total >= limit:
            self.width = max(LEAST_LANES, self.width // 2)
        elif total * 2 < limit and more:
            self.width = min(self.width * 2, MOST_LANES)
