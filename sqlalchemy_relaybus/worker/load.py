"""How much a worker has running: in deliveries, and in slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ..stores.base import Delivery


class Load:
    """What is started and not concluded.

    Deliveries of one handler and key take one slot together, however many there are: they run one
    after another. So a key with a long queue leaves the other slots to others.
    """

    def __init__(self) -> None:
        self.deliveries = 0
        self.slots = 0
        self._runs: Counter[tuple[str, str]] = Counter()

    def begin(self, deliveries: Iterable[Delivery]) -> None:
        for delivery in deliveries:
            self.deliveries += 1
            if delivery.key is None:
                self.slots += 1
                continue
            run = delivery.handler, delivery.key
            self._runs[run] += 1
            if self._runs[run] == 1:
                self.slots += 1

    def end(self, delivery: Delivery) -> None:
        self.deliveries -= 1
        if delivery.key is not None:
            run = delivery.handler, delivery.key
            self._runs[run] -= 1
            if self._runs[run]:
                return
            del self._runs[run]
        self.slots -= 1
