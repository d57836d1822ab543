"""The contract between the bus and a store.

A store keeps events and deliveries and hands deliveries to workers. It works on connections that
it is given and never commits, except where a method says so. Workers lease *lanes*; whoever holds
a lane's lease is the only one to run its deliveries. The lease's ``epoch`` grows whenever the lane
changes hands and is the fencing token: every state change names it together with the holder and
is refused, changing nothing, once either has moved on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, NamedTuple, Protocol
from uuid import UUID

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from ..event import Event


class Lease(NamedTuple):
    """A worker's lease on one lane, as its last confirmed statement left it."""

    lane: int
    #: fencing token: grows whenever the lane changes hands
    epoch: int
    #: grows with every exchange of the holder: tells whether one with an unknown outcome happened
    version: int
    #: the store's own: what helps it to find the lane again. A wrong one costs time, nothing else.
    hint: object = None


class Pair(NamedTuple):
    """Deliveries of one handler and key run one after another."""

    handler: str
    key: str


class Suspect(NamedTuple):
    """A delivery that was started when its worker died, and may be what killed it."""

    #: how many workers have died while it was started
    crashes: int
    #: how many deliveries the last of them had started in all, this one included
    company: int


class Taken(NamedTuple):
    """A lane just taken."""

    lease: Lease
    #: ids of what its former holder had started and not confirmed
    started: Sequence[int]
    #: by id: those of them that are still there, and whatever was suspect before
    suspects: Mapping[int, Suspect]
    #: handlers and keys of the followers that are set aside
    behind: Collection[Pair] = ()


class LaneState(NamedTuple):
    """A lane as stored."""

    lease: Lease
    holder: UUID | None
    #: ids of the deliveries that its holder may be running, and of those claimed ahead
    started: Sequence[int]
    prefetched: Sequence[int]


class Ready(NamedTuple):
    """A lane with work, found by :meth:`Store.probe`."""

    lane: int
    #: handler of the lane's first delivery; ``None`` where work is only parked
    handler: str | None
    #: seconds until the lane has work: 0 where it is ready
    wait: float
    #: nobody holds a live lease on it
    free: bool


class Delivery:
    """One delivery as claimed: an event on its way to one handler."""

    __slots__ = ("attempts", "claims", "epoch", "event", "handler", "hold", "id", "key", "lane")

    def __init__(
        self,
        id: int,
        lane: int,
        epoch: int,
        claims: int,
        attempts: int,
        handler: str,
        key: str | None,
        event: Event | None,
    ) -> None:
        self.id = id
        self.lane = lane
        self.epoch = epoch
        #: how many claims of it have ended before: with the epoch, this run's own token
        self.claims = claims
        #: how many attempts have failed before this one
        self.attempts = attempts
        self.handler = handler
        self.key = key
        #: ``None`` for an orphan: its event is gone
        self.event = event
        #: where a worker keeps what it knows of the lane; nothing to the store
        self.hold: Any = None

    def __repr__(self) -> str:
        return f"<Delivery {self.id} of {self.event!r} to {self.handler!r} on lane {self.lane}>"


class LaneRequest(NamedTuple):
    """What an exchange does with one lane."""

    lease: Lease
    #: claim more from it
    claim: bool
    #: write its row even if nothing is claimed: something finished or began, or the lease is old
    write: bool


@dataclass(slots=True)
class Exchange:
    """One round of the pump: delete what finished, claim what is ready, renew the leases."""

    lanes: Sequence[LaneRequest]
    #: of these lanes, and claimed under these very leases: others are ignored
    finished: Sequence[Delivery]
    #: of these lanes: what runs, or may begin to run before the next exchange
    started: Sequence[Delivery]
    #: of these lanes: what was claimed ahead
    prefetched: Sequence[Delivery]
    handlers: Sequence[str]
    #: most deliveries to claim, altogether and from one lane
    limit: int
    per_lane: int
    #: how many of those claimed may begin to run at once; the rest counts as prefetched
    room: int
    #: seconds
    lease_duration: float
    #: how many deliveries of all lanes run, or may begin to run before the next exchange
    company: int
    #: step over rows that somebody else has locked instead of waiting for them (costs a second
    #: write-ahead record for each delivery)
    careful: bool = False


@dataclass(slots=True)
class Exchanged:
    """What an exchange did."""

    #: lane to lease: those written
    leases: dict[int, Lease] = field(default_factory=dict)
    #: lanes that were to be written and are not, being lost or locked: :meth:`Store.read_lanes`
    #: tells which
    refused: set[int] = field(default_factory=set)
    #: ids of the finished deliveries whose rows were deleted
    deleted: set[int] = field(default_factory=set)
    #: ids of the finished deliveries stepped over because somebody else has locked them
    locked: set[int] = field(default_factory=set)
    #: claimed and recorded as started: may run; in lane and id order
    startable: list[Delivery] = field(default_factory=list)
    #: claimed ahead: may run once an exchange has recorded them as started
    prefetched: list[Delivery] = field(default_factory=list)


ParkedStatus = Literal["retrying", "snoozed", "dead"]


class Park(NamedTuple):
    """A delivery that is not to run now: rescheduled, snoozed or buried."""

    delivery: Delivery
    status: ParkedStatus
    #: seconds from now; ``None``: not by itself
    delay: float | None
    #: attempts to count: 0 or 1
    charge: int
    error: str | None
    #: whether later deliveries of its handler and key wait for it
    blocks: bool


class Parked(NamedTuple):
    """Ids of the deliveries that were parked, and of those that somebody else has locked.

    What is in neither is held by another worker, or gone: its outcome was refused.
    """

    parked: set[int]
    locked: set[int]


class NewEvent(NamedTuple):
    """An event on its way into the store, with the handlers that take it."""

    event: Event
    handlers: Sequence[str]
    #: seconds until its deliveries are due
    delay: float | None
    #: whether the caller supplied the id, so that it may exist already
    given_id: bool
    #: when its deliveries are due, instead of a delay; neither: at once
    available_at: datetime | None = None
    #: those of the handlers for which later events of its key do not wait until it is due
    passing: Sequence[str] = ()

    @property
    def waits(self) -> bool:
        """Whether its deliveries are due later."""
        return self.delay is not None or self.available_at is not None


class DeadLetter(NamedTuple):
    """A delivery that is not tried again by itself."""

    id: int
    event_id: UUID
    handler: str
    key: str | None
    attempts: int
    #: of the last attempt; ``None`` where none has failed
    last_error: str | None
    #: since when it is dead
    since: datetime
    #: whether later deliveries of its handler and key wait for it
    blocks: bool


class BlockedKey(NamedTuple):
    """A handler and key whose deliveries wait for the first of them."""

    handler: str
    key: str
    lane: int
    #: what the first one is: retrying, snoozed, delayed, dead or unhandled
    status: str
    #: since when
    since: datetime
    #: when it is tried again; ``None``: not by itself
    next_try: datetime | None
    attempts: int
    last_error: str | None
    #: how many wait for it
    followers: int


class Live(NamedTuple):
    """The other workers that are alive, each by its handlers."""

    others: Sequence[frozenset[str]]

    @property
    def elsewhere(self) -> frozenset[str]:
        """Every handler that one of them has."""
        return frozenset().union(*self.others)

    def having(self, handler: str) -> int:
        """How many workers have *handler*, the caller included, which has it."""
        return 1 + sum(handler in handlers for handlers in self.others)


class PurgedEvents(NamedTuple):
    """What became of one page of events."""

    #: events removed
    removed: int
    #: old enough, but with a delivery left
    undone: int
    #: old enough, but locked by somebody else
    locked: int
    #: where the next page begins; ``None``: this was the last one
    following: UUID | None


class Place(NamedTuple):
    """A row's place among others, by age."""

    moment: datetime
    id: int


class PurgedRows(NamedTuple):
    """What became of one page of dead letters, or of completed deliveries."""

    removed: int
    #: after which the next page begins; ``None``: this was the last one
    last: Place | None


class Store(Protocol):
    """What every store does. Connections are synchronous SQLAlchemy connections."""

    def publish(self, connection: Connection, events: Sequence[NewEvent]) -> None:
        """Insert *events* and their deliveries in the caller's transaction."""

    def prepare(self, connection: Connection, *, lock_timeout: float, timeout: float) -> None:
        """Fit a worker's own connection to the statements below; limits in seconds."""

    def held_up(self, error: DBAPIError) -> bool:
        """Whether *error* says that a statement did nothing: it waited too long for a lock."""

    def conflicted(self, error: DBAPIError) -> bool:
        """Whether *error* says that a transaction met what was committed after it began."""

    def in_transaction(self, connection: Connection) -> bool:
        """Whether the driver's connection is in a transaction, as far as the driver tells."""

    def enlist(
        self, connection: Connection, holder: UUID, owner: str, handlers: Sequence[str], ttl: float
    ) -> Live:
        """Say that this worker is alive for another *ttl* seconds; tell who is."""

    def resign(self, connection: Connection, holder: UUID) -> None:
        """Take this worker off the list of those alive."""

    def probe(self, connection: Connection) -> list[Ready]:
        """The lanes that have work, or will have."""

    def take(
        self,
        connection: Connection,
        holder: UUID,
        wanted: Sequence[int],
        limit: int,
        lease_duration: float,
    ) -> list[Taken]:
        """Take at most *limit* of the *wanted* lanes that nobody holds. Commits.

        What their former holders had started counts a crash each, and no attempt.

        *connection* is in no transaction and of READ COMMITTED isolation; *lease_duration* in
        seconds.
        """

    def blocked_lanes(self, connection: Connection) -> list[int]:
        """The lanes on which a parked delivery holds back later ones of its key."""

    def hold_back(
        self,
        connection: Connection,
        holder: UUID,
        leases: Sequence[Lease],
        *,
        parking: Sequence[str],
        beyond: int,
        limit: int,
    ) -> set[tuple[int, Pair]]:
        """Set followers of blocked keys aside, where claims do not read over them.

        Of each lane the first *limit* ready deliveries are looked at, and *beyond* that wait are
        left where they are; of the handlers in *parking* none where a dead one blocks. Returns
        lane, handler and key of what was moved.
        """

    def thin_out(
        self,
        connection: Connection,
        holder: UUID,
        leases: Sequence[Lease],
        *,
        hot: Collection[tuple[int, Pair]],
        kept: Sequence[Delivery],
        limit: int,
    ) -> set[tuple[int, Pair]]:
        """Set those of the *hot* pairs aside that others of their lane would have to wait for.

        At most *limit* a lane; *kept* is in flight and stays. Returns lane, handler and key of what
        was moved.
        """

    def let_go(
        self, connection: Connection, pairs: Collection[tuple[int, Pair]] | None, limit: int
    ) -> dict[tuple[int, Pair], int]:
        """Make the first *limit* followers ready of each pair with nothing parked before them.

        Of all lanes where *pairs* is ``None``. By any worker. Returns how many were moved: 0 for a
        pair that has none, nothing for one that is blocked.
        """

    def absolve(self, connection: Connection, holder: UUID, deliveries: Sequence[Delivery]) -> None:
        """Forget that *deliveries* were suspects: they have ended, and their worker lives."""

    def survived(self, connection: Connection, deliveries: Sequence[Delivery]) -> None:
        """Take back the crash counted for *deliveries*, whose lanes a live worker has lost."""

    def promote(
        self, connection: Connection, holder: UUID, leases: Iterable[Lease], limit: int
    ) -> list[int]:
        """Move parked deliveries that are due back to the ready ones; their lanes."""

    def set_aside(
        self,
        connection: Connection,
        holder: UUID,
        leases: Sequence[Lease],
        known: Sequence[str],
        limit: int,
    ) -> int:
        """Park at most *limit* deliveries a lane whose handlers are not *known*; how many."""

    def reclaim(self, connection: Connection, handlers: Sequence[str], limit: int) -> int:
        """Make at most *limit* deliveries ready that were set aside for *handlers*; how many."""

    def exchange(self, connection: Connection, holder: UUID, request: Exchange) -> Exchanged:
        """The pump: one statement, all of it fenced."""

    def renew(
        self,
        connection: Connection,
        holder: UUID,
        leases: Sequence[Lease],
        lease_duration: float,
    ) -> dict[int, Lease]:
        """Renew *leases* and nothing else; those that are still this holder's, by lane."""

    def read_lanes(self, connection: Connection, wanted: Sequence[int]) -> dict[int, LaneState]:
        """The lanes as stored: what an exchange with an unknown outcome left behind."""

    def complete(self, connection: Connection, holder: UUID, delivery: Delivery) -> bool:
        """Delete *delivery* in the caller's transaction; false: the lease is lost."""

    def park(self, connection: Connection, holder: UUID, parks: Sequence[Park]) -> Parked:
        """Reschedule, snooze or bury."""

    def relinquish(self, connection: Connection, holder: UUID, leases: Sequence[Lease]) -> set[int]:
        """Hand lanes back; the lanes that were still this holder's."""

    def can_listen(self, connection: Connection) -> bool:
        """Whether :meth:`listen` works over this connection."""

    def listen(self, connection: Connection, stopped: Callable[[], bool]) -> Iterator[None]:
        """Yield whenever something may have been published, until *stopped*."""

    def notify(self, connection: Connection) -> None:
        """Wake listeners when the caller's transaction commits."""

    def requeue(self, connection: Connection, ids: Sequence[int]) -> set[int]:
        """Give dead letters a fresh budget of attempts; the ids that were dead."""

    def dead_letters(
        self, connection: Connection, handler: str | None, limit: int, after: DeadLetter | None
    ) -> list[DeadLetter]:
        """At most *limit* dead letters behind *after*, by the time at which they died."""

    def discard(self, connection: Connection, ids: Sequence[int]) -> set[int]:
        """Remove dead letters; the ids that were dead."""

    def release(self, connection: Connection, handler: str, key: str) -> int:
        """Let no dead letter of *handler* and *key* hold others back; how many did."""

    def blocked_keys(self, connection: Connection, limit: int) -> list[BlockedKey]:
        """The keys that a parked delivery holds back, those with the most followers first."""

    def purge_events(
        self, connection: Connection, start: UUID, age: float, limit: int
    ) -> PurgedEvents:
        """Remove events that have no delivery left, of the *limit* next ones from id *start* on.

        Those that were published at least *age* seconds ago, by the database's clock. In the
        caller's transaction, which is of READ COMMITTED isolation and ends right afterwards: until
        then whoever publishes one of them again waits. It waits for nobody itself.
        """

    def purge_dead(
        self, connection: Connection, after: Place | None, age: float, limit: int
    ) -> PurgedRows:
        """Remove at most *limit* dead letters that have been dead for *age* seconds.

        In the caller's transaction, as :meth:`purge_events`; the oldest first, beginning *after*.
        """

    def purge_completed(
        self, connection: Connection, after: Place | None, age: float, limit: int
    ) -> PurgedRows:
        """Remove at most *limit* records of deliveries that completed *age* seconds ago.

        In the caller's transaction, as :meth:`purge_events`; the oldest first, beginning *after*.
        """
