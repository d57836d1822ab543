"""Which lanes a worker holds: finding work, taking lanes, sharing them, handing them back."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator
from uuid import UUID

from sqlalchemy import Connection, Engine

from ..lanes import LANES
from ..settings import Settings
from ..stores.base import Live, Store
from .hold import Hold

log = logging.getLogger("sqlalchemy_relaybus.worker")

#: Lanes taken at first; twice as many each time while there are more with work.
FIRST_TAKE = 4
#: Most deliveries of a lane that are set aside at a time, and most that are taken back.
SET_ASIDE = 1_000
#: How often at most it is told that deliveries were set aside, seconds.
TELL_ASIDE = 60.0
#: For how long a lane is left alone that others have handlers for, or that gave nothing, seconds.
REST = 1.0
#: How often what was set aside for this worker's handlers is looked for, seconds. Others may set
#: it aside until they know that this worker is alive, so it is oftener at the start.
RECLAIM = 30.0


class Holds:
    """The lanes that a worker holds, and the rules for having more or fewer."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        holder: UUID,
        handlers: Iterable[str],
        settings: Settings,
    ) -> None:
        # the takeover's two statements need a snapshot each
        self._engine = engine.execution_options(isolation_level="READ COMMITTED")
        self._store = store
        self._holder = holder
        self._handlers = frozenset(handlers)
        self._settings = settings
        self._lanes: dict[int, Hold] = {}
        self._rotation: deque[int] = deque()
        self._resting: dict[int, float] = {}
        #: handlers that no worker has, and since when that is known
        self._unknown: dict[str, float] = {}
        #: lanes that begin with a delivery of such a handler
        self._strange: dict[int, str] = {}
        #: how many deliveries were set aside, and when to tell (seldom: they may be many)
        self._aside = 0
        self._tell_aside_at = 0.0
        self._growth = FIRST_TAKE
        self._live = Live(())
        self._elsewhere: frozenset[str] = frozenset()
        #: the reply to a take or a hand-back was lost: there may be lanes that nobody serves
        self._strays = False
        self._began: float | None = None
        self._reclaim_at = 0.0

    def __iter__(self) -> Iterator[Hold]:
        return iter(self._lanes.values())

    def get(self, lane: int) -> Hold | None:
        return self._lanes.get(lane)

    def lose(self, lane: int) -> Hold:
        """The lane is somebody else's: forget it. What it had in flight is not ours any more."""
        hold = self._lanes.pop(lane)
        hold.lost = True
        log.warning(
            "lost the lease on lane %d with %d deliveries started; its holder runs them again",
            lane,
            len(hold.started),
        )
        return hold

    # -- the worker's place among others -------------------------------------------------------

    def enlist(self, connection: Connection) -> None:
        """Say that this worker is alive, and see who else is."""
        live = self._store.enlist(
            connection,
            self._holder,
            self._settings.owner,
            sorted(self._handlers),
            self._settings.lease_duration,
        )
        self._live = live
        self._elsewhere = live.elsewhere
        for handler in self._elsewhere & self._unknown.keys():
            del self._unknown[handler]
        if self._strays:
            self.drop_strays(connection)
        self._share()
        now = time.monotonic()
        if self._began is None:
            self._began = now
        if now >= self._reclaim_at:
            # a full batch may have left more behind
            count = self._store.reclaim(connection, sorted(self._handlers), SET_ASIDE)
            young = now - self._began < RECLAIM
            self._reclaim_at = now if young or count == SET_ASIDE else now + RECLAIM

    def _share(self) -> None:
        """Let go of lanes beyond an even share, those with the least in flight first."""
        staying = [hold for hold in self._lanes.values() if not hold.draining]
        surplus = len(staying) - self._most
        if surplus <= 0:
            return
        staying.sort(key=lambda hold: len(hold.started))
        for hold in staying[:surplus]:
            hold.draining = True

    @property
    def _most(self) -> int:
        """An even share among those who have the same handlers.

        Workers that have others do not count: they cannot serve the lanes that are left to them.
        """
        return max(-(-LANES // self._live.having(handler)) for handler in self._handlers)

    # -- finding and taking --------------------------------------------------------------------

    def look(self, connection: Connection, *, all: bool) -> float | None:
        """Look for work: mark held lanes that have some, take others that nobody holds.

        *all*: there is room for more than the held lanes give. Otherwise lanes are still taken, a
        few at a time, so that none waits for ever behind busy ones. Returns in how many seconds
        the next parked delivery is due.
        """
        now = time.monotonic()
        self._resting = {lane: end for lane, end in self._resting.items() if end > now}
        found = self._store.probe(connection)
        wanted: set[int] = set()
        due: set[int] = set()
        soonest: float | None = None
        self._strange = {}
        for lane, handler, wait, free in found:
            hold = self._lanes.get(lane)
            if handler is not None and handler not in self._handlers | self._elsewhere:
                self._strange[lane] = handler
                self._unknown.setdefault(handler, now)
            if wait > 0:
                soonest = wait if soonest is None else min(soonest, wait)
            elif hold is not None:
                if handler is None:
                    due.add(lane)
                elif handler not in self._handlers and handler in self._elsewhere:
                    # others cannot have what is in front of it as long as we hold the lane
                    hold.draining = True
                elif not hold.draining:
                    hold.ready = True
            elif free and lane not in self._resting:
                wanted.add(lane)
                if handler is None:
                    due.add(lane)
        if wanted:
            self._take(sorted(wanted), all=all)
        else:
            self._growth = FIRST_TAKE
        leases = [self._lanes[lane].lease for lane in due if lane in self._lanes]
        if leases:
            lanes = self._store.promote(connection, self._holder, leases, self._settings.batch)
            for lane in lanes:
                self._lanes[lane].ready = True
        self._set_aside(connection, now)
        return soonest

    def _set_aside(self, connection: Connection, now: float) -> None:
        """Move what no worker has a handler for out of the way, once it has been so for a while.

        Claims would read over it again and again. A worker that is only restarted is back before.
        """
        patience = self._settings.lease_duration
        leases = [
            self._lanes[lane].lease
            for lane, handler in self._strange.items()
            if lane in self._lanes and now - self._unknown[handler] >= patience
        ]
        if leases:
            known = sorted(self._handlers | self._elsewhere)
            self._aside += self._store.set_aside(connection, self._holder, leases, known, SET_ASIDE)
        if self._aside and now >= self._tell_aside_at:
            log.warning(
                "set %d deliveries aside, which wait for a worker with their handler; none has %s",
                self._aside,
                ", ".join(sorted(self._unknown)),
            )
            self._aside = 0
            self._tell_aside_at = now + TELL_ASIDE

    def _take(self, wanted: list[int], *, all: bool) -> None:
        limit = min(self._growth if all else FIRST_TAKE, self._most - len(self._lanes))
        if limit <= 0:
            # nobody serves them, and this worker has its share: it makes room, so that no lane
            # waits for ever behind busy ones
            for hold in sorted(self._lanes.values(), key=lambda hold: hold.taken_at)[:FIRST_TAKE]:
                hold.draining = True
            return
        # workers that look at the same time begin at different places
        start = (self._holder.int + len(self._lanes)) % len(wanted)
        wanted = (wanted[start:] + wanted[:start])[:limit]
        sent = time.monotonic()
        strays, self._strays = self._strays, True  # until the reply is here
        with self._engine.connect() as connection:
            taken = self._store.take(
                connection, self._holder, wanted, limit, self._settings.lease_duration
            )
        self._strays = strays
        for each in taken:
            lane = each.lease.lane
            self._lanes[lane] = Hold(each, sent, self._settings.lease_duration)
            if lane not in self._rotation:  # from when it was held before
                self._rotation.append(lane)
            if each.started:
                log.warning(
                    "took over lane %d, whose holder died or stalled with %d deliveries started",
                    lane,
                    len(each.started),
                )
        if all:
            self._growth = min(self._growth * 2, LANES)

    def in_turn(self) -> Iterator[Hold]:
        """The lanes, those claimed from longest ago first."""
        for lane in self._rotation:
            if (hold := self._lanes.get(lane)) is not None:
                yield hold

    def choose(self, most: int) -> list[Hold]:
        """At most *most* of the lanes to claim from, the longest unserved first."""
        now = time.monotonic()
        chosen: list[Hold] = []
        for _ in range(len(self._rotation)):
            lane = self._rotation.popleft()
            hold = self._lanes.get(lane)
            if hold is None:
                continue
            self._rotation.append(lane)
            if hold.claimable(now):
                chosen.append(hold)
                if len(chosen) == most:
                    break
        return chosen

    @property
    def any_ready(self) -> bool:
        now = time.monotonic()
        return any(hold.claimable(now) for hold in self._lanes.values())

    # -- handing back --------------------------------------------------------------------------

    def hand_back(self, connection: Connection, holds: Iterable[Hold] | None = None) -> None:
        """Hand back *holds*; without them, what is to be left or has run nothing for a while."""
        now = time.monotonic()
        leaving = list(self._leaving(now) if holds is None else holds)
        if not leaving:
            return
        for hold in leaving:
            hold.lost = True  # whatever the answer: nothing of it starts any more
            del self._lanes[hold.lease.lane]
            if hold.draining or not hold.yielded:
                self._resting[hold.lease.lane] = now + REST
        leases = [hold.lease for hold in leaving]
        strays, self._strays = self._strays, True  # until the reply is here
        if len(self._store.relinquish(connection, self._holder, leases)) < len(leases):
            self.drop_strays(connection)
        else:
            self._strays = strays

    def _leaving(self, now: float) -> Iterator[Hold]:
        for lane, hold in self._lanes.items():
            if not hold.empty:
                continue
            # one that begins with what nobody has a handler for is kept until that is set aside,
            # rather than taken again and again
            idle = not hold.ready and lane not in self._strange
            if hold.draining or (idle and now - hold.worked_at >= self._settings.lane_linger):
                yield hold

    def drop_strays(self, connection: Connection) -> None:
        """Hand back lanes that the store lists as this worker's and the worker does not know of.

        The reply to a take or to a hand-back was lost. Nobody takes a lane from its own holder,
        so nobody would serve these.
        """
        stored = self._store.read_lanes(connection, range(LANES))
        strays = [
            state.lease
            for lane, state in stored.items()
            if state.holder == self._holder and lane not in self._lanes
        ]
        given = self._store.relinquish(connection, self._holder, strays) if strays else ()
        self._strays = len(given) < len(strays)  # one may be locked
