"""Who takes part in a history: workers, and transactions that stay open."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from uuid import UUID

from sqlalchemy import Connection

from sqlalchemy_relaybus.stores.base import Delivery, Lease

from .model import Addition


@dataclass(eq=False)
class Worker:
    """What a worker believes."""

    name: str
    id: UUID
    handlers: Sequence[str]
    #: for single statements, and for takeovers
    connection: Connection
    taker: Connection
    leases: dict[int, Lease] = field(default_factory=dict)
    started: dict[int, Delivery] = field(default_factory=dict)
    prefetched: dict[int, Delivery] = field(default_factory=dict)
    #: done, and to be deleted by an exchange
    finished: dict[int, Delivery] = field(default_factory=dict)
    #: runs that have ended, or whose lane was lost: abandoned threads may still report them
    past: list[Delivery] = field(default_factory=list)

    @property
    def flight(self) -> list[dict[int, Delivery]]:
        return [self.started, self.prefetched, self.finished]

    def on(self, lanes: Iterable[int], deliveries: dict[int, Delivery]) -> list[Delivery]:
        """Those of *deliveries* that are on *lanes*, in order."""
        wanted = set(lanes)
        return [each for _, each in sorted(deliveries.items()) if each.lane in wanted]

    def heads(self, busy: Iterable[int] = ()) -> list[Delivery]:
        """What runs: of each handler and key the first in flight, unless it is *busy*."""
        seen: set[tuple[str, str]] = set()
        found = []
        for id, each in sorted({**self.prefetched, **self.started}.items()):
            run = each.handler, each.key or str(id)
            if run not in seen and id in self.started and id not in busy:
                found.append(each)
            seen.add(run)
        return found

    def lose(self, lane: int) -> None:
        """What was in flight on *lane* is over."""
        self.leases.pop(lane, None)
        for deliveries in self.flight:
            for each in self.on([lane], deliveries):
                self.past.append(deliveries.pop(each.id))

    def give_back(self, head: Delivery) -> None:
        """*head* has ended; its followers in flight have not begun, and are claimed again."""
        self.started.pop(head.id, None)
        if head.key is not None:
            for deliveries in (self.started, self.prefetched):
                for each in list(deliveries.values()):
                    if (each.handler, each.key) == (head.handler, head.key):
                        del deliveries[each.id]


@dataclass(eq=False)
class Open:
    """A transaction that has not ended: a handler's or a publisher's."""

    name: str
    connection: Connection
    stack: ExitStack
    worker: Worker | None = None
    delivery: Delivery | None = None
    additions: list[Addition] = field(default_factory=list)
    events: list[UUID] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
