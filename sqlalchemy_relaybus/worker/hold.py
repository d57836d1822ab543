"""A lane that a worker holds, and what the worker knows of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator
from typing import Literal
from uuid import UUID

from ..stores.base import Delivery, LaneState, Lease, Pair, Suspect, Taken

#: Most deliveries of one lane in flight: a lane with a long queue does not take all the room.
LANE_IN_FLIGHT = 64


class Hold:
    """What a worker knows of a lane that it holds."""

    __slots__ = (
        "behind",
        "blocked",
        "deadline",
        "draining",
        "lease",
        "lost",
        "not_before",
        "prefetched",
        "ready",
        "renew_at",
        "started",
        "suspects",
        "taken_at",
        "worked_at",
        "yielded",
    )

    def __init__(self, taken: Taken, sent: float, lease_duration: float) -> None:
        #: deliveries that were running when a worker died, by id, until they have ended
        self.suspects: dict[int, Suspect] = dict(taken.suspects)
        #: handlers and keys of which followers are set aside
        self.behind: set[Pair] = set(taken.behind)
        #: followers of a blocked key may be waiting among the ready ones
        self.blocked = bool(taken.behind)
        #: what may run, by id; an entry stays until its end is confirmed
        self.started: dict[int, Delivery] = {}
        #: what is claimed ahead, in claim order
        self.prefetched: deque[Delivery] = deque()
        #: there may be more to claim
        self.ready = True
        #: claim nothing more, hand it back once it is empty
        self.draining = False
        #: something was claimed from it
        self.yielded = False
        self.lost = False
        #: somebody has it locked: not to be asked again before (monotonic seconds)
        self.not_before = 0.0
        self.taken_at = self.worked_at = sent
        self.renewed(taken.lease, sent, lease_duration)

    def renewed(self, lease: Lease, sent: float, lease_duration: float) -> None:
        """The lease was written by a statement sent at *sent* (monotonic seconds).

        The database set its end later than that, so this deadline is never too late.
        """
        self.lease = lease
        self.deadline = sent + lease_duration
        self.renew_at = sent + lease_duration / 3

    @property
    def renewal_at(self) -> float:
        """When an exchange may renew the lease, and ought to."""
        return max(self.renew_at, self.not_before)

    def live(self, now: float) -> bool:
        """Whether a delivery of this lane may start now."""
        return not self.lost and now < self.deadline

    def claimable(self, now: float) -> bool:
        """Whether to claim from it."""
        return (
            self.ready
            and not self.draining
            and self.not_before <= now
            and len(self.started) + len(self.prefetched) < LANE_IN_FLIGHT
        )

    @property
    def empty(self) -> bool:
        return not self.started and not self.prefetched

    @property
    def in_flight(self) -> Iterator[Delivery]:
        """What runs or waits to run, or has ended and is not confirmed."""
        yield from self.started.values()
        yield from self.prefetched

    def count(self, pair: Pair) -> int:
        """How many of *pair* are in flight."""
        return sum((each.handler, each.key) == pair for each in self.in_flight)

    def compare(
        self, stored: LaneState | None, holder: UUID, unsure: Container[int] = ()
    ) -> Literal["same", "written", "lost"]:
        """What became of the lane, by how the store has it now.

        same: as the last confirmed statement left it. written: once more than that, by a statement
        of unknown outcome to one of the *unsure* lanes. lost: by anybody else, or unaccounted for.
        """
        lease = self.lease
        if stored is None or stored.holder != holder or stored.lease.epoch != lease.epoch:
            return "lost"
        if stored.lease.version == lease.version:
            return "same"
        if lease.lane in unsure and stored.lease.version == lease.version + 1:
            return "written"
        return "lost"
