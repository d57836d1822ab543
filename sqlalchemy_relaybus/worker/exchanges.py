"""Exchanges: what the pump asks the store for, and what becomes of the answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from uuid import UUID

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from ..exc import LostLeaseError
from ..router import Handler
from ..settings import Settings
from ..stores.base import Delivery, Exchange, Exchanged, LaneRequest, Lease, Park, Store
from .dispatch import Dispatcher, bury, is_exhausted
from .failures import Failures
from .flight import RETRY_LOCKED, Flight
from .followers import Followers
from .hold import LANE_IN_FLIGHT, Hold
from .isolation import Isolation, is_culprit
from .pace import Pace
from .takeover import Holds

log = logging.getLogger("sqlalchemy_relaybus.worker")

#: For how long exchanges step over locked rows after one was met, seconds.
CAREFUL = 1.0


class Exchanges:
    """Sends one exchange at a time, and finds out what one did whose reply was lost."""

    def __init__(
        self,
        store: Store,
        holder: UUID,
        handlers: Mapping[str, Handler],
        settings: Settings,
        holds: Holds,
        flight: Flight,
        failures: Failures,
        followers: Followers,
        isolation: Isolation,
        pace: Pace,
        dispatcher: Dispatcher,
    ) -> None:
        self._store = store
        self._holder = holder
        self._handlers = handlers
        self._settings = settings
        self._holds = holds
        self._flight = flight
        self._failures = failures
        self._followers = followers
        self._isolation = isolation
        self._pace = pace
        self._dispatcher = dispatcher
        self._careful_until = 0.0
        #: the exchange of unknown outcome, and what it was to record as started
        self._unsure: tuple[Exchange, list[Delivery]] | None = None
        #: finished deliveries that it may have deleted already, or stepped over
        self._perhaps_gone: set[int] = set()
        #: lanes of a renewal of unknown outcome
        self._renewing: set[int] = set()

    def send(self, connection: Connection, *, stopping: bool) -> None:
        """Exchange; *stopping*: claim and begin nothing more."""
        request, promoted, claiming = self._request(stopping)
        if not request.lanes:
            return
        sent = time.monotonic()
        self._unsure = request, promoted
        try:
            reply = self._store.exchange(connection, self._holder, request)
        except DBAPIError as error:
            if error.connection_invalidated or not self._store.held_up(error):
                raise  # the outcome is unknown, or the connection is of no use
            # it did nothing: somebody has locked a row of ours
            self._unsure = None
            self._flight.put_back(promoted)
            self._careful_until = time.monotonic() + CAREFUL
            log.warning("somebody else holds a lock on this worker's rows: stepping over them")
            self.renew(connection)
            return
        self._unsure = None
        self._renewed(reply.leases, sent)
        self._completed(request, reply)
        self._start(promoted, reply)
        self._claimed(reply, request, claiming)
        if reply.refused:  # last: it may fail, and by now the reply is taken note of
            self._verify(connection, reply.refused)

    def renew(self, connection: Connection) -> None:
        """Renew the leases and nothing else: what holds an exchange up may do so for long."""
        now = time.monotonic()
        holds = [hold for hold in self._holds if now >= hold.renew_at]
        if holds:
            self._renewing = {hold.lease.lane for hold in holds}
            leases = self._store.renew(
                connection,
                self._holder,
                [hold.lease for hold in holds],
                self._settings.lease_duration,
            )
            self._renewing = set()
            self._renewed(leases, now)

    def _request(self, stopping: bool) -> tuple[Exchange, list[Delivery], list[Hold]]:
        now = time.monotonic()
        settings, flight = self._settings, self._flight
        isolating = self._isolation.wanted(self._holds)
        group = self._isolation.group(self._holds) if isolating else None
        room = 0 if stopping or isolating else flight.room
        holds: dict[int, tuple[Hold, bool, bool]] = {}  # claim, write
        claiming = self._holds.choose(self._pace.width) if room else []
        for hold in claiming:
            holds[hold.lease.lane] = hold, True, False

        def write(hold: Hold) -> None:
            lane = hold.lease.lane
            holds[lane] = hold, lane in holds and holds[lane][1], True

        finished = [d for d in flight.finished.values() if not d.hold.lost]
        for delivery in finished:
            write(delivery.hold)
        # what was claimed ahead may start before anything new does: that keeps the order of keys
        promoted: list[Delivery] = []
        # one lease to renew takes along those that would follow soon
        soon = now
        if any(hold.renewal_at <= now for hold in self._holds):
            soon += settings.lease_duration / 6
        for hold in self._holds.in_turn():
            if hold.renewal_at <= soon and hold.not_before <= now:
                write(hold)
            if hold.prefetched and not stopping and (fit := flight.promote(hold, group)):
                promoted += fit
                write(hold)
        asked = [hold for hold, _, _ in holds.values()]
        starts = 0  # how many of those claimed may begin at once
        if not flight.prefetched and not self._isolation.expected(claiming):
            starts = flight.load.free()
        request = Exchange(
            lanes=[LaneRequest(hold.lease, claim, must) for hold, claim, must in holds.values()],
            finished=finished,
            started=[
                delivery
                for hold in asked
                for id, delivery in hold.started.items()
                if id not in flight.finished
            ],
            prefetched=[delivery for hold in asked for delivery in hold.prefetched],
            handlers=list(self._handlers),
            limit=room,
            per_lane=max(1, min(LANE_IN_FLIGHT, -(-room // max(1, len(claiming))))),
            room=starts,
            # threads of handlers that ran out of time are running still
            company=flight.load.deliveries + min(room, starts) + self._dispatcher.left_behind,
            lease_duration=settings.lease_duration,
            careful=now < self._careful_until,
        )
        return request, promoted, claiming

    def _renewed(self, leases: Mapping[int, Lease], sent: float) -> None:
        for lane, lease in leases.items():
            hold = self._holds.get(lane)
            if hold is not None:
                hold.renewed(lease, sent, self._settings.lease_duration)

    def _completed(self, request: Exchange, reply: Exchanged) -> None:
        """The finished deliveries whose lanes were fenced are over, deleted or refused."""
        for delivery in request.finished:
            if delivery.lane not in reply.leases:
                continue
            self._flight.finished.pop(delivery.id, None)
            if delivery.id in reply.locked:
                self._flight.lock(delivery)
                self._careful_until = self._flight.retry_locked_at + CAREFUL
                continue
            delivery.hold.started.pop(delivery.id, None)
            if delivery.id not in reply.deleted and delivery.id not in self._perhaps_gone:
                log.warning("%s", LostLeaseError(delivery.lane, delivery.id))
            self._perhaps_gone.discard(delivery.id)

    def _start(self, promoted: list[Delivery], reply: Exchanged) -> None:
        """Run what this exchange recorded as started; put the rest back."""
        recorded = [d for d in promoted if d.lane in reply.leases]
        if recorded:
            self._dispatcher.submit(recorded)
        self._flight.put_back([d for d in promoted if d.lane not in reply.leases])

    def _claimed(self, reply: Exchanged, request: Exchange, claiming: list[Hold]) -> None:
        now = time.monotonic()
        counts = dict.fromkeys((hold.lease.lane for hold in claiming), 0)
        start: list[Delivery] = []
        held_up: list[int] = []
        for deliveries, starts in ((reply.startable, True), (reply.prefetched, False)):
            for delivery in deliveries:
                counts[delivery.lane] += 1
                hold = self._holds.get(delivery.lane)
                if hold is None:
                    continue  # lost meanwhile
                delivery.hold = hold
                hold.worked_at = now
                hold.yielded = True
                if self._failures.concern(delivery):
                    # claimed again when that has been recorded, which makes the lane ready
                    held_up.append(delivery.lane)
                    continue
                self._followers.passed(delivery)
                if (park := self._unfit(delivery)) is not None:
                    hold.started[delivery.id] = delivery
                    self._failures.add(park, ran=False)
                elif starts:
                    hold.started[delivery.id] = delivery
                    start.append(delivery)
                else:
                    self._flight.prefetch(hold, delivery)
        self._flight.load.begin(start)
        total = sum(counts.values())
        for hold in claiming:
            full = counts[hold.lease.lane] >= request.per_lane
            hold.ready = (full or total >= request.limit) and hold.lease.lane not in held_up
        # what is held up is found by every look: no reason for another one soon
        self._pace.claimed(total - len(held_up), request.limit, more=self._holds.any_ready)
        if start:
            self._dispatcher.submit(start)

    def _unfit(self, delivery: Delivery) -> Park | None:
        """Why a claimed delivery is buried instead of run."""
        if delivery.event is None:
            return bury(delivery, "its event is gone from the events table", charge=0, blocks=False)
        handler = self._handlers[delivery.handler]
        blocks = handler.on_dead != "skip"
        suspect = delivery.hold.suspects.get(delivery.id)
        if suspect is not None and is_culprit(suspect):
            reason = (
                f"its worker died {suspect.crashes} times while it ran, in the end with nothing "
                "else running"
            )
            return bury(delivery, reason, charge=0, blocks=blocks)
        if delivery.attempts and is_exhausted(handler, delivery.attempts):
            return bury(
                delivery, f"{delivery.attempts} attempts are used up", charge=0, blocks=blocks
            )
        return None

    # -- unknown outcomes ----------------------------------------------------------------------

    def _verify(self, connection: Connection, lanes: Iterable[int]) -> None:
        """Lanes that an exchange was to write and did not: lost, locked or moved?"""
        now = time.monotonic()
        wanted = list(lanes)
        stored = self._store.read_lanes(connection, wanted)
        for lane in wanted:
            hold = self._holds.get(lane)
            if hold is None:
                continue
            if hold.compare(stored.get(lane), self._holder) == "lost":
                self._lose(lane)
                continue
            # still ours: its row has moved, or somebody has it locked
            hold.lease = stored[lane].lease
            hold.ready = True
            if now < self._careful_until:
                hold.renew_at = hold.not_before = now + RETRY_LOCKED
                self._careful_until = hold.renew_at + CAREFUL

    def settle(self, connection: Connection) -> None:
        """On a new connection: find out what the last exchange on the old one did.

        Of each lane it asked for the stored version is the one it named: it did not happen and is
        sent again; or one more: it committed, so what it was to delete is gone and what it claimed
        and never told us is given back by the next exchange. Anything else: the lane is lost.
        """
        request, promoted = self._unsure or (None, [])
        self._holds.drop_strays(connection)
        lanes = [hold.lease.lane for hold in self._holds]
        stored = self._store.read_lanes(connection, lanes) if lanes else {}
        asked = {lane.lease.lane for lane in request.lanes} if request is not None else set()
        asked |= self._renewing
        self._unsure, self._renewing = None, set()  # not earlier: reading may fail as well
        committed: set[int] = set()
        for lane in lanes:
            hold = self._holds.get(lane)
            assert hold is not None
            outcome = hold.compare(stored.get(lane), self._holder, asked)
            if outcome == "lost":
                self._lose(lane)
                continue
            hold.lease = stored[lane].lease
            if outcome == "written":
                hold.ready = True
                committed.add(lane)
        if request is None:
            return
        for delivery in request.finished:
            if delivery.lane not in committed:
                continue
            if request.careful:
                # which rows it stepped over was in the reply: what it deleted is deleted in vain
                self._perhaps_gone.add(delivery.id)
            else:
                self._flight.finished.pop(delivery.id, None)
                delivery.hold.started.pop(delivery.id, None)
        # Recorded as started or not: they were not handed to the dispatcher, and before anything
        # later of their keys they are offered again.
        self._flight.put_back(promoted)

    def _lose(self, lane: int) -> None:
        hold = self._holds.lose(lane)
        self._isolation.lost(hold)
        self._perhaps_gone.difference_update(hold.started)
        self._flight.forget(hold)
        self._failures.forget(hold)
