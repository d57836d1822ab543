"""The bus as it ought to be: plain Python, no SQL, nothing at the same time.

:class:`Model` keeps the same :class:`Contents` as the store, by itself: each method is told what a
worker or publisher asked and what the store answered, refuses an answer that the contract does not
allow, and does what the store ought to have done. Where the contract leaves a choice (which of the
free lanes, which ids), the model follows the store's choice if it is one of the allowed. After
every step the two must be equal; so whatever a refused write changed, or a granted one did not, is
found at once.

Times are seconds of the test's clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy_relaybus.lanes import lane_of, lane_of_event
from sqlalchemy_relaybus.stores.base import (
    Delivery,
    Exchange,
    Exchanged,
    Lease,
    NewEvent,
    Pair,
    Park,
    Parked,
    PurgedEvents,
    PurgedRows,
    Ready,
    Suspect,
    Taken,
)

from .contents import NOBODY, Contents, LaneRow, ParkedRow, Row, StoredEvent, SuspectRow


class Violation(AssertionError):
    """The store did what the contract does not allow."""


def check(condition: object, *what: object) -> None:
    """Raise a :class:`Violation` that says *what*, unless *condition* holds."""
    if not condition:
        raise Violation(": ".join(map(str, what)))


def same(found: object, expected: object, what: str) -> None:
    """Raise a :class:`Violation` unless *found* is what is *expected*."""
    check(found == expected, f"{what}\n  store: {found}\n  model: {expected}")


@dataclass(frozen=True)
class Addition:
    """What a publisher's transaction will add for one event when it commits."""

    id: UUID
    key: str | None
    handlers: tuple[str, ...]
    at: float
    due: float | None
    #: the event itself is new, too
    fresh: bool
    #: handlers for which it blocks nothing while it is not due
    passing: frozenset[str] = frozenset()

    @property
    def lane(self) -> int:
        return lane_of_event(self.id) if self.key is None else lane_of(self.key)


# -- what happens ----------------------------------------------------------------------------------


class Model:
    """The bus. Nothing in it is lost, run twice after its completion, or out of order."""

    def __init__(self) -> None:
        self.now = 0.0
        self.stored = Contents()
        #: what completed, and what was purged as a dead letter: event and handler
        self.done: set[tuple[UUID, str]] = set()
        self.discarded: set[tuple[UUID, str]] = set()
        #: the last sequence number and the last delivery id of a key
        self._last: dict[str, tuple[int, int]] = {}
        #: deliveries deleted by transactions that are still open, with their lanes
        self.completing: dict[int, int] = {}
        #: events and keys that open publishing transactions have locked
        self.locked_events: Counter[UUID] = Counter()
        self.locked_keys: Counter[str] = Counter()
        self.alive: dict[UUID, tuple[frozenset[str], float]] = {}

    def whole(self) -> None:
        """Each event is at each of its handlers exactly once: waiting, completed or given up."""
        stored = self.stored
        there = Counter((row.event, row.handler) for row in stored.ready.values())
        there.update((parked.row.event, parked.row.handler) for parked in stored.parked.values())
        there.update(self.done)
        there.update(self.discarded)
        listed = {(id, name) for id, event in stored.events.items() for name in event.handlers}
        same(there, Counter(listed), "deliveries that were lost, doubled or made up")
        check(not stored.ready.keys() & stored.parked.keys(), "ready and parked at once")

    # -- publishing ----------------------------------------------------------------------------

    def publishing(self, events: Sequence[NewEvent]) -> list[Addition]:
        """What publishing *events* will add. An id that comes again adds handlers only."""
        merged: dict[UUID, NewEvent] = {}
        for new in events:
            first = merged.setdefault(new.event.id, new)
            names = dict.fromkeys([*first.handlers, *new.handlers])
            passing = [name for each in (first, new) for name in each.passing]
            merged[new.event.id] = first._replace(handlers=list(names), passing=passing)
        additions = []
        for id, new in merged.items():
            known = self.stored.events.get(id)
            had = known.handlers if known else frozenset()
            additions.append(
                Addition(
                    id,
                    known.key if known else new.event.key,
                    tuple(name for name in new.handlers if name not in had),
                    self.now,
                    None if new.delay is None else self.now + new.delay,
                    known is None,
                    frozenset(new.passing),
                )
            )
        return additions

    def published(self, additions: Iterable[Addition], seen: Contents) -> None:
        """The transaction with *additions* has committed."""
        drawn = {(row.event, row.handler): id for id, row in seen.ready.items()}
        drawn |= {(each.row.event, each.row.handler): id for id, each in seen.parked.items()}
        events = self.stored.events
        first = {key: last for key, (_, last) in self._last.items()}
        orders: dict[tuple[str, bool], int] = {}
        for new in additions:
            sequence, last = self._last.get(new.key or "", (0, 0))
            if new.fresh:
                number = seen.events[new.id].sequence if new.id in seen.events else None
                check((number is None) == (new.key is None), "not numbered within its key", new)
                check(number is None or number > sequence, "a sequence number came again", number)
                events[new.id] = StoredEvent(new.key, number, frozenset(new.handlers), new.at)
                sequence = number or 0
            else:
                known = events[new.id]
                events[new.id] = known._replace(handlers=known.handlers | set(new.handlers))
            for handler in new.handlers:
                id = drawn.get((new.id, handler), -1)
                check(id >= 0, "no delivery was made for", new, handler)
                if new.key is not None:
                    # handlers that are added to stored events come after what is new
                    order = new.key, new.fresh
                    least = orders.get(order, first.get(new.key, 0))
                    check(id > least, "ids are not in the order of commits", id)
                    orders[order] = id
                    last = max(last, id)
                row = Row(new.lane, new.id, handler, new.key, 0, 0)
                if new.due is None:
                    self.stored.ready[id] = row
                else:
                    blocks = handler not in new.passing
                    self.stored.parked[id] = ParkedRow(row, "delayed", new.due, blocks, new.at)
            if new.key is not None:
                self._last[new.key] = sequence, last

    # -- leases --------------------------------------------------------------------------------

    def lane(self, lane: int) -> LaneRow:
        return self.stored.lanes.get(lane, LaneRow())

    def holds(self, holder: UUID, lane: int, epoch: int) -> bool:
        """Whether *holder* is the lane's, in its *epoch*: what every change asks."""
        row = self.lane(lane)
        return row.holder == holder and row.epoch == epoch

    def current(self, holder: UUID, lease: Lease) -> bool:
        """Likewise, and nothing was written that the holder does not know of."""
        held = self.holds(holder, lease.lane, lease.epoch)
        return held and self.lane(lease.lane).version == lease.version

    def free(self, lane: int, holder: UUID | None = None) -> bool:
        """Whether *holder* may take the lane: never from a live lease, never from itself."""
        row = self.lane(lane)
        if row.holder is None:
            return True
        assert row.until is not None
        return row.until < self.now and row.holder != holder

    def taken(
        self, holder: UUID, wanted: Collection[int], limit: int, lease: float, reply: list[Taken]
    ) -> None:
        # a transaction that is just completing a delivery keeps its lane
        busy = set(self.completing.values())
        free = {lane for lane in wanted if self.free(lane, holder) and lane not in busy}
        lanes = {taken.lease.lane for taken in reply}
        check(lanes <= free, "lanes were taken that somebody holds", lanes - free)
        same(len(reply), min(limit, len(free)), "how many lanes were taken")
        for taken in reply:
            lane, epoch = taken.lease.lane, taken.lease.epoch
            row = self.lane(lane)
            same(set(taken.started), row.started, "what the former holder had started")
            same(epoch, row.epoch + 1, "the epoch of a lane just taken")
            self._crashed(lane, row)
            suspects = self.stored.suspects
            mine = {id: each.suspect for id, each in suspects.items() if each.lane == lane}
            same(dict(taken.suspects), mine, "the suspects of a lane just taken")
            until = self.now + lease
            self.stored.lanes[lane] = LaneRow(
                epoch, taken.lease.version, holder, until, row.company
            )

    def _crashed(self, lane: int, row: LaneRow) -> None:
        """What was started and is still ready counts a crash; what is gone is no suspect."""
        stored = self.stored
        for id in row.started & stored.ready.keys():
            before = stored.suspects.get(id, SuspectRow(lane, Suspect(0, 0))).suspect
            stored.suspects[id] = SuspectRow(lane, Suspect(before.crashes + 1, row.company))
        there = stored.ready.keys() | stored.parked.keys()
        for id, each in list(stored.suspects.items()):
            if each.lane == lane and id not in there:
                del stored.suspects[id]

    def survived(self, deliveries: Iterable[Delivery]) -> None:
        suspects = self.stored.suspects
        for id in {each.id for each in deliveries} & suspects.keys():
            suspect = suspects[id].suspect
            less = suspect._replace(crashes=max(suspect.crashes - 1, 0))
            suspects[id] = suspects[id]._replace(suspect=less)

    def absolved(self, holder: UUID, deliveries: Iterable[Delivery]) -> None:
        for delivery in deliveries:
            if self.holds(holder, delivery.lane, delivery.epoch):
                self.stored.suspects.pop(delivery.id, None)

    def renewed(
        self, holder: UUID, leases: Iterable[Lease], lease: float, reply: dict[int, Lease]
    ) -> None:
        granted = {each.lane: each for each in leases if self.current(holder, each)}
        same(reply.keys(), granted.keys(), "which leases were renewed")
        for lane, each in granted.items():
            self._write(lane, reply[lane], each, version=each.version + 1, until=self.now + lease)

    def _write(self, lane: int, after: Lease, before: Lease, **changes: object) -> None:
        same((after.lane, after.epoch), (lane, before.epoch), "the lease after a write")
        row = self.lane(lane)._replace(**changes)  # type: ignore[arg-type]
        same(after.version, row.version, "the version after a write")
        self.stored.lanes[lane] = row

    def relinquished(self, holder: UUID, leases: Iterable[Lease], reply: set[int]) -> None:
        granted = {each.lane for each in leases if self.current(holder, each)}
        same(reply, granted, "which lanes were handed back")
        for lane in granted:
            self.stored.lanes[lane] = self.lane(lane)._replace(
                holder=None, until=None, started=NOBODY, prefetched=NOBODY
            )

    # -- the pump ------------------------------------------------------------------------------

    def claimable(self, lane: int, handlers: Collection[str], busy: Collection[int]) -> list[int]:
        """What may be claimed from *lane*, in order: nothing in flight, nothing that must wait."""
        return [
            id
            for id, row in sorted(self.stored.ready.items())
            if row.lane == lane
            and row.handler in handlers
            and id not in busy
            and not self.waits(id, row)
        ]

    def waits(self, id: int, row: Row) -> bool:
        """Whether an earlier delivery of its handler and key is parked in front of it."""
        return self.blocker(id, row) is not None

    def blocker(self, id: int, row: Row) -> ParkedRow | None:
        """The first parked delivery for which the delivery *id* must wait."""
        if row.key is None:
            return None
        first = min(self.blocking(row.lane, Pair(row.handler, row.key)), default=id)
        return self.stored.parked[first] if first < id else None

    def blocking(self, lane: int, pair: Pair) -> list[int]:
        """The parked deliveries of *pair* that hold later ones back."""
        return [
            id
            for id, parked in sorted(self.stored.parked.items())
            if parked.blocks
            and parked.row.lane == lane
            and (parked.row.handler, parked.row.key) == pair
        ]

    def exchanged(self, holder: UUID, request: Exchange, reply: Exchanged) -> None:
        asked = {each.lease.lane: each for each in request.lanes}
        granted = {lane for lane, each in asked.items() if self.current(holder, each.lease)}
        must = {lane for lane, each in asked.items() if each.write}
        written = reply.leases.keys()
        check(written <= granted, "written without a valid lease", written - granted)
        check(written >= must & granted, "not written", (must & granted) - written)
        check(reply.refused >= must - granted, "not told of its loss", must - granted)
        check(not reply.refused & granted, "refused its holder", reply.refused & granted)

        # what it claims is seen before anything of this exchange is done
        kept = {d.id: d for d in [*request.started, *request.prefetched]}
        finished = [
            d for d in request.finished if d.lane in asked and d.epoch == asked[d.lane].lease.epoch
        ]
        busy = kept.keys() | {d.id for d in finished}
        claims: dict[int, list[int]] = {}
        for delivery in sorted([*reply.startable, *reply.prefetched], key=lambda d: d.id):
            claims.setdefault(delivery.lane, []).append(delivery.id)
            self._claimed(delivery, asked[delivery.lane].lease)
        check(claims.keys() <= written, "claimed from a lane that was not written", claims)
        possible = {
            lane: self.claimable(lane, request.handlers, busy)[: request.per_lane]
            for lane, each in asked.items()
            if each.claim
        }
        for lane, ids in claims.items():
            same(ids, possible.get(lane, [])[: len(ids)], "claims of a lane")
        total = sum(map(len, claims.values()))
        check(total <= request.limit, "more than the limit were claimed", total)
        check(len(reply.startable) <= request.room, "more may start than there is room for")
        if possible.keys() <= granted:
            most = min(request.limit, sum(map(len, possible.values())))
            same(total, most, "how many were claimed")
            same(len(reply.startable), min(total, request.room), "how many may start")
        starts = {d.id for d in reply.startable}
        for ids in claims.values():
            ahead = [id in starts for id in ids]
            same(ahead, sorted(ahead, reverse=True), "a later one starts, of earlier ones")

        deleted = {d.id for d in finished if d.lane in written and self._runs(holder, d)}
        same((reply.deleted, reply.locked), (deleted, set()), "what was deleted")
        for lane in written:
            lease = asked[lane].lease
            mine = set(claims.get(lane, ()))
            started = {d.id for d in request.started if d.lane == lane} | mine & starts
            prefetched = {d.id for d in request.prefetched if d.lane == lane} | mine - starts
            self._write(
                lane,
                reply.leases[lane],
                lease,
                version=lease.version + 1,
                until=self.now + request.lease_duration,
                company=request.company,
                started=frozenset(started),
                prefetched=frozenset(prefetched),
            )
        for id in deleted:
            self._finish(id)

    def _claimed(self, delivery: Delivery, lease: Lease) -> None:
        row = self.stored.ready.get(delivery.id)
        check(row is not None, "claimed although it is not ready", delivery)
        assert row is not None
        check((row.event, row.handler) not in self.done, "claimed after its completion", delivery)
        event = delivery.event
        check(event is not None, "an orphan", delivery)
        assert event is not None
        found = (delivery.lane, event.id, delivery.handler, delivery.key)
        same(Row(*found, delivery.attempts, delivery.claims), row, "a claimed delivery")
        same(delivery.epoch, lease.epoch, "the epoch of a claim")
        stored = self.stored.events[row.event]
        same((event.key, event.sequence), (stored.key, stored.sequence), "a claimed event")

    # -- outcomes ------------------------------------------------------------------------------

    def _runs(self, holder: UUID, delivery: Delivery) -> bool:
        """Whether *delivery* is the very run that goes on, and *holder* its lane's."""
        row = self.stored.ready.get(delivery.id)
        this = row is not None and row.claims == delivery.claims
        return this and self.holds(holder, delivery.lane, delivery.epoch)

    def _finish(self, id: int) -> None:
        row = self.stored.ready.pop(id)
        self.done.add((row.event, row.handler))

    def completing_now(self, holder: UUID, delivery: Delivery, reply: bool) -> None:
        """A transaction that is still open has completed *delivery*, or was refused."""
        same(reply, self._runs(holder, delivery), f"whether {delivery} completed")
        if reply:
            self.completing[delivery.id] = delivery.lane

    def completed(self, delivery: Delivery, *, committed: bool) -> None:
        """That transaction has ended."""
        del self.completing[delivery.id]
        if committed:
            self._finish(delivery.id)

    def parks(self, holder: UUID, parks: Iterable[Park], reply: Parked) -> None:
        valid = {park.delivery.id: park for park in parks if self._runs(holder, park.delivery)}
        locked = valid.keys() & self.completing.keys()
        same(reply, Parked(valid.keys() - locked, locked), "what was parked")
        for id in reply.parked:
            park = valid[id]
            row = self.stored.ready.pop(id)
            row = row._replace(attempts=row.attempts + park.charge, claims=row.claims + 1)
            due = None if park.delay is None else self.now + park.delay
            self.stored.parked[id] = ParkedRow(row, park.status, due, park.blocks, self.now)

    # -- from the parked ones to the ready ones and back ---------------------------------------

    def _unpark(self, id: int) -> None:
        self.stored.ready[id] = self.stored.parked.pop(id).row

    def promoted(
        self, holder: UUID, leases: Iterable[Lease], limit: int, reply: list[int], seen: Contents
    ) -> None:
        """At most *limit* of each lane; the longest due."""
        moved = self.stored.parked.keys() - seen.parked.keys()
        lanes = {self.stored.parked[id].row.lane for id in moved}
        same(set(reply), lanes, "the lanes of what was promoted")
        for lease in leases:
            due = {
                id: parked.due
                for id, parked in self.stored.parked.items()
                if parked.row.lane == lease.lane
                and parked.due is not None
                and parked.due <= self.now
                and self.holds(holder, lease.lane, lease.epoch)
            }
            mine = {id for id in moved if self.stored.parked[id].row.lane == lease.lane}
            self._oldest(mine, due, limit, "promoted")
            moved -= mine
            for id in mine:
                self._unpark(id)
        check(not moved, "promoted of other lanes", moved)

    @staticmethod
    def _oldest(chosen: set[int], due: dict[int, float], limit: int, what: str) -> None:
        """*chosen* are as many of *due* as they may be, those with the least values."""
        check(chosen <= due.keys(), "what was not to be", what, chosen - due.keys())
        same(len(chosen), min(limit, len(due)), f"how many were {what}")
        latest = max((due[id] for id in chosen), default=0.0)
        check(
            all(value >= latest for id, value in due.items() if id not in chosen),
            "not the oldest were",
            what,
        )

    def set_aside(
        self,
        holder: UUID,
        leases: Iterable[Lease],
        known: Collection[str],
        limit: int,
        reply: int,
    ) -> None:
        total = 0
        for lease in leases:
            if not self.holds(holder, lease.lane, lease.epoch):
                continue
            strange = [
                id
                for id, row in sorted(self.stored.ready.items())
                if row.lane == lease.lane and row.handler not in known
            ][:limit]
            for id in strange:
                row = self.stored.ready.pop(id)
                self.stored.parked[id] = ParkedRow(row, "unhandled", None, True, self.now)
            total += len(strange)
        same(reply, total, "how many were set aside")

    def reclaimed(self, handlers: Collection[str], limit: int, reply: int, seen: Contents) -> None:
        moved = self.stored.parked.keys() - seen.parked.keys()
        ours = {
            id
            for id, parked in self.stored.parked.items()
            if parked.status == "unhandled" and parked.row.handler in handlers
        }
        check(moved <= ours, "reclaimed for others", moved - ours)
        same((reply, len(moved)), (min(limit, len(ours)),) * 2, "how many were reclaimed")
        for id in moved:
            self._unpark(id)

    def requeued(self, ids: Collection[int], reply: set[int]) -> None:
        dead = {id for id, each in self.stored.parked.items() if each.status == "dead"}
        same(reply, dead & set(ids), "which dead letters were requeued")
        for id in reply:
            self._unpark(id)
            row = self.stored.ready[id]
            self.stored.ready[id] = row._replace(attempts=0, claims=row.claims + 1)

    def discarded_by_hand(self, ids: Collection[int], reply: set[int], free: int) -> None:
        dead = {id for id, each in self.stored.parked.items() if each.status == "dead"}
        same(reply, dead & set(ids), "which dead letters were discarded")
        for id in sorted(reply):
            row = self.stored.parked.pop(id).row
            self.discarded.add((row.event, row.handler))
            if row.key is not None:
                self._let_go(row.lane, Pair(row.handler, row.key), free)

    def released(self, pair: Pair, reply: int, free: int) -> None:
        lane = lane_of(pair.key)
        dead = [id for id in self.blocking(lane, pair) if self.stored.parked[id].status == "dead"]
        same(reply, len(dead), "how many dead letters were told to let others pass")
        for id in dead:
            self.stored.parked[id] = self.stored.parked[id]._replace(blocks=False)
        if dead:
            self._let_go(lane, pair, free)

    # -- followers of blocked and of hot keys --------------------------------------------------

    def held_back(
        self,
        holder: UUID,
        leases: Iterable[Lease],
        *,
        parking: Collection[str],
        beyond: int,
        limit: int,
        reply: set[tuple[int, Pair]],
    ) -> None:
        moved = []
        for lane in self._held(holder, leases):
            waiting = [id for id in self._front(lane)[:limit] if self.waits(id, self._ready(id))]
            for n, id in enumerate(waiting, 1):
                row = self._ready(id)
                blocker = self.blocker(id, row)
                assert blocker is not None
                if n > beyond or (row.handler in parking and blocker.status == "dead"):
                    moved.append(id)
        self._behind(moved, reply)

    def thinned_out(
        self,
        holder: UUID,
        leases: Iterable[Lease],
        *,
        hot: Collection[tuple[int, Pair]],
        kept: Iterable[Delivery],
        limit: int,
        reply: set[tuple[int, Pair]],
    ) -> None:
        moved = []
        for lane in self._held(holder, leases):
            front = self._front(lane)
            last = max((id for id in front if self._pair(id) not in hot), default=0)
            moved += [id for id in front[:limit] if id < last and self._pair(id) in hot]
        self._behind(set(moved) - {each.id for each in kept}, reply)

    def let_go(
        self,
        pairs: Collection[tuple[int, Pair]] | None,
        limit: int,
        reply: dict[tuple[int, Pair], int],
    ) -> None:
        everywhere = {
            (parked.row.lane, Pair(parked.row.handler, parked.row.key))
            for parked in self.stored.parked.values()
            if parked.status == "behind" and parked.row.key is not None
        }
        expected = {}
        for lane, pair in everywhere if pairs is None else pairs:
            first = self.blocking(lane, pair)[:1]
            if not first:
                expected[lane, pair] = 0
            elif self.stored.parked[first[0]].status == "behind":
                expected[lane, pair] = self._let_go(lane, pair, limit)
        same(reply, expected, "how many followers were let go")

    def _let_go(self, lane: int, pair: Pair, limit: int) -> int:
        """The first followers of *pair* are ready, unless something blocks it."""
        waiting = self.blocking(lane, pair)
        if not waiting or self.stored.parked[waiting[0]].status != "behind":
            return 0
        ids = [id for id in waiting if self.stored.parked[id].status == "behind"][:limit]
        for id in ids:
            self._unpark(id)
        return len(ids)

    def _held(self, holder: UUID, leases: Iterable[Lease]) -> list[int]:
        return [each.lane for each in leases if self.holds(holder, each.lane, each.epoch)]

    def _front(self, lane: int) -> list[int]:
        return [id for id, row in sorted(self.stored.ready.items()) if row.lane == lane]

    def _ready(self, id: int) -> Row:
        return self.stored.ready[id]

    def _pair(self, id: int) -> tuple[int, Pair] | None:
        row = self._ready(id)
        return None if row.key is None else (row.lane, Pair(row.handler, row.key))

    def _behind(self, ids: Iterable[int], reply: set[tuple[int, Pair]]) -> None:
        """*ids* are set aside, but for what an open transaction has locked."""
        ids = set(ids) - self.completing.keys()
        same(reply, {self._pair(id) for id in ids}, "followers that were set aside")
        for id in ids:
            row = self.stored.ready.pop(id)
            self.stored.parked[id] = ParkedRow(row, "behind", None, True, self.now)

    # -- retention -----------------------------------------------------------------------------

    def purged_events(self, age: float, pages: Sequence[PurgedEvents]) -> None:
        """All pages, from the first event on."""
        old = {id for id, event in self.stored.events.items() if event.created <= self.now - age}
        locked = {id for id in old if self.locked_events[id]}
        there = {row.event for row in self.stored.ready.values()}
        there |= {parked.row.event for parked in self.stored.parked.values()}
        gone = old - locked - there
        found = [sum(counts) for counts in zip(*(page[:3] for page in pages), strict=True)]
        expected = [len(gone), len(old - locked) - len(gone), len(locked)]
        same(found, expected, "events removed, not done, and locked")
        for id in gone:
            del self.stored.events[id]
        self.done = {pair for pair in self.done if pair[0] not in gone}
        self.discarded = {pair for pair in self.discarded if pair[0] not in gone}

    def purged_dead(self, age: float, limit: int, reply: PurgedRows, seen: Contents) -> None:
        """One page, from the oldest on."""
        gone = self.stored.parked.keys() - seen.parked.keys()
        old = {
            id: parked.since
            for id, parked in self.stored.parked.items()
            if parked.status == "dead" and parked.since <= self.now - age
        }
        self._oldest(gone, old, limit, "purged as dead")
        same(reply.removed, len(gone), "how many dead letters were purged")
        same(reply.last is None, len(gone) < limit, "whether there is another page")
        for id in gone:
            row = self.stored.parked.pop(id).row
            self.discarded.add((row.event, row.handler))

    # -- hints ---------------------------------------------------------------------------------

    def probed(self, reply: list[Ready]) -> None:
        firsts: dict[int, str] = {}
        for _, row in sorted(self.stored.ready.items()):
            firsts.setdefault(row.lane, row.handler)
        waits: dict[int, float] = {}
        for parked in self.stored.parked.values():
            if parked.due is not None:
                wait = max(0.0, parked.due - self.now)
                waits[parked.row.lane] = min(wait, waits.get(parked.row.lane, wait))
        expected = [(lane, name, 0.0, self.free(lane)) for lane, name in firsts.items()]
        expected += [(lane, "", wait, self.free(lane)) for lane, wait in waits.items()]
        found = [(lane, name or "", wait, free) for lane, name, wait, free in reply]
        same(sorted(found), sorted(expected), "the lanes with work")

    def enlisted(
        self, holder: UUID, handlers: Collection[str], ttl: float, reply: Sequence[frozenset[str]]
    ) -> None:
        others = Counter(
            names
            for other, (names, until) in self.alive.items()
            if other != holder and until > self.now
        )
        same(Counter(reply), others, "who else is alive")
        self.alive[holder] = frozenset(handlers), self.now + ttl
