"""Followers of blocked and of hot keys: when to set them aside, and when to let them go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from uuid import UUID

from sqlalchemy import Connection

from ..router import Handler
from ..stores.base import Delivery, Pair, Store
from .hold import LANE_IN_FLIGHT, Hold
from .takeover import Holds

#: How many of a lane's ready deliveries may wait for a blocked key before the rest is set aside.
BEYOND = 64
#: How many of a lane's first deliveries are looked at, at a time.
LOOK_AT = 500
#: How many of a hot key are set aside at a time.
THIN_OUT = 5_000
#: A key is hot that has so many of its lane's deliveries in flight, which run one by one.
HOT = LANE_IN_FLIGHT // 2
#: Pause between two such looks, seconds.
PAUSE = 1.0
#: How many followers of a pair are let go at a time, once there are fewer than :data:`FEW` in
#: flight: together they leave room in the lane for others.
LET_GO = 32
FEW = 16
#: How often it is seen to everywhere, seconds. It is what remains to be done of workers that died,
#: and of delayed events that block keys.
SWEEP = 30.0


class Followers:
    """Nothing but speed rests on it: the store keeps the order of keys, whatever is done here."""

    def __init__(
        self, store: Store, holder: UUID, holds: Holds, handlers: Iterable[Handler]
    ) -> None:
        self._store = store
        self._holder = holder
        self._holds = holds
        self._parking = sorted(each.name for each in handlers if each.on_dead == "park")
        self._due: set[tuple[int, Pair]] = set()
        self._look_at = 0.0
        self._sweep_at = 0.0

    def failed(self, delivery: Delivery, *, blocks: bool) -> None:
        """*delivery* is parked now."""
        if delivery.key is None:
            return
        hold: Hold = delivery.hold
        if blocks:
            hold.blocked = True
        else:
            self.passed(delivery)

    def passed(self, delivery: Delivery) -> None:
        """*delivery* was claimed, or has ended: those set aside behind it can come after it."""
        hold: Hold = delivery.hold
        if hold.behind and delivery.key is not None:
            pair = Pair(delivery.handler, delivery.key)
            if pair in hold.behind:
                self._due.add((delivery.lane, pair))

    def tend(self, connection: Connection, now: float) -> None:
        """Do what is due."""
        if due := {each for each in self._due if self._few(*each)}:
            self._due -= due
            self._let_go(connection, due)
        if now >= self._sweep_at:
            self._sweep_at = now + SWEEP
            self._let_go(connection, None)
            for lane in self._store.blocked_lanes(connection):
                if (hold := self._holds.get(lane)) is not None:
                    hold.blocked = True
        if now >= self._look_at:
            self._look_at = now + PAUSE
            self._hold_back(connection, [hold for hold in self._holds if hold.blocked])
            self._thin_out(connection)

    def _few(self, lane: int, pair: Pair) -> bool:
        hold = self._holds.get(lane)
        return hold is None or hold.count(pair) < FEW

    def _let_go(self, connection: Connection, pairs: Collection[tuple[int, Pair]] | None) -> None:
        moved = self._store.let_go(connection, pairs, LET_GO)
        for (lane, pair), count in moved.items():
            if (hold := self._holds.get(lane)) is not None:
                hold.ready = True
                if count < LET_GO:
                    hold.behind.discard(pair)
                else:
                    hold.behind.add(pair)

    def _thin_out(self, connection: Connection) -> None:
        hot: list[tuple[int, Pair]] = []
        holds: list[Hold] = []
        for hold in self._holds:
            if len(hold.started) + len(hold.prefetched) < HOT:
                continue
            counts = Counter((each.handler, each.key) for each in hold.in_flight)
            ((handler, key), count) = counts.most_common(1)[0]
            if key is not None and count >= HOT:
                hot.append((hold.lease.lane, Pair(handler, key)))
                holds.append(hold)
        if not hot:
            return
        moved = self._store.thin_out(
            connection,
            self._holder,
            [hold.lease for hold in holds],
            hot=hot,
            kept=[delivery for hold in holds for delivery in hold.in_flight],
            limit=THIN_OUT,
        )
        self._moved(moved)

    def _hold_back(self, connection: Connection, blocked: list[Hold]) -> None:
        if not blocked:
            return
        moved = self._store.hold_back(
            connection,
            self._holder,
            [hold.lease for hold in blocked],
            parking=self._parking,
            beyond=BEYOND,
            limit=LOOK_AT,
        )
        for hold in blocked:
            hold.blocked = False  # until the next failure; more may wait behind what was moved
        self._moved(moved)

    def _moved(self, moved: Iterable[tuple[int, Pair]]) -> None:
        for lane, pair in moved:
            if (hold := self._holds.get(lane)) is not None:
                hold.blocked = hold.ready = True
                hold.behind.add(pair)
                self._due.add((lane, pair))
