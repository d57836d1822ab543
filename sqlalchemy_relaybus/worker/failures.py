"""Deliveries that did not complete: recorded one batch at a time, before anything else."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from uuid import UUID

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from ..exc import LostLeaseError, first_line
from ..stores.base import Delivery, Park, Store
from .flight import RETRY_LOCKED, Flight
from .followers import Followers
from .hold import Hold

log = logging.getLogger("sqlalchemy_relaybus.worker")


class Failures:
    """What is to be parked: rescheduled, snoozed or buried.

    It is recorded before the next exchange is sent, and no exchange is outstanding meanwhile. That
    keeps the order of keys: an exchange sent later finds the followers held back by the store.
    """

    def __init__(
        self,
        store: Store,
        holder: UUID,
        flight: Flight,
        followers: Followers,
        unblock: Callable[[Iterable[Delivery]], None],
    ) -> None:
        self._store = store
        self._holder = holder
        self._flight = flight
        self._followers = followers
        self._unblock = unblock
        self._parks: dict[int, Park] = {}
        #: buried without having run: nothing of their keys was blocked for them
        self._unrun: set[int] = set()
        #: when to record them, at the earliest (monotonic seconds)
        self.record_at = 0.0

    def __bool__(self) -> bool:
        return bool(self._parks)

    def add(self, park: Park, *, ran: bool = True) -> None:
        """Have *park* recorded; *ran*: the dispatcher has blocked its handler and key."""
        self._parks[park.delivery.id] = park
        if not ran:
            self._unrun.add(park.delivery.id)
        self.record_at = 0.0

    def concern(self, delivery: Delivery) -> bool:
        """Whether one of *delivery*'s handler and key is yet to be recorded: it must not start."""
        return delivery.key is not None and any(
            (park.delivery.handler, park.delivery.key) == (delivery.handler, delivery.key)
            for park in self._parks.values()
        )

    def forget(self, hold: Hold) -> None:
        """The lane is lost: whoever has it sees to what failed."""
        unblocked = []
        for id in hold.started:
            park = self._parks.pop(id, None)
            if park is not None and id not in self._unrun:
                unblocked.append(park.delivery)
            self._unrun.discard(id)
        self._unblock(unblocked)

    def record(self, connection: Connection, now: float) -> float | None:
        """Record what is due; in how many seconds the first of it is to be tried again."""
        if not self._parks or now < self.record_at:
            return None
        # set before the statement is sent: one that is held up by somebody's lock is not to be
        # the first thing that the next round tries, too
        self.record_at = now + RETRY_LOCKED
        parks = list(self._parks.values())
        delays: list[float] = []
        try:
            delays += self._record(connection, parks)
        except DBAPIError as error:
            if error.connection_invalidated or self._store.held_up(error):
                raise
            # one that the store refuses must not keep the others from being recorded
            for park in parks:
                try:
                    delays += self._record(connection, [park])
                except DBAPIError as single:
                    if single.connection_invalidated:
                        raise
                    log.error(
                        "%r could not be recorded as %s (%s); trying again",
                        park.delivery,
                        park.status,
                        first_line(single),
                    )
        if self._parks:
            self.record_at = time.monotonic() + RETRY_LOCKED
            for park in self._parks.values():
                # claiming what waits for it would only have it refused; other keys go on
                park.delivery.hold.not_before = self.record_at - RETRY_LOCKED / 2
        return min(delays, default=None)

    def _record(self, connection: Connection, parks: list[Park]) -> list[float]:
        parked, locked = self._store.park(connection, self._holder, parks)
        ended = [park for park in parks if park.delivery.id not in locked]
        for park in ended:
            delivery = park.delivery
            del self._parks[delivery.id]
            # what an exchange claimed ahead while the failure waited to be recorded
            self._flight.drop_followers(delivery)
            delivery.hold.started.pop(delivery.id, None)
            delivery.hold.ready = True
            if delivery.id in parked:
                self._followers.failed(delivery, blocks=park.blocks)
            else:
                log.warning("%s", LostLeaseError(delivery.lane, delivery.id))
        self._unblock(park.delivery for park in ended if park.delivery.id not in self._unrun)
        self._unrun.difference_update(park.delivery.id for park in ended)
        return [park.delay for park in ended if park.delay is not None]
