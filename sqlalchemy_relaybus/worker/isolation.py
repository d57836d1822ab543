"""Which delivery kills its worker: narrowed down until it runs alone.

A handler that takes its process down leaves no word of it. The lane's row lists what had started,
and how many deliveries its process had started in all; whoever takes the lane over keeps that as
*suspects*. One crash means little, so a suspect of one runs as everything does. From the second on
it is isolated: the worker lets what runs end, then runs suspects only, half as many at a time as
had been running when the worker died. What completes, or fails in an orderly way, is a suspect no
more. What is left is halved again by the next crash, until one delivery runs alone; if the worker
dies then, that delivery is the proven culprit and goes to the dead letters.

So *n* deliveries that run beside a culprit cost at most 2 + log2(n) crashes, and none of them is
buried for it. A worker that is killed from outside costs its deliveries one crash count and no
time; to be buried without guilt, a delivery would have to run alone when its worker is killed,
having been running each time when two or more workers before were. A worker that has lost its lanes
and lives, having been stopped or cut off, takes the counts back when it comes to know.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from uuid import UUID

from sqlalchemy import Connection

from ..stores.base import Delivery, Store, Suspect
from .flight import Flight
from .hold import Hold

#: Crashes from which on suspects are isolated.
ISOLATE = 2
#: Crashes after which a delivery that ran alone in the last of them is the culprit.
CONVICT = 3
#: How long those who are suspects no more wait for others, to be written together, seconds.
_ABSOLVE = 0.1


def is_culprit(suspect: Suspect | None) -> bool:
    """Whether it is proven that the delivery kills its worker.

    In its last crash nothing else ran. That is known of an isolated one only, and after
    :data:`ISOLATE` crashes it was.
    """
    return suspect is not None and suspect.crashes >= CONVICT and suspect.company == 1


def _isolated(suspect: Suspect | None) -> bool:
    return suspect is not None and suspect.crashes >= ISOLATE


class Isolation:
    """Decides what may begin while there are suspects to isolate, and clears those that ended."""

    def __init__(self, store: Store, holder: UUID, flight: Flight) -> None:
        self._store = store
        self._holder = holder
        self._flight = flight
        self._absolved: list[Delivery] = []
        self._survived: list[Delivery] = []
        self._absolve_at = 0.0

    def wanted(self, holds: Iterable[Hold]) -> bool:
        """Whether a suspect waits to run by itself, or does: nothing else is to begin."""
        return any(
            _isolated(hold.suspects.get(delivery.id))
            for hold in holds
            if hold.suspects
            for delivery in (*hold.started.values(), *hold.prefetched)
        )

    def expected(self, holds: Iterable[Hold]) -> bool:
        """Whether a claim from one of *holds* may bring such a suspect."""
        return any(_isolated(suspect) for hold in holds for suspect in hold.suspects.values())

    def group(self, holds: Iterable[Hold]) -> set[int]:
        """The ids of those that may begin now, by themselves; none while anything runs."""
        chosen: set[int] = set()
        if self._flight.load.deliveries:
            return chosen
        most = 0
        for id, company in self._candidates(holds):
            half = max(1, company // 2)
            most = most or half
            if half >= most and len(chosen) < most:
                chosen.add(id)
        return chosen

    def _candidates(self, holds: Iterable[Hold]) -> Iterator[tuple[int, int]]:
        """What waits: id, and in whose company it last was. Of one handler and key the first.

        What comes before a suspect in its key runs in its stead: that keeps the order.
        """
        for hold in holds:
            if not hold.suspects:
                continue
            firsts: dict[tuple[str, str], int] = {}
            seen: set[int] = set()
            for delivery in hold.prefetched:
                id = delivery.id
                if delivery.key is not None:
                    id = firsts.setdefault((delivery.handler, delivery.key), id)
                suspect = hold.suspects.get(delivery.id)
                if suspect is not None and _isolated(suspect) and id not in seen:
                    seen.add(id)
                    yield id, suspect.company

    def ended(self, delivery: Delivery) -> None:
        """*delivery* has completed or failed, and its worker lives."""
        if delivery.hold.suspects.pop(delivery.id, None) is not None:
            self._absolved.append(delivery)

    def lost(self, hold: Hold) -> None:
        """The lane was taken over, and what was started on it is suspect. But this worker lives."""
        self._survived += hold.started.values()

    def absolve(self, connection: Connection, now: float) -> None:
        """Have the store forget those that ended, a moment later and many at a time."""
        if self._survived:
            # sent again where the reply was lost: a crash too few counted costs a culprit one
            # more, one too many could cost an innocent delivery its life
            self._store.survived(connection, self._survived)
            self._survived.clear()
        if not self._absolved or (now < self._absolve_at and self._flight.load.deliveries):
            return
        self._absolve_at = now + _ABSOLVE
        self._store.absolve(connection, self._holder, self._absolved)
        self._absolved.clear()
