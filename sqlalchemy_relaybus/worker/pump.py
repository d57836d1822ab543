"""The pump: the one thread of a worker that talks to the store about its lanes.

It has one statement outstanding at a time. While it waits for a reply, handlers run what earlier
replies brought; what they report meanwhile goes with the next statement. Nothing that a handler
does can keep it from renewing the leases.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from uuid import UUID

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from ..exc import LostLeaseError
from ..retry import exhausted
from ..router import Handler
from ..settings import Settings
from ..stores.base import Delivery, Exchange, Exchanged, LaneRequest, Lease, Park, Store
from .dispatch import Dispatcher, Outcome, bury
from .load import Load
from .takeover import LANE_IN_FLIGHT, Hold, Holds

log = logging.getLogger("sqlalchemy_relaybus.worker")

#: Lanes served by one exchange: as few as fill the batch (a lane's row is written each time).
LEAST_LANES = 4
MOST_LANES = 64
#: Longest wait between tries to reach the database, seconds.
MAX_RECONNECT = 5.0
#: SQLSTATEs of a statement that waited too long for a lock, or was cancelled: it did nothing.
_TIMED_OUT = frozenset({"55P03", "57014"})
#: How often a worker says that it is alive and looks who else is, seconds. A worker that joins
#: has its share of the lanes after this time and that of the handlers that run on them.
ENLIST = 5.0
#: How long to wait before a row that somebody else has locked is tried again, seconds.
RETRY_LOCKED = 0.25
#: For how long exchanges step over locked rows after one was met, seconds.
CAREFUL = 1.0
#: How often plain functions are checked against their time limits, seconds.
_EXPIRY_CHECK = 0.05


class Pump:
    """Claims, completes, parks and renews, until it is told to stop and all is handed back."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        holder: UUID,
        handlers: Mapping[str, Handler],
        settings: Settings,
    ) -> None:
        self._engine = engine
        self._store = store
        self._holder = holder
        self._handlers = handlers
        self._settings = settings
        self._holds = Holds(engine, store, holder, handlers, settings)
        self._dispatcher: Dispatcher | None = None
        self._timed = any(
            handler.timeout is not None and not handler.injection.is_async
            for handler in handlers.values()
        )

        self._signal = threading.Event()
        self._inbox: deque[Sequence[Outcome]] = deque()
        self._enough = 1  # reports that are worth waking up for
        self._hinted = False
        self._stop_by: float | None = None
        self._aborted = False
        self._last_moments = 0.0  # of the grace, for what is cancelled

        self._finished: dict[int, Delivery] = {}
        self._parks: dict[int, Park] = {}
        self._park_at = 0.0
        self._load = Load(handlers, settings)
        self._prefetched = 0
        self._width = LEAST_LANES
        self._careful_until = 0.0
        self._locked: dict[int, Delivery] = {}  # finished, and locked by somebody else
        self._retry_locked_at = 0.0
        #: buried without having run: nothing of their keys was blocked for them
        self._unrun: set[int] = set()
        self._unsure: tuple[Exchange, list[Delivery]] | None = None
        self._renewing: set[int] = set()  # lanes of a renewal with an unknown outcome

        self._enlist_at = 0.0
        self._look_at = 0.0
        self._look_pause = settings.poll_interval
        self._hungry = True  # something was claimed since the last look: there may be more
        self._minor_since: float | None = None

    def attach(self, dispatcher: Dispatcher) -> None:
        """Where claimed deliveries are run; it reports to :meth:`report`."""
        self._dispatcher = dispatcher

    # -- from other threads --------------------------------------------------------------------

    def report(self, outcomes: Sequence[Outcome]) -> None:
        """Tell how deliveries ended. What is told together is taken note of together."""
        self._inbox.append(outcomes)
        if len(self._inbox) >= self._enough and not self._signal.is_set():
            self._signal.set()

    def hint(self) -> None:
        """There may be new work: look now rather than at the next poll."""
        self._hinted = True
        self._signal.set()

    def stop(self, grace: float) -> None:
        """Claim nothing more, let running handlers end within *grace* seconds, hand all back."""
        if self._stop_by is None:
            # cancelled coroutines get the last moments of it to end
            self._last_moments = min(1.0, grace / 4)
            self._stop_by = time.monotonic() + grace - self._last_moments
        self._signal.set()

    # -- the thread ----------------------------------------------------------------------------

    def run(self) -> bool:
        """Pump until stopped; whether everything that had started has ended by then."""
        failures = 0
        while True:
            reached: float | None = None
            try:
                with self._engine.connect().execution_options(
                    isolation_level="AUTOCOMMIT"
                ) as connection:
                    self._store.prepare(
                        connection,
                        lock_timeout=min(1.0, self._settings.lease_duration / 10),
                        timeout=self._settings.lease_duration / 4,
                    )
                    self._settle(connection)
                    if failures:
                        log.warning("reached the database again")
                    reached = time.monotonic()
                    self._enlist_at = self._park_at = 0.0
                    return self._serve(connection)
            except (DBAPIError, PoolTimeoutError, OSError) as error:
                # one that fails again and again after a good start is no better than none
                lasted = time.monotonic() - reached if reached is not None else 0.0
                failures = 1 if lasted > MAX_RECONNECT else failures + 1
                if self._stop_by is not None and time.monotonic() >= self._stop_by:
                    log.error("stopping without the database; leases run out by themselves")
                    return False
                pause = min(MAX_RECONNECT, 0.1 * 2 ** min(failures, 10)) * random.uniform(0.5, 1)
                log.warning(
                    "the database failed (%s); trying again in %.1f s", _first_line(error), pause
                )
                self._sit_out(pause)

    def _serve(self, connection: Connection) -> bool:
        while True:
            self._signal.clear()
            try:
                wait = self._step(connection)
            except DBAPIError as error:
                if _sqlstate(error) not in _TIMED_OUT or error.connection_invalidated:
                    raise
                # The statement did nothing: somebody has locked what it needs, perhaps for long.
                log.warning("held up by somebody else's lock (%s)", _first_line(error))
                self._renew(connection)
                continue
            if wait is None:
                return self._end(connection)
            if wait > 0:
                self._wait(wait)

    def _step(self, connection: Connection) -> float | None:
        """One round; how long to wait until the next, seconds, or ``None`` at the end."""
        now = time.monotonic()
        self._collect(now)
        self._expire(now)
        # What is next is set before a statement is sent: one that is held up by somebody's lock is
        # not to be the first thing that the next round tries, too.
        if self._stop_by is not None and self._stopped(now):
            return None
        if self._parks and now >= self._park_at:
            self._park_at = now + RETRY_LOCKED
            self._park(connection)
        if self._stop_by is None:
            if now >= self._enlist_at:
                self._enlist_at = now + min(ENLIST, self._settings.lease_duration / 3)
                self._holds.enlist(connection)
            self._look(connection, now)
        wait = self._exchange_if_due(connection)
        if self._stop_by is None:
            self._holds.hand_back(connection)
        return wait

    def _sit_out(self, seconds: float) -> None:
        """Wait for *seconds*, whatever handlers report meanwhile; at most until the stop's end."""
        end = time.monotonic() + seconds
        while True:
            until = end if self._stop_by is None else min(end, self._stop_by)
            left = until - time.monotonic()
            if left <= 0:
                return
            self._signal.clear()
            self._signal.wait(left)

    def _wait(self, seconds: float) -> None:
        if len(self._inbox) < self._enough:
            self._signal.wait(seconds)
        self._enough = 1

    # -- what handlers reported ----------------------------------------------------------------

    def _collect(self, now: float) -> None:
        """Take note of what ended. No exchange is outstanding.

        Whatever did not complete blocks its handler and key in the dispatcher. A failure, with
        the followers that are told together with it, is unblocked once it is recorded. One that is
        given back at once: its followers were refused or given back too, and from the next
        exchange on all of them are claimed in order again.
        """
        unblocked: list[Delivery] = []
        while self._inbox:
            ended: list[Delivery] = []
            failed = False
            for delivery, end in self._inbox.popleft():
                self._load.end(delivery)
                hold: Hold = delivery.hold
                hold.worked_at = now
                if end == "done" or end == "gone":
                    if hold.lost:
                        if end == "done":
                            log.warning("%s", LostLeaseError(delivery.lane, delivery.id))
                    elif end == "gone":
                        hold.started.pop(delivery.id, None)
                    else:
                        self._finished[delivery.id] = delivery
                    continue
                if end == "refused":
                    # whatever blocks its key makes the lane ready again when it is recorded
                    hold.started.pop(delivery.id, None)
                    continue
                self._drop_followers(hold, delivery)
                if hold.lost or not isinstance(end, Park):
                    hold.started.pop(delivery.id, None)
                    hold.ready = True
                    if end == "lost":  # refused, and perhaps again and again
                        hold.not_before = now + RETRY_LOCKED
                    ended.append(delivery)
                    if isinstance(end, Park):
                        log.warning("%s", LostLeaseError(delivery.lane, delivery.id))
                else:
                    self._parks[delivery.id] = end
                    self._park_at = now
                    failed = True
            if not failed:  # else its key stays blocked until the failure is recorded
                unblocked += ended
        self._unblock(unblocked)

    def _drop_followers(self, hold: Hold, head: Delivery) -> None:
        """Give back what was claimed ahead of the same handler and key."""
        if head.key is None or not hold.prefetched:
            return
        before = len(hold.prefetched)
        hold.prefetched = deque(
            each for each in hold.prefetched if each.key != head.key or each.handler != head.handler
        )
        self._prefetched -= before - len(hold.prefetched)

    def _unblock(self, deliveries: Iterable[Delivery]) -> None:
        assert self._dispatcher is not None
        self._dispatcher.unblock(
            (delivery.handler, delivery.key) for delivery in deliveries if delivery.key is not None
        )

    def _expire(self, now: float) -> None:
        if self._timed:
            assert self._dispatcher is not None
            self._dispatcher.expire(now)

    # -- failures ------------------------------------------------------------------------------

    def _park(self, connection: Connection) -> None:
        """Record failures before the next exchange is sent.

        That order keeps the order of keys: an exchange sent after the failure was recorded finds
        the followers held back by the store, and none is outstanding meanwhile.
        """
        parks = list(self._parks.values())
        try:
            self._record(connection, parks)
        except DBAPIError as error:
            if error.connection_invalidated or _sqlstate(error) in _TIMED_OUT:
                raise
            # one that the store refuses must not keep the others from being recorded
            for park in parks:
                try:
                    self._record(connection, [park])
                except DBAPIError as single:
                    if single.connection_invalidated:
                        raise
                    log.error(
                        "%r could not be recorded as %s (%s); trying again",
                        park.delivery,
                        park.status,
                        _first_line(single),
                    )
        if self._parks:
            self._park_at = time.monotonic() + RETRY_LOCKED
            for park in self._parks.values():
                # claiming what waits for it would only have it refused; other keys go on
                park.delivery.hold.not_before = self._park_at - RETRY_LOCKED / 2

    def _record(self, connection: Connection, parks: list[Park]) -> None:
        parked, locked = self._store.park(connection, self._holder, parks)
        ended = [park for park in parks if park.delivery.id not in locked]
        for park in ended:
            delivery = park.delivery
            del self._parks[delivery.id]
            # what an exchange claimed ahead while the failure waited to be recorded
            self._drop_followers(delivery.hold, delivery)
            delivery.hold.started.pop(delivery.id, None)
            delivery.hold.ready = True
            if delivery.id not in parked:
                log.warning("%s", LostLeaseError(delivery.lane, delivery.id))
            if park.delay is not None:
                self._look_at = min(self._look_at, time.monotonic() + park.delay)
        self._unblock(park.delivery for park in ended if park.delivery.id not in self._unrun)
        self._unrun.difference_update(park.delivery.id for park in ended)

    # -- looking for work ----------------------------------------------------------------------

    def _look(self, connection: Connection, now: float) -> None:
        room = self._room > 0
        starved = self._hungry and room and not self._holds.any_ready
        if not (starved or self._hinted or now >= self._look_at):
            return
        self._hinted = self._hungry = False
        # jitter keeps the workers from looking all at once
        pause = self._look_pause * random.uniform(0.75, 1.0)
        self._look_pause = min(self._look_pause * 2, self._settings.max_poll_interval)
        self._look_at = now + pause
        soonest = self._holds.look(connection, all=room)
        if soonest is not None:
            pause = min(pause, max(soonest, 0.001))
        self._look_at = time.monotonic() + pause

    # -- the exchange --------------------------------------------------------------------------

    @property
    def _room(self) -> int:
        """How many more deliveries to claim."""
        settings = self._settings
        most = settings.concurrency + settings.prefetch - self._load.slots - self._prefetched
        return max(0, min(settings.batch, most))

    @property
    def _idle(self) -> float:
        """The largest free share of an executor for which something is prefetched."""
        if not self._prefetched:
            return 0.0
        waiting = {delivery.handler for hold in self._holds for delivery in hold.prefetched}
        return max(map(self._load.idle, waiting), default=0.0)

    def _exchange_if_due(self, connection: Connection) -> float:
        """Exchange, if there is reason enough to; how long to wait otherwise, seconds."""
        now = time.monotonic()
        settings = self._settings
        stopping = self._stop_by is not None
        if self._locked and now >= self._retry_locked_at:
            self._finished.update(self._locked)
            self._locked.clear()
        room = 0 if stopping else self._room
        claims = room > 0 and self._holds.any_ready
        idle = 0.0 if stopping else self._idle
        starts = idle > 0
        renew_at = min((hold.renew_at for hold in self._holds), default=now + 3600)
        if (
            renew_at <= now
            or len(self._finished) * 2 >= settings.batch
            or (claims and room * 4 >= min(settings.batch, settings.concurrency))
            or idle >= 0.5
            or (not self._load.deliveries and (claims or starts or self._finished))
        ):
            self._exchange(connection)
            return 0.0
        if self._finished or claims or starts:
            # not much: wait a little for more to go along
            if self._minor_since is None:
                self._minor_since = now
            ripe = self._minor_since + settings.completion_window
            if now >= ripe:
                self._exchange(connection)
                return 0.0
            enough = settings.batch // 2 - len(self._finished)
            self._enough = max(1, min(self._load.deliveries, enough))
            return ripe - now
        wake = min(renew_at, self._enlist_at)
        if not stopping:
            wake = min(wake, self._look_at)
        elif self._stop_by is not None:
            wake = min(wake, now + 0.05)
        if self._parks:
            wake = min(wake, self._park_at)
        if self._locked:
            wake = min(wake, self._retry_locked_at)
        if self._timed and self._load.deliveries:
            wake = min(wake, now + _EXPIRY_CHECK)
        return max(0.0005, wake - now)

    def _exchange(self, connection: Connection) -> None:
        request, promoted, claiming = self._request()
        self._minor_since = None
        if not request.lanes:
            return
        sent = time.monotonic()
        self._unsure = request, promoted
        try:
            reply = self._store.exchange(connection, self._holder, request)
        except DBAPIError as error:
            if _sqlstate(error) not in _TIMED_OUT or error.connection_invalidated:
                raise  # the outcome is unknown, or the connection is of no use
            # it did nothing: somebody has locked a row of ours
            self._unsure = None
            self._put_back(promoted)
            self._careful_until = time.monotonic() + CAREFUL
            log.warning("somebody else holds a lock on this worker's rows: stepping over them")
            self._renew(connection)
            return
        self._unsure = None
        self._renewed(reply.leases, sent)
        suspects = [
            lane.lease.lane
            for lane in request.lanes
            if lane.write and lane.lease.lane not in reply.leases
        ]
        self._completed(request, reply)
        self._start(promoted, reply)
        self._claimed(reply, request, claiming)
        if suspects:  # last: it may fail, and by now the reply is taken note of
            self._verify(connection, suspects)

    def _renew(self, connection: Connection) -> None:
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

    def _request(self) -> tuple[Exchange, list[Delivery], list[Hold]]:
        now = time.monotonic()
        settings = self._settings
        stopping = self._stop_by is not None
        room = 0 if stopping else self._room
        holds: dict[int, tuple[Hold, bool, bool]] = {}  # claim, write
        claiming = self._holds.choose(self._width) if room else []
        for hold in claiming:
            holds[hold.lease.lane] = hold, True, False

        def write(hold: Hold) -> None:
            lane = hold.lease.lane
            holds[lane] = hold, lane in holds and holds[lane][1], True

        finished = [d for d in self._finished.values() if not d.hold.lost]
        for delivery in finished:
            write(delivery.hold)
        # what was claimed ahead may start before anything new does: that keeps the order of keys
        promoted: list[Delivery] = []
        for hold in self._holds.in_turn():
            if now >= hold.renew_at:
                write(hold)
            if hold.prefetched and not stopping and (fit := self._promote(hold)):
                promoted += fit
                write(hold)
        asked = [hold for hold, _, _ in holds.values()]
        request = Exchange(
            lanes=[LaneRequest(hold.lease, claim, must) for hold, claim, must in holds.values()],
            finished=finished,
            started=[
                delivery
                for hold in asked
                for id, delivery in hold.started.items()
                if id not in self._finished
            ],
            prefetched=[delivery for hold in asked for delivery in hold.prefetched],
            handlers=list(self._handlers),
            limit=room,
            per_lane=max(1, min(LANE_IN_FLIGHT, -(-room // max(1, len(claiming))))),
            room=0 if self._prefetched else self._load.free(),
            lease_duration=settings.lease_duration,
            careful=now < self._careful_until,
        )
        return request, promoted, claiming

    def _promote(self, hold: Hold) -> list[Delivery]:
        """Move what can begin from the prefetched to the started; it runs when that is recorded."""
        fit: list[Delivery] = []
        rest: deque[Delivery] = deque()
        for delivery in hold.prefetched:
            if self._load.fits(delivery):
                self._load.begin((delivery,))
                hold.started[delivery.id] = delivery
                fit.append(delivery)
            else:
                rest.append(delivery)
        hold.prefetched = rest
        self._prefetched -= len(fit)
        return fit

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
            self._finished.pop(delivery.id, None)
            if delivery.id in reply.locked:
                self._locked[delivery.id] = delivery
                self._retry_locked_at = time.monotonic() + RETRY_LOCKED
                self._careful_until = self._retry_locked_at + CAREFUL
                continue
            delivery.hold.started.pop(delivery.id, None)
            if delivery.id not in reply.deleted:
                log.warning("%s", LostLeaseError(delivery.lane, delivery.id))

    def _start(self, promoted: list[Delivery], reply: Exchanged) -> None:
        """Run what this exchange recorded as started; put the rest back."""
        assert self._dispatcher is not None
        recorded = [d for d in promoted if d.lane in reply.leases]
        if recorded:
            self._dispatcher.submit(recorded)
        self._put_back([d for d in promoted if d.lane not in reply.leases])

    def _put_back(self, promoted: list[Delivery]) -> None:
        for delivery in reversed(promoted):
            self._load.end(delivery)
            hold: Hold = delivery.hold
            if not hold.lost:
                hold.started.pop(delivery.id, None)
                hold.prefetched.appendleft(delivery)
                self._prefetched += 1

    def _claimed(self, reply: Exchanged, request: Exchange, claiming: list[Hold]) -> None:
        assert self._dispatcher is not None
        now = time.monotonic()
        counts = dict.fromkeys((hold.lease.lane for hold in claiming), 0)
        start: list[Delivery] = []
        for deliveries, starts in ((reply.startable, True), (reply.prefetched, False)):
            for delivery in deliveries:
                counts[delivery.lane] += 1
                hold = self._holds.get(delivery.lane)
                if hold is None:
                    continue  # lost meanwhile
                delivery.hold = hold
                hold.worked_at = now
                hold.fruitful = True
                if (park := self._unfit(delivery)) is not None:
                    hold.started[delivery.id] = delivery
                    self._unrun.add(delivery.id)
                    self._parks[delivery.id] = park
                    self._park_at = now
                elif starts:
                    hold.started[delivery.id] = delivery
                    start.append(delivery)
                else:
                    hold.prefetched.append(delivery)
                    self._prefetched += 1
        self._load.begin(start)
        total = sum(counts.values())
        for hold in claiming:
            full = counts[hold.lease.lane] >= request.per_lane
            hold.ready = full or total >= request.limit
        if total:
            self._hungry = True
            self._look_pause = self._settings.poll_interval
        # every lane served costs a write of its row, now and when its deliveries finish
        if total >= request.limit:
            self._width = max(LEAST_LANES, self._width // 2)
        elif total * 2 < request.limit and self._holds.any_ready:
            self._width = min(self._width * 2, MOST_LANES)
        if start:
            self._dispatcher.submit(start)

    def _unfit(self, delivery: Delivery) -> Park | None:
        """Why a claimed delivery is buried instead of run."""
        if delivery.event is None:
            return bury(delivery, "its event is gone from the events table", charge=0)
        if delivery.attempts and exhausted(
            self._handlers[delivery.handler].retry, delivery.attempts
        ):
            reason = f"{delivery.attempts} attempts are used up; in the last, its worker died"
            return bury(delivery, reason, charge=0)
        return None

    # -- unknown outcomes ----------------------------------------------------------------------

    def _verify(self, connection: Connection, lanes: Iterable[int]) -> None:
        """Lanes that an exchange should have written and did not: lost, locked or moved?"""
        now = time.monotonic()
        wanted = list(lanes)
        stored = self._store.read_lanes(connection, wanted)
        for lane in wanted:
            hold = self._holds.get(lane)
            if hold is None:
                continue
            state = stored.get(lane)
            if (
                state is not None
                and state.holder == self._holder
                and state.lease.epoch == hold.lease.epoch
                and state.lease.version == hold.lease.version
            ):
                # still ours: its row has moved, or somebody has it locked
                hold.lease = state.lease
                if now < self._careful_until:
                    hold.renew_at = now + RETRY_LOCKED
                    self._careful_until = hold.renew_at + CAREFUL
            else:
                self._lose(lane)

    def _settle(self, connection: Connection) -> None:
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
            state = stored.get(lane)
            if (
                state is None
                or state.holder != self._holder
                or state.lease.epoch != hold.lease.epoch
            ):
                self._lose(lane)
            elif state.lease.version == hold.lease.version:
                hold.lease = state.lease
            elif lane in asked and state.lease.version == hold.lease.version + 1:
                hold.lease = state.lease
                hold.ready = True
                committed.add(lane)
            else:
                self._lose(lane)
        if request is None:
            return
        for delivery in request.finished:
            if delivery.lane in committed:
                self._finished.pop(delivery.id, None)
                delivery.hold.started.pop(delivery.id, None)
        # Recorded as started or not: they were not handed to the dispatcher, and before anything
        # later of their keys they are offered again.
        self._put_back(promoted)

    def _lose(self, lane: int) -> None:
        hold = self._holds.lose(lane)
        self._prefetched -= len(hold.prefetched)
        hold.prefetched.clear()
        unblocked = []
        for id in hold.started:
            self._finished.pop(id, None)
            self._locked.pop(id, None)
            park = self._parks.pop(id, None)
            if park is not None and id not in self._unrun:
                unblocked.append(park.delivery)
            self._unrun.discard(id)
        self._unblock(unblocked)

    # -- the end -------------------------------------------------------------------------------

    def _stopped(self, now: float) -> bool:
        """Whether nothing runs any more, or what runs has had its time."""
        assert self._dispatcher is not None
        assert self._stop_by is not None
        if not (self._load.deliveries or self._finished or self._locked or self._parks):
            return True
        if now < self._stop_by:
            return False
        if not self._aborted:
            # coroutines can be cancelled: wait a moment for them to be reported
            self._aborted = True
            self._dispatcher.abort()
            self._stop_by = now + self._last_moments
            return False
        return True

    def _end(self, connection: Connection) -> bool:
        left = self._load.deliveries
        self._holds.hand_back(connection, everything=True)
        self._store.resign(connection, self._holder)
        if left:
            log.error("stopped with %d handlers still running; they are delivered again", left)
        return not left


def _sqlstate(error: DBAPIError) -> str | None:
    return getattr(error.orig, "sqlstate", None)


def _first_line(error: BaseException) -> str:
    original = getattr(error, "orig", None) or error
    return str(original).strip().split("\n", 1)[0] or type(original).__name__
