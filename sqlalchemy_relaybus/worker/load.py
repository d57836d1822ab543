"""How much a worker has running, and how much more each of its executors can begin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal

from ..router import Handler
from ..settings import Settings
from ..stores.base import Delivery

#: What a handler runs in. Coroutines with a transaction have a limit of their own in the loop.
Executor = Literal["loop", "threads", "transactions", "loop transactions"]


class Load:
    """What is started and not concluded.

    A delivery takes a slot of its handler's executor, so that no more is recorded as started than
    can begin: if this worker dies, what was started counts a crash. Deliveries of one
    handler and key take one slot together, however many there are: they run one after another. So
    a key with a long queue leaves the other slots to others.
    """

    def __init__(self, handlers: Mapping[str, Handler], settings: Settings) -> None:
        self.deliveries = 0
        self.slots = 0
        self._concurrency = settings.concurrency
        self._executors = {name: executor_of(handler) for name, handler in handlers.items()}
        self._most: dict[Executor, int] = {
            "loop": settings.concurrency,
            "threads": settings.threads,
            "transactions": settings.pool_size,
            "loop transactions": settings.pool_size,
        }
        self._used: Counter[Executor] = Counter()
        self._runs: Counter[tuple[str, str]] = Counter()

    def free(self, handler: str | None = None) -> int:
        """How many more runs can begin of *handler*, or of whichever there may be next."""
        free = self._concurrency - self.slots
        executors = set(self._executors.values()) if handler is None else {self._executors[handler]}
        return max(0, min(free, *(self._most[each] - self._used[each] for each in executors)))

    def fits(self, delivery: Delivery) -> bool:
        """Whether *delivery* can begin, or is next in a run that has."""
        if delivery.key is not None and (delivery.handler, delivery.key) in self._runs:
            return True
        return self.free(delivery.handler) > 0

    def idle(self, handler: str) -> float:
        """Which share of its executor's slots is free for *handler*."""
        most = min(self._concurrency, self._most[self._executors[handler]])
        return self.free(handler) / most

    def begin(self, deliveries: Iterable[Delivery]) -> None:
        for delivery in deliveries:
            self.deliveries += 1
            if delivery.key is not None:
                run = delivery.handler, delivery.key
                self._runs[run] += 1
                if self._runs[run] > 1:
                    continue
            self.slots += 1
            self._used[self._executors[delivery.handler]] += 1

    def end(self, delivery: Delivery) -> None:
        self.deliveries -= 1
        if delivery.key is not None:
            run = delivery.handler, delivery.key
            self._runs[run] -= 1
            if self._runs[run]:
                return
            del self._runs[run]
        self.slots -= 1
        self._used[self._executors[delivery.handler]] -= 1


def executor_of(handler: Handler) -> Executor:
    """What *handler* runs in."""
    if handler.injection.is_async:
        return "loop transactions" if handler.transactional else "loop"
    return "transactions" if handler.transactional else "threads"
