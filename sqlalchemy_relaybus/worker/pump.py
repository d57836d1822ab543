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
from collections.abc import Callable, Iterable, Mapping, Sequence
from uuid import UUID

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from ..exc import LostLeaseError, first_line
from ..router import Handler
from ..settings import Settings
from ..stores.base import Delivery, Park, Store
from .dispatch import Dispatcher, Outcome
from .exchanges import Exchanges
from .failures import Failures
from .flight import RETRY_LOCKED, Flight
from .followers import Followers
from .hold import Hold
from .isolation import Isolation
from .pace import Pace
from .takeover import Holds
from .transaction import Transactions

log = logging.getLogger("sqlalchemy_relaybus.worker")

#: Longest wait between tries to reach the database, seconds.
MAX_RECONNECT = 5.0
#: How often a worker says that it is alive and looks who else is, seconds. A worker that joins
#: has its share of the lanes after this time and that of the handlers that run on them.
ENLIST = 5.0
#: How often plain functions are checked against their time limits, seconds.
_EXPIRY_CHECK = 0.05


class Pump:
    """Claims, completes, parks and renews, until it is told to stop and all is handed back.

    *check* raises where the database's tables do not fit (any more).
    """

    def __init__(
        self,
        engine: Engine,
        store: Store,
        holder: UUID,
        handlers: Mapping[str, Handler],
        settings: Settings,
        transactions: Transactions,
        check: Callable[[Connection], None],
    ) -> None:
        self._engine = engine
        self._store = store
        self._holder = holder
        self._settings = settings
        self._check = check
        self._dispatcher = Dispatcher(handlers, settings, transactions, self._report)
        self._holds = Holds(engine, store, holder, handlers, settings)
        self._flight = Flight(handlers, settings)
        self._followers = Followers(store, holder, self._holds, handlers.values())
        self._failures = Failures(store, holder, self._flight, self._followers, self._unblock)
        self._isolation = Isolation(store, holder, self._flight)
        self._pace = Pace(settings)
        self._exchanges = Exchanges(
            store,
            holder,
            handlers,
            settings,
            self._holds,
            self._flight,
            self._failures,
            self._followers,
            self._isolation,
            self._pace,
            self._dispatcher,
        )
        self._timed = any(
            handler.timeout is not None and not handler.injection.is_async
            for handler in handlers.values()
        )

        self._signal = threading.Event()
        self._inbox: deque[Sequence[Outcome]] = deque()
        self._enough = 1  # reports that are worth waking up for
        self._stop_by: float | None = None
        self._aborted = False
        self._stuck = False
        self._last_moments = 0.0  # of the grace, for what is cancelled

        self._enlist_at = 0.0
        self._minor_since: float | None = None

    # -- from other threads --------------------------------------------------------------------

    def _report(self, outcomes: Sequence[Outcome]) -> None:
        """Tell how deliveries ended. What is told together is taken note of together."""
        self._inbox.append(outcomes)
        if len(self._inbox) >= self._enough and not self._signal.is_set():
            self._signal.set()

    def hint(self) -> None:
        """There may be new work: look now rather than at the next poll."""
        self._pace.hint()
        self._signal.set()

    def stop(self, grace: float) -> None:
        """Claim nothing more, let running handlers end within *grace* seconds, hand all back."""
        if self._stop_by is None:
            # cancelled coroutines get the last moments of it to end
            self._last_moments = min(1.0, grace / 4)
            self._stop_by = time.monotonic() + grace - self._last_moments
        self._signal.set()
        self._dispatcher.stop()

    def close(self) -> None:
        """End the threads that handlers ran in, those that have nothing to do."""
        self._dispatcher.stop()
        self._dispatcher.close()

    # -- the thread ----------------------------------------------------------------------------

    def run(self) -> bool:
        """Pump until stopped; whether everything that had started has ended by then.

        Raises a :class:`SchemaError` where the tables are gone or are not this release's any more.
        """
        failures = 0
        while True:
            reached: float | None = None
            try:
                with self._engine.connect().execution_options(
                    isolation_level="AUTOCOMMIT"
                ) as connection:
                    if failures:
                        self._check(connection)
                    self._store.prepare(
                        connection,
                        lock_timeout=min(1.0, self._settings.lease_duration / 10),
                        timeout=self._settings.lease_duration / 4,
                    )
                    self._exchanges.settle(connection)
                    if failures:
                        log.warning("reached the database again")
                    reached = time.monotonic()
                    self._enlist_at = self._failures.record_at = 0.0
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
                    "the database failed (%s); trying again in %.1f s", first_line(error), pause
                )
                self._sit_out(pause)

    def _serve(self, connection: Connection) -> bool:
        try:
            while True:
                self._signal.clear()
                try:
                    wait = self._step(connection)
                except DBAPIError as error:
                    if error.connection_invalidated or not self._store.held_up(error):
                        raise
                    # The statement did nothing: somebody has locked what it needs, maybe for long.
                    log.warning("held up by somebody else's lock (%s)", first_line(error))
                    self._exchanges.renew(connection)
                    continue
                if wait is None:
                    return self._end(connection)
                if wait > 0:
                    self._wait(wait)
        except (DBAPIError, PoolTimeoutError, OSError):
            raise
        except BaseException:
            # A defect, or an interrupt: others need not wait for the leases to run out, except
            # where something runs. An exchange of unknown outcome refuses this by its version.
            self._holds.hand_back(connection, [hold for hold in self._holds if not hold.started])
            self._store.resign(connection, self._holder)
            raise

    def _step(self, connection: Connection) -> float | None:
        """One round; how long to wait until the next, seconds, or ``None`` at the end."""
        now = time.monotonic()
        self._collect(now)
        self._expire(now)
        # What is next is set before a statement is sent: one that is held up by somebody's lock is
        # not to be the first thing that the next round tries, too.
        if self._stop_by is not None and self._stopped(now):
            return None
        delay = self._failures.record(connection, now)
        if delay is not None:
            self._pace.expect(time.monotonic() + delay)
        if self._stop_by is None:
            if now >= self._enlist_at:
                self._enlist_at = now + min(ENLIST, self._settings.lease_duration / 3)
                self._holds.enlist(connection)
            self._look(connection, now)
            self._followers.tend(connection, now)
        wait = self._exchange_if_due(connection)
        self._isolation.absolve(connection, now)
        if self._stop_by is None:
            self._holds.hand_back(connection)
        else:
            # what is claimed ahead will not run, and others need not wait for what does
            idle = [hold for hold in self._holds if not hold.started]
            for hold in idle:
                self._flight.forget(hold)
            self._holds.hand_back(connection, idle)
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
                self._flight.load.end(delivery)
                hold: Hold = delivery.hold
                hold.worked_at = now
                if end == "done" or end == "gone" or isinstance(end, Park):
                    self._isolation.ended(delivery)
                    self._followers.passed(delivery)
                if end == "done" or end == "gone":
                    if hold.lost:
                        if end == "done":
                            log.warning("%s", LostLeaseError(delivery.lane, delivery.id))
                    elif end == "gone":
                        hold.started.pop(delivery.id, None)
                    else:
                        self._flight.finished[delivery.id] = delivery
                    continue
                if end == "refused":
                    # whatever blocks its key makes the lane ready again when it is recorded
                    hold.started.pop(delivery.id, None)
                    continue
                self._flight.drop_followers(delivery)
                if hold.lost or not isinstance(end, Park):
                    hold.started.pop(delivery.id, None)
                    hold.ready = True
                    if end == "lost":  # refused, and perhaps again and again
                        hold.not_before = now + RETRY_LOCKED
                    ended.append(delivery)
                    if isinstance(end, Park):
                        log.warning("%s", LostLeaseError(delivery.lane, delivery.id))
                else:
                    self._failures.add(end)
                    failed = True
            if not failed:  # else its key stays blocked until the failure is recorded
                unblocked += ended
        self._unblock(unblocked)

    def _unblock(self, deliveries: Iterable[Delivery]) -> None:
        self._dispatcher.unblock(
            (delivery.handler, delivery.key) for delivery in deliveries if delivery.key is not None
        )

    def _expire(self, now: float) -> None:
        if not self._timed:
            return
        if not self._dispatcher.expire(now) and not self._stuck:
            self._stuck = True
            log.error(
                "so many handlers ran past their time limit and did not return that there are no "
                "threads for others: this worker stops, for a new process to go on"
            )
            self.stop(self._settings.grace)

    # -- looking for work ----------------------------------------------------------------------

    def _look(self, connection: Connection, now: float) -> None:
        room = self._flight.room > 0
        if not self._pace.due(now, starved=room and not self._holds.any_ready):
            return
        self._pace.looking(now)
        soonest = self._holds.look(connection, all=room)
        if soonest is not None:
            self._pace.expect(time.monotonic() + max(soonest, 0.001))

    # -- the exchange --------------------------------------------------------------------------

    def _exchange_if_due(self, connection: Connection) -> float:
        """Exchange, if there is reason enough to; how long to wait otherwise, seconds."""
        now = time.monotonic()
        settings, flight = self._settings, self._flight
        stopping = self._stop_by is not None
        flight.retry_locked(now)
        isolating = self._isolation.wanted(self._holds)
        room = 0 if stopping or isolating else flight.room
        claims = room > 0 and self._holds.any_ready
        idle = 0.0 if stopping else flight.idle(self._holds)
        if isolating and flight.load.deliveries:
            idle = 0.0  # nothing begins beside what runs
        starts = idle > 0
        renew_at = min((hold.renewal_at for hold in self._holds), default=now + 3600)
        if (
            renew_at <= now
            or len(flight.finished) * 2 >= settings.batch
            or (claims and room * 4 >= min(settings.batch, settings.concurrency))
            or idle >= 0.5
            or (not flight.load.deliveries and (claims or starts or flight.finished))
        ):
            return self._exchange(connection)
        if flight.finished or claims or starts:
            # not much: wait a little for more to go along
            if self._minor_since is None:
                self._minor_since = now
            ripe = self._minor_since + settings.completion_window
            if now >= ripe:
                return self._exchange(connection)
            enough = settings.batch // 2 - len(flight.finished)
            self._enough = max(1, min(flight.load.deliveries, enough))
            return ripe - now
        wake = min(renew_at, self._enlist_at)
        wake = min(wake, now + 0.05 if stopping else self._pace.next_look)
        if self._failures:
            wake = min(wake, self._failures.record_at)
        if flight.locked:
            wake = min(wake, flight.retry_locked_at)
        if self._timed and flight.load.deliveries:
            wake = min(wake, now + _EXPIRY_CHECK)
        return max(0.0005, wake - now)

    def _exchange(self, connection: Connection) -> float:
        self._minor_since = None
        self._exchanges.send(connection, stopping=self._stop_by is not None)
        return 0.0

    # -- the end -------------------------------------------------------------------------------

    def _stopped(self, now: float) -> bool:
        """Whether nothing runs any more, or what runs has had its time."""
        assert self._stop_by is not None
        flight = self._flight
        if not (flight.load.deliveries or flight.finished or flight.locked or self._failures):
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
        left = self._flight.load.deliveries
        self._holds.hand_back(connection, list(self._holds))
        self._store.resign(connection, self._holder)
        if left:
            log.error("stopped with %d handlers still running; they are delivered again", left)
        return not left and not self._stuck
