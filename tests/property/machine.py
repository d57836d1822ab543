"""A machine that lives through random histories of a bus, on a store and on the model at once.

Its workers do what the real ones do, as far as the store can tell: one exchange at a time, which
names all that they have in flight; a key's deliveries one after another; failures recorded before
the next exchange. What real ones seldom do, these do all the time: they sleep over their leases
and go on, lose replies, die with transactions open, and come back with runs that ended long ago.

Everything is done in one thread, statement by statement. What would wait for a lock is not tried:
races inside of a statement are stepped through in ``tests/integration``.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias
from uuid import UUID

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sqlalchemy_relaybus.event import Event
from sqlalchemy_relaybus.lanes import lane_of, lane_of_event
from sqlalchemy_relaybus.stores.base import (
    Delivery,
    Exchange,
    Exchanged,
    LaneRequest,
    Lease,
    NewEvent,
    Pair,
    Park,
    ParkedStatus,
    Place,
)
from tests.support.stores import key_on

from .actors import Open, Worker
from .beds import Bed
from .contents import Contents
from .history import Choices, Statistics
from .model import Model, check, same

Action: TypeAlias = "Callable[[BusMachine], None]"
Condition: TypeAlias = "Callable[[BusMachine], object]"

#: What the machine does, how often in proportion, and whether it can now.
ACTIONS: list[tuple[Action, int, Condition | None]] = []

MINUTE = 60.0
#: Two, so that a worker takes back a lane that it has lost.
LANES = (7, 8)
HANDLERS = ("a", "b", "c")
#: What a worker may handle. Nobody handles ``c`` for long.
SKILLS = (("a", "b"), ("a", "b"), ("a", "b", "c"), ("a",))
#: Later events of a key do not wait for a delayed one at this handler.
PASSES = "b"
#: How many followers an operator's command lets go at once: more than there are.
ALL = 1000
FIRST = UUID(int=0)


def _ids(start: int) -> Iterable[UUID]:
    """Ids of events on one of :data:`LANES`, should they have no key."""
    return (id for n in itertools.count(start) if lane_of_event(id := UUID(int=n << 8)) in LANES)


KEYS = [key_on(LANES[0]), key_on(LANES[0], 1), key_on(LANES[1])]
PAIRS = [Pair(handler, key) for handler in HANDLERS for key in KEYS]
#: Ids that publishers supply, so that they come again.
GIVEN = list(itertools.islice(_ids(1), 4))

#: Half minutes, while the clock shows whole ones: nothing ends just now.
DURATIONS = (0.5 * MINUTE, 1.5 * MINUTE, 3.5 * MINUTE)
AGES = (0.5 * MINUTE, 2.5 * MINUTE)
SMALL = (1, 2, 3, 4)
FLAGS = (False, True)
#: What decides on a step, or on the beginning.
SEEDS = st.integers(0, 2**32 - 1)


def action(weight: int, when: Condition | None = None) -> Callable[[Action], Action]:
    """Make a method one of the :data:`ACTIONS`."""

    def add(act: Action) -> Action:
        ACTIONS.append((act, weight, when))
        return act

    return add


class BusMachine(RuleBasedStateMachine):
    """See the module."""

    def __init__(self, bed: Bed, statistics: Statistics) -> None:
        super().__init__()
        self.bed = bed
        self.store = bed.store
        self.statistics = statistics
        self.model = Model()
        self.stack = ExitStack()
        self.numbers = itertools.count(1)
        self.fresh_ids = iter(_ids(1000))
        bed.begin()
        self.operator = self.stack.enter_context(bed.connect(autocommit=True))
        self.retention = self.stack.enter_context(bed.connect(autocommit=False))
        self.open: list[Open] = []
        self.workers: list[Worker] = []

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:
                self.drain()
                self.statistics.examples += 1
                self.statistics.tell()
        finally:
            for each in self.open:
                each.stack.close()
            self.stack.close()

    # -- helpers -------------------------------------------------------------------------------

    def born(self, handlers: Sequence[str]) -> Worker:
        connection = self.stack.enter_context(self.bed.connect(autocommit=True))
        taker = self.stack.enter_context(self.bed.connect(autocommit=False))
        n = next(self.numbers)
        return Worker(f"worker {n}", UUID(int=n), handlers, connection, taker)

    def transaction(self, what: str) -> Open:
        stack = ExitStack()
        connection = stack.enter_context(self.bed.connect(autocommit=False))
        return Open(f"{what} {next(self.numbers)}", connection, stack)

    @property
    def seen(self) -> Contents:
        return self.bed.contents()

    def busy(self) -> set[int]:
        """What open transactions have locked: nothing else is tried with it that would wait."""
        return set(self.model.completing)

    def past(self, worker: Worker) -> list[Delivery]:
        """Its old runs; those first whose deliveries are still ready, should there be any."""
        busy = self.busy()
        past = [each for each in reversed(worker.past) if each.id not in busy]
        ready = [each for each in past if each.id in self.model.stored.ready]
        return ready * 2 + past

    # -- the beginning -------------------------------------------------------------------------

    @initialize(seed=SEEDS)
    def start(self, seed: int) -> None:
        self._chosen(seed)
        self.workers = [self.born(skills) for skills in SKILLS[:3]]
        for _ in range(self.one((1, 2, 3), "publishers")):
            self._publish(self._batch(), False)
        self._take(self.workers[0], self.some(LANES, "lanes"), 2, 1.5 * MINUTE)

    @rule(seed=SEEDS)
    def step(self, seed: int) -> None:
        """One action. Hypothesis would choose rules evenly, and leave some out of a history."""
        self._chosen(seed)
        likely = [
            act.__name__
            for act, weight, when in ACTIONS
            if when is None or when(self)
            for _ in range(weight)
        ]
        getattr(self, self.one(likely, "action"))()

    def _chosen(self, seed: int) -> None:
        choices = Choices(seed)
        self.one, self.some = choices.one, choices.some

    # -- publishers ----------------------------------------------------------------------------

    @action(5)
    def publish(self) -> None:
        stays_open = self.one([False, False, True], "stays open")
        self._publish(self._batch(), stays_open)

    def _batch(self) -> list[Any]:
        """Of each event: its id if the publisher gives one, its key, handlers and delay."""
        return [
            (
                self.one([None, *GIVEN], "id") if self.one(FLAGS, "has an id") else None,
                self.one([None, *KEYS, *KEYS], "key"),
                self.some(HANDLERS, "handlers"),
                self.one([None, None, None, 0.5 * MINUTE, 1.5 * MINUTE], "delay"),
            )
            for _ in range(self.one((1, 2, 3, 4), "events"))
        ]

    def _publish(self, batch: list[Any], stays_open: bool) -> None:
        model = self.model
        new = []
        for given, key, handlers, delay in batch:
            event = Event(given or next(self.fresh_ids), "test.happened", "{}", key)
            stored = model.stored.events.get(event.id)
            keys = [key, stored.key if stored else None]
            if not model.locked_events[event.id] and not any(
                each is not None and model.locked_keys[each] for each in keys
            ):
                new.append(
                    NewEvent(
                        event,
                        handlers,
                        delay,
                        given_id=given is not None,
                        passing=[PASSES] if PASSES in handlers else [],
                    )
                )
        if not new:
            return
        open = self.transaction("publisher")
        open.additions = model.publishing(new)
        open.events = [each.event.id for each in new]
        open.keys = [key for each in new if (key := each.event.key) is not None]
        open.keys += [each.key for each in open.additions if each.key is not None]
        self.store.publish(open.connection, new)
        model.locked_events.update(open.events)
        model.locked_keys.update(open.keys)
        self.open.append(open)
        if not stays_open:
            self._end(open, True)

    @action(5, lambda self: self.open)
    def end_transaction(self) -> None:
        commit = self.one([True, True, False], "commit")
        by_name = {open.name: open for open in self.open}
        self._end(by_name[self.one(list(by_name), "transaction")], commit)

    def _end(self, open: Open, commit: bool) -> None:
        if commit:
            open.connection.commit()
        else:
            open.connection.rollback()
        open.stack.close()
        self.open.remove(open)
        model = self.model
        model.locked_events.subtract(open.events)
        model.locked_keys.subtract(open.keys)
        if commit and open.additions:
            model.published(open.additions, self.seen)
        if open.delivery is not None and open.worker is not None:
            model.completed(open.delivery, committed=commit)
            if commit and open.delivery.id in open.worker.started:
                del open.worker.started[open.delivery.id]
                open.worker.past.append(open.delivery)

    # -- time and death ------------------------------------------------------------------------

    @action(5)
    def time_passes(self) -> None:
        minutes = self.one([1, 1, 2, 5], "minutes")
        self._sleep(minutes)

    def _sleep(self, minutes: int) -> None:
        self.model.now += minutes * MINUTE
        self.bed.set_clock(self.model.now)

    @action(1)
    def crash(self) -> None:
        """A worker dies, with its transactions; its process starts again as another holder."""
        handlers = self.one(SKILLS, "handlers")
        worker = self._any()
        for open in [each for each in self.open if each.worker is worker]:
            self._end(open, False)
        n = next(self.numbers)
        self.workers[self.workers.index(worker)] = Worker(
            f"worker {n}", UUID(int=n), handlers, worker.connection, worker.taker
        )

    def _any(self, workers: Sequence[Worker] | None = None) -> Worker:
        by_name = {worker.name: worker for worker in workers or self.workers}
        return by_name[self.one(list(by_name), "worker")]

    # -- lanes ---------------------------------------------------------------------------------

    @action(4)
    def take(self) -> None:
        """Of any lanes, also those that it believes to have: it never takes from itself."""
        wanted = self.some(LANES, "lanes")
        limit = self.one((1, 2), "limit")
        lease = self.one(DURATIONS, "lease")
        self._take(self._any(), wanted, limit, lease)

    def _take(self, worker: Worker, wanted: Sequence[int], limit: int, lease: float) -> None:
        reply = self.store.take(worker.taker, worker.id, wanted, limit, lease)
        self.model.taken(worker.id, wanted, limit, lease, reply)
        for taken in reply:
            worker.lose(taken.lease.lane)
            worker.leases[taken.lease.lane] = taken.lease

    @action(2, lambda self: self._holders)
    def lane_goes_round(self) -> None:
        """Another worker takes a lane and hands it back, while its holder sleeps."""
        worker = self._any(self._holders)
        lane = self.one(sorted(worker.leases), "lane")
        other = self._any([each for each in self.workers if each is not worker])
        self._sleep(5)
        self._take(other, [lane], 1, MINUTE / 2)
        if lane in other.leases and self.one(FLAGS, "comes back"):
            self._relinquish(other, [other.leases[lane]])
            other.lose(lane)
            self._take(worker, [lane], 1, 3.5 * MINUTE)

    @action(1, lambda self: self._holders)
    def renew(self) -> None:
        lease = self.one(DURATIONS, "lease")
        worker = self._any(self._holders)
        leases = self._leases(worker)
        reply = self.store.renew(worker.connection, worker.id, leases, lease)
        self._refused(len(leases) - len(reply))
        self.model.renewed(worker.id, leases, lease, reply)
        for lane in reply.keys() & worker.leases.keys():
            worker.leases[lane] = reply[lane]

    @action(1, lambda self: self._holders)
    def relinquish(self) -> None:
        worker = self._any(self._holders)
        reply = self._relinquish(worker, self._leases(worker))
        if self.one(FLAGS, "knows of it"):
            for lane in reply:
                worker.lose(lane)

    def _relinquish(self, worker: Worker, leases: Sequence[Lease]) -> set[int]:
        reply = self.store.relinquish(worker.connection, worker.id, leases)
        self._refused(len(leases) - len(reply))
        self.model.relinquished(worker.id, leases, reply)
        return reply

    @action(3, lambda self: self._holders)
    def look_at_lanes(self) -> None:
        """Whoever has lost a lane learns it here: until then it goes on with it."""
        worker = self._any(self._holders)
        stored = self.store.read_lanes(worker.connection, LANES)
        for lane, state in stored.items():
            row = self.model.lane(lane)
            same(
                (state.lease[:3], state.holder, set(state.started), set(state.prefetched)),
                ((lane, row.epoch, row.version), row.holder, row.started, row.prefetched),
                "a lane as it is read",
            )
        for lane, lease in list(worker.leases.items()):
            if self.model.holds(worker.id, lane, lease.epoch):
                worker.leases[lane] = stored[lane].lease
            else:
                worker.lose(lane)

    @property
    def _holders(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.leases]

    def _leases(self, worker: Worker) -> list[Lease]:
        """Some of its leases; perhaps of an older version, as before a reply that was lost."""
        lanes = self.some(sorted(worker.leases), "lanes")
        return [self._lease(worker, lane) for lane in lanes]

    def _lease(self, worker: Worker, lane: int) -> Lease:
        lease = worker.leases[lane]
        how = self.one(["own"] * 4 + ["found", "older"], "lease")
        if how != "own":
            # the hint helps to find the lane, and is no part of the fence
            stored = self.store.read_lanes(worker.connection, [lane])
            lease = lease._replace(hint=stored[lane].lease.hint)
        if how == "older":
            lease = lease._replace(version=lease.version - 1)
        return lease

    def _refused(self, count: int) -> None:
        self.statistics.refused += count

    # -- the pump ------------------------------------------------------------------------------

    @action(14, lambda self: self._holders)
    def exchange(self) -> None:
        finish = self.one([0, 1, 2, 4], "how many are done")
        limit = self.one([6, 6, 3, 2, 1, 0], "limit")
        room = self.one([4, 6, 2, 1, 0], "room")
        promotes = self.one(FLAGS, "begin those claimed ahead")
        lost = self.one([False, False, False, True], "the reply is lost")
        worker = self._any(self._holders)
        leases = self._leases(worker)
        lanes = [lease.lane for lease in leases]
        for _ in range(finish):
            # one after another: the next of a key runs when the one before has ended
            heads = worker.on(lanes, {d.id: d for d in worker.heads(self.busy())})
            if heads:
                done = self.one(heads, "done")
                worker.finished[done.id] = worker.started.pop(done.id)
        finished = worker.on(lanes, worker.finished)
        late = [each for each in self.past(worker) if each.lane in lanes]
        if bool(late) and self.one(FLAGS, "an old run is reported"):
            finished.append(self.one(late, "old run"))
        started = worker.on(lanes, worker.started)
        prefetched = worker.on(lanes, worker.prefetched)
        promoted = prefetched if promotes else []
        must = {each.lane for each in [*finished, *promoted]}
        request = Exchange(
            lanes=[
                LaneRequest(
                    lease,
                    self.one([True, True, True, False], "claim"),
                    lease.lane in must or self.one(FLAGS, "write"),
                )
                for lease in leases
            ],
            finished=finished,
            started=started + promoted,
            prefetched=[] if promotes else prefetched,
            handlers=worker.handlers,
            limit=limit,
            per_lane=self.one([4, 2, 1], "per lane"),
            room=room,
            lease_duration=self.one(DURATIONS, "duration"),
            company=len(worker.started) + min(room, limit),
            careful=self.one(FLAGS, "careful"),
        )
        reply = self.store.exchange(worker.connection, worker.id, request)
        self._refused(len(reply.refused))
        self.statistics.claimed += len(reply.startable) + len(reply.prefetched)
        self.model.exchanged(worker.id, request, reply)
        if lost:
            self._settle(worker, request)
        else:
            self._take_note(worker, request, reply, promoted)

    def _take_note(
        self, worker: Worker, request: Exchange, reply: Exchanged, promoted: Iterable[Delivery]
    ) -> None:
        worker.leases.update(reply.leases)
        self._confirmed(worker, request, reply.leases)
        for each in promoted:
            if each.lane in reply.leases:
                worker.started[each.id] = worker.prefetched.pop(each.id)
        worker.started.update({each.id: each for each in reply.startable})
        worker.prefetched.update({each.id: each for each in reply.prefetched})

    def _confirmed(self, worker: Worker, request: Exchange, lanes: Iterable[int]) -> None:
        for each in request.finished:
            if each.lane in lanes and worker.finished.get(each.id) is each:
                worker.past.append(worker.finished.pop(each.id))

    def _settle(self, worker: Worker, request: Exchange) -> None:
        """The reply was lost: perhaps sent again, then read what became of it."""
        before = {each.lease.lane: each.lease for each in request.lanes}
        stored = self.store.read_lanes(worker.connection, list(before))
        if self.one(FLAGS, "sent again"):
            request.lanes = [
                each._replace(lease=each.lease._replace(hint=stored[each.lease.lane].lease.hint))
                for each in request.lanes
            ]
            reply = self.store.exchange(worker.connection, worker.id, request)
            self._refused(len(reply.refused))
            self.model.exchanged(worker.id, request, reply)
            stored = self.store.read_lanes(worker.connection, list(before))
        committed = []
        for lane, lease in before.items():
            if stored[lane].holder != worker.id or stored[lane].lease.epoch != lease.epoch:
                worker.lose(lane)
                continue
            if stored[lane].lease.version != lease.version:
                committed.append(lane)
            worker.leases[lane] = stored[lane].lease
        self._confirmed(worker, request, committed)

    # -- outcomes ------------------------------------------------------------------------------

    @property
    def _running(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.heads(self.busy())]

    @action(5, lambda self: self._running)
    def complete(self) -> None:
        """In a handler's transaction, which may stay open for long."""
        stays_open = self.one(FLAGS, "stays open")
        worker = self._any(self._running)
        delivery = self.one(worker.heads(self.busy()), "delivery")
        self._complete(worker, delivery, stays_open)

    def _complete(self, worker: Worker, delivery: Delivery, stays_open: bool) -> None:
        open = self.transaction("handler")
        self.open.append(open)
        completed = self.store.complete(open.connection, worker.id, delivery)
        self.model.completing_now(worker.id, delivery, completed)
        if completed:
            open.worker, open.delivery = worker, delivery
            if not stays_open:
                self._end(open, True)
        else:
            self._refused(1)
            self._end(open, False)
            if delivery.id in worker.started:
                worker.give_back(delivery)
                worker.past.append(delivery)

    @action(5, lambda self: self._running)
    def fail(self) -> None:
        count = self.one((1, 2), "how many")
        worker = self._any(self._running)
        heads = worker.heads(self.busy())
        chosen = self.some(heads, "failed", count)
        parks = [self._park(each) for each in chosen]
        late = [each for each in self.past(worker) if each.id not in {d.id for d in chosen}]
        if bool(late) and self.one(FLAGS, "an old run fails, too"):
            parks.append(self._park(self.one(late, "old run")))
        self._record(worker, parks)
        for each in chosen:
            worker.give_back(each)
            worker.past.append(each)

    def _record(self, worker: Worker, parks: Sequence[Park]) -> None:
        reply = self.store.park(worker.connection, worker.id, parks)
        self._refused(len(parks) - len(reply.parked))
        self.model.parks(worker.id, parks, reply)

    def _park(self, delivery: Delivery) -> Park:
        status: ParkedStatus = self.one(["retrying", "retrying", "snoozed", "dead"], "status")
        delay = None if status == "dead" else self.one(DURATIONS, "delay")
        blocks = self.one([True, True, False], "blocks")
        return Park(delivery, status, delay, int(status == "retrying"), "it failed", blocks)

    @action(1, lambda self: self._running)
    def release(self) -> None:
        """Give a delivery back that has not begun to run: the store learns it by the next list."""
        worker = self._any(self._running)
        worker.give_back(self.one(worker.heads(self.busy()), "delivery"))

    @property
    def _reminiscent(self) -> list[Worker]:
        return [worker for worker in self.workers if self.past(worker)]

    @action(4, lambda self: self._reminiscent)
    def old_run_reports(self) -> None:
        """A run that has ended, or whose lane was lost, goes on in an abandoned thread."""
        how = self.one(["complete", "complete", "park", "absolve"], "how")
        worker = self._any(self._reminiscent)
        delivery = self.one(self.past(worker), "delivery")
        if how == "complete":
            self._complete(worker, delivery, False)
        elif how == "park":
            self._record(worker, [self._park(delivery)])
        else:
            self._absolve(worker, [delivery])

    @action(2, lambda self: self.model.stored.suspects)
    def absolve(self) -> None:
        """What has ended in an orderly way, or is about to."""
        suspects = self.model.stored.suspects
        known = {
            worker: mine
            for worker in self.workers
            if (mine := [d for d in [*worker.started.values(), *worker.past] if d.id in suspects])
        }
        if known:
            worker = self._any(list(known))
            self._absolve(worker, self.some(known[worker], "deliveries", 2))

    def _absolve(self, worker: Worker, deliveries: Sequence[Delivery]) -> None:
        self.store.absolve(worker.connection, worker.id, deliveries)
        self.model.absolved(worker.id, deliveries)

    @action(1, lambda self: self.model.stored.suspects)
    def survive(self) -> None:
        """Who has lost a lane and is alive takes back what the takeover counted."""
        worker = self._any()
        chosen = [d for d in worker.past if d.id in self.model.stored.suspects]
        self.store.survived(worker.connection, chosen)
        self.model.survived(chosen)

    # -- the parked ones -----------------------------------------------------------------------

    def _waiting(self, *statuses: str) -> bool:
        return any(parked.status in statuses for parked in self.model.stored.parked.values())

    @action(4, lambda self: self._holders and self._waiting("delayed", "retrying", "snoozed"))
    def promote(self) -> None:
        limit = self.one(SMALL, "limit")
        worker = self._any(self._holders)
        self._promote(worker, self._leases(worker), limit)

    def _promote(self, worker: Worker, leases: Sequence[Lease], limit: int) -> None:
        reply = self.store.promote(worker.connection, worker.id, leases, limit)
        self.model.promoted(worker.id, leases, limit, reply, self.seen)

    @action(2, lambda self: self._holders)
    def set_aside(self) -> None:
        limit = self.one(SMALL, "limit")
        others = self.one([(), ("b",)], "others' handlers")
        worker = self._any(self._holders)
        leases = self._leases(worker)
        known = [*worker.handlers, *others]
        count = self.store.set_aside(worker.connection, worker.id, leases, known, limit)
        self.model.set_aside(worker.id, leases, known, limit, count)

    @action(2, lambda self: self._waiting("unhandled"))
    def reclaim(self) -> None:
        limit = self.one(SMALL, "limit")
        worker = self._any()
        count = self.store.reclaim(worker.connection, worker.handlers, limit)
        self.model.reclaimed(worker.handlers, limit, count, self.seen)

    @action(2, lambda self: self._waiting("dead"))
    def requeue(self) -> None:
        """Of any parked ones: only the dead are requeued."""
        parked = sorted(self.model.stored.parked)
        ids = self.some(parked, "ids")
        self.model.requeued(ids, self.store.requeue(self.operator, ids))

    @action(2, lambda self: self._waiting("dead"))
    def discard(self) -> None:
        """Of any parked ones: only the dead are discarded."""
        parked = sorted(self.model.stored.parked)
        ids = self.some(parked, "ids")
        self.model.discarded_by_hand(ids, self.store.discard(self.operator, ids), ALL)

    @action(2, lambda self: self._waiting("dead"))
    def release_key(self) -> None:
        pair = self.one(PAIRS, "pair")
        count = self.store.release(self.operator, *pair)
        self.model.released(pair, count, ALL)

    # -- followers -----------------------------------------------------------------------------

    @action(6, lambda self: self._holders and self.model.stored.parked)
    def hold_back(self) -> None:
        parking = self.one([[], ["a"], list(HANDLERS)], "parking")
        beyond = self.one([0, 3, 1, 3], "beyond")
        limit = self.one([100, 100, 3, 1], "limit")
        worker = self._any(self._holders)
        leases = self._leases(worker)
        reply = self.store.hold_back(
            worker.connection, worker.id, leases, parking=parking, beyond=beyond, limit=limit
        )
        self.model.held_back(
            worker.id, leases, parking=parking, beyond=beyond, limit=limit, reply=reply
        )

    @action(2, lambda self: self._holders)
    def thin_out(self) -> None:
        hot = [(lane_of(each.key), each) for each in self.some(PAIRS, "hot", 3)]
        limit = self.one([100, 3, 1], "limit")
        worker = self._any(self._holders)
        leases = self._leases(worker)
        kept = [each for flight in worker.flight for each in flight.values()]
        reply = self.store.thin_out(
            worker.connection, worker.id, leases, hot=hot, kept=kept, limit=limit
        )
        self.model.thinned_out(worker.id, leases, hot=hot, kept=kept, limit=limit, reply=reply)

    @action(4, lambda self: self._waiting("behind"))
    def let_go(self) -> None:
        limit = self.one(SMALL, "limit")
        everywhere = self.one(FLAGS, "everywhere")
        pairs = [] if everywhere else self.some(PAIRS, "pairs", 3)
        asked = None if everywhere else [(lane_of(each.key), each) for each in pairs]
        self._let_go(asked, limit)

    def _let_go(self, asked: Sequence[tuple[int, Pair]] | None, limit: int) -> None:
        reply = self.store.let_go(self.operator, asked, limit)
        self.model.let_go(asked, limit, reply)

    # -- retention -----------------------------------------------------------------------------

    @action(2)
    def purge_events(self) -> None:
        age = self.one(AGES, "age")
        limit = self.one((1, 2, 3, 4, 5), "limit")
        pages = []
        start: UUID | None = FIRST
        while start is not None:
            with self.retention.begin():
                page = self.store.purge_events(self.retention, start, age, limit)
            pages.append(page)
            start = page.following
        self.model.purged_events(age, pages)

    @action(2, lambda self: self._waiting("dead"))
    def purge_dead(self) -> None:
        age = self.one(AGES, "age")
        limit = self.one((1, 2, 3), "limit")
        pages = self.one((1, 2, 3), "pages")
        after: Place | None = None
        for _ in range(pages):
            with self.retention.begin():
                page = self.store.purge_dead(self.retention, after, age, limit)
            self.model.purged_dead(age, limit, page, self.seen)
            after = page.last
            if after is None:
                break

    # -- hints ---------------------------------------------------------------------------------

    @action(1)
    def probe(self) -> None:
        self.model.probed(self.store.probe(self.operator))

    @action(1)
    def enlist(self) -> None:
        ttl = self.one(DURATIONS, "ttl")
        worker = self._any()
        live = self.store.enlist(worker.connection, worker.id, "test", worker.handlers, ttl)
        self.model.enlisted(worker.id, worker.handlers, ttl, live.others)

    # -- after every step ----------------------------------------------------------------------

    @invariant()
    def store_equals_model(self) -> None:
        self.statistics.steps += 1
        self.equal()
        self.model.whole()

    def equal(self) -> None:
        differences = self.model.stored.differences(self.seen)
        check(not differences, "the store is not as the model is", "\n" + "\n".join(differences))

    # -- the end -------------------------------------------------------------------------------

    def drain(self) -> None:
        """Whatever has happened: a worker that handles all gets everything done, once."""
        note("everything that is open is rolled back, and a worker does the rest")
        for open in list(self.open):
            self._end(open, False)
        model = self.model
        model.now += 60 * MINUTE
        self.bed.set_clock(model.now)
        last = self.born(HANDLERS)
        self._take(last, LANES, len(LANES), MINUTE / 2)
        same(set(last.leases), set(LANES), "the lanes that the last worker took")
        for _ in range(10 + 2 * len(model.stored.ready) + 2 * len(model.stored.parked)):
            leases = list(last.leases.values())
            self._promote(last, leases, 100)
            count = self.store.reclaim(last.connection, HANDLERS, 100)
            model.reclaimed(HANDLERS, 100, count, self.seen)
            self._let_go(None, 100)
            parked = list(model.stored.parked)
            if parked:
                model.requeued(parked, self.store.requeue(self.operator, parked))
            finished = list(last.started.values())
            request = Exchange(
                [LaneRequest(lease, True, True) for lease in leases],
                finished,
                [],
                [],
                HANDLERS,
                limit=100,
                per_lane=50,
                room=100,
                lease_duration=MINUTE / 2,
                company=100,
            )
            reply = self.store.exchange(last.connection, last.id, request)
            model.exchanged(last.id, request, reply)
            last.started = {each.id: each for each in reply.startable}
            last.leases = reply.leases
            if not last.started and not finished and not model.stored.parked:
                break
        self.equal()
        model.whole()
        check(not model.stored.ready and not model.stored.parked, "not all of it was done")
