"""What a worker has claimed: running, waiting to run, or finished and not yet confirmed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Container, Iterable, Mapping

from ..router import Handler
from ..settings import Settings
from ..stores.base import Delivery
from .hold import Hold
from .load import Load

#: How long to wait before a row that somebody else has locked is tried again, seconds.
RETRY_LOCKED = 0.25


class Flight:
    """A delivery is in ``started`` of its :class:`Hold` until the store has confirmed its end.

    ``finished`` waits for an exchange to delete it; ``locked`` is finished too, but somebody else
    has its row locked.
    """

    def __init__(self, handlers: Mapping[str, Handler], settings: Settings) -> None:
        self._settings = settings
        self.load = Load(handlers, settings)
        self.finished: dict[int, Delivery] = {}
        self.locked: dict[int, Delivery] = {}
        self.retry_locked_at = 0.0
        #: how many are claimed ahead, on all lanes
        self.prefetched = 0

    @property
    def room(self) -> int:
        """How many more deliveries to claim."""
        settings = self._settings
        most = settings.concurrency + settings.prefetch - self.load.slots - self.prefetched
        return max(0, min(settings.batch, most))

    def idle(self, holds: Iterable[Hold]) -> float:
        """The largest free share of an executor for which something is claimed ahead."""
        if not self.prefetched:
            return 0.0
        waiting = {delivery.handler for hold in holds for delivery in hold.prefetched}
        return max(map(self.load.idle, waiting), default=0.0)

    # -- claimed ahead -------------------------------------------------------------------------

    def prefetch(self, hold: Hold, delivery: Delivery) -> None:
        hold.prefetched.append(delivery)
        self.prefetched += 1

    def promote(self, hold: Hold, only: Container[int] | None = None) -> list[Delivery]:
        """Move what can begin from the prefetched to the started; it runs when that is recorded.

        *only*: the ids of those that may begin, where not all may.
        """
        fit: list[Delivery] = []
        rest: deque[Delivery] = deque()
        for delivery in hold.prefetched:
            if (only is None or delivery.id in only) and self.load.fits(delivery):
                self.load.begin((delivery,))
                hold.started[delivery.id] = delivery
                fit.append(delivery)
            else:
                rest.append(delivery)
        hold.prefetched = rest
        self.prefetched -= len(fit)
        return fit

    def put_back(self, promoted: list[Delivery]) -> None:
        """Undo :meth:`promote`: it was not recorded, or nobody knows."""
        for delivery in reversed(promoted):
            self.load.end(delivery)
            hold: Hold = delivery.hold
            if not hold.lost:
                hold.started.pop(delivery.id, None)
                hold.prefetched.appendleft(delivery)
                self.prefetched += 1

    def drop_followers(self, head: Delivery) -> None:
        """Give back what was claimed ahead of the handler and key of *head*."""
        hold: Hold = head.hold
        if head.key is None or not hold.prefetched:
            return
        before = len(hold.prefetched)
        hold.prefetched = deque(
            each for each in hold.prefetched if each.key != head.key or each.handler != head.handler
        )
        self.prefetched -= before - len(hold.prefetched)

    # -- finished ------------------------------------------------------------------------------

    def lock(self, delivery: Delivery) -> None:
        """Somebody else has the finished delivery's row locked: try it again later."""
        self.locked[delivery.id] = delivery
        self.retry_locked_at = time.monotonic() + RETRY_LOCKED

    def retry_locked(self, now: float) -> None:
        if self.locked and now >= self.retry_locked_at:
            self.finished.update(self.locked)
            self.locked.clear()

    def forget(self, hold: Hold) -> None:
        """The lane is lost or given up, and what it had in flight is not ours any more."""
        self.prefetched -= len(hold.prefetched)
        hold.prefetched.clear()
        for id in hold.started:
            self.finished.pop(id, None)
            self.locked.pop(id, None)
