"""A worker that was thought dead changes nothing when it comes back.

A lane has one holder at a time, and its epoch grows in the write that names the next one. Every
write of a worker names the lane's epoch and its holder and checks them on the newest version of a
lane that it locks, so a takeover and such a write never both win. What is refused changes nothing,
and the worker is told so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from uuid import uuid4

import pytest
from sqlalchemy import Engine, func, select, text, update
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from sqlalchemy_relaybus import Context, Event, RelayBus
from sqlalchemy_relaybus.lanes import lane_of
from sqlalchemy_relaybus.stores.base import Delivery, Lease, Pair
from tests.support.stores import (
    EXPIRED,
    Bench,
    Holder,
    backend,
    ids,
    key_on,
    new_event,
    parked,
    waiting,
)
from tests.support.workers import (
    Runs,
    dead,
    drained,
    eventually,
    held_lanes,
    publish,
    steal,
    working,
)

LANE = 7
KEY, OTHER_KEY = key_on(LANE), key_on(LANE, 1)
PAIR = Pair("a", KEY)


@pytest.fixture
def bus() -> RelayBus:
    return RelayBus()


# -- one holder at a time --------------------------------------------------------------------------


def test_two_takers_never_get_one_lane_and_do_not_wait_for_each_other(bench: Bench) -> None:
    old, new, late = bench.holder(), bench.holder(), bench.holder()
    old.take(LANE, lease=EXPIRED)
    with bench.connect() as taker:
        new.begin_take(taker, LANE)
        assert late.take(LANE, LANE + 1).keys() == {LANE + 1}
        taker.commit()
    assert late.take(LANE) == {}
    assert bench.lane(LANE).holder == new.id


def test_a_live_lease_is_not_taken(bench: Bench) -> None:
    bench.holder().take(LANE)
    assert bench.holder().take(LANE) == {}


def test_the_epoch_grows_by_one_whenever_the_lane_changes_hands(bench: Bench) -> None:
    first, second = bench.holder(), bench.holder()
    assert first.take(LANE, lease=EXPIRED)[LANE].lease.epoch == 1
    assert second.take(LANE)[LANE].lease.epoch == 2
    second.exchange()
    assert second.leases[LANE].epoch == 2
    assert bench.store.relinquish(second.connection, second.id, [second.leases[LANE]]) == {LANE}
    assert bench.lane(LANE).epoch == 2
    taken = first.take(LANE)[LANE]
    assert (taken.lease.epoch, taken.lease.version, taken.started) == (3, 0, [])


def test_a_renewal_between_a_takers_snapshot_and_its_lock_keeps_the_lane(bench: Bench) -> None:
    old, new = bench.holder(), bench.holder()
    old.take(LANE, lease=EXPIRED)
    with bench.gate(new.taker) as gate:
        with waiting(new.taker, lambda: new.take(LANE)) as takeover:
            assert old.exchange(lease=60).leases.keys() == {LANE}
            gate.rollback()
            assert takeover.result() == {}
    assert bench.lane(LANE).holder == old.id
    assert old.exchange().leases.keys() == {LANE}


# -- takeovers against what the holder does, step by step ------------------------------------------


def test_a_claim_that_read_before_the_lane_was_locked_is_refused(bench: Bench) -> None:
    """Its snapshot shows the lane as its own, and the deliveries as free or running."""
    old, new = bench.holder(), bench.holder()
    bench.publish(new_event(KEY), new_event(OTHER_KEY))
    old.take(LANE, lease=EXPIRED)
    [finished] = old.exchange(limit=1, lease=EXPIRED).startable
    with bench.connect() as taker:
        bench.lock_lane(taker, LANE, "NO KEY UPDATE")  # as somebody's write, which comes first
        with waiting(old.connection, lambda: old.exchange(finished=[finished])) as exchange:
            new.begin_take(taker, LANE)
            taker.commit()
            before = bench.contents()
            reply = exchange.result()
    assert (reply.leases, reply.deleted, reply.locked) == ({}, set(), set())
    assert (reply.startable, reply.prefetched) == ([], [])
    assert reply.refused == {LANE}
    assert bench.contents() == before


def test_an_exchange_that_steps_over_locks_is_refused_beside_a_takeover(bench: Bench) -> None:
    old, new = bench.holder(), bench.holder()
    bench.publish(new_event(KEY), new_event(OTHER_KEY))
    old.take(LANE, lease=EXPIRED)
    [finished] = old.exchange(limit=1, lease=EXPIRED).startable
    with bench.connect() as taker:
        new.begin_take(taker, LANE)
        for _ in ("before its commit", "after it"):
            reply = old.exchange(finished=[finished], careful=True)
            assert (reply.leases, reply.deleted, reply.startable) == ({}, set(), [])
            assert reply.refused == {LANE}
            taker.commit()
    assert len(bench.deliveries()) == 2


def test_an_exchange_in_progress_keeps_the_lane(bench: Bench) -> None:
    """It has written the lane, and waits for somebody's lock on what it is to delete."""
    old, new = bench.holder(), bench.holder()
    bench.publish(new_event(KEY))
    old.take(LANE, lease=EXPIRED)
    [finished] = old.claim(lease=EXPIRED)
    with bench.connect() as other:
        bench.lock_delivery(other, finished.id)
        with waiting(old.connection, lambda: old.exchange(finished=[finished])) as exchange:
            assert new.take(LANE) == {}
            other.rollback()
            assert exchange.result().deleted == {finished.id}
    assert new.take(LANE) == {}
    assert bench.lane(LANE).holder == old.id


@pytest.mark.parametrize("commits", [True, False])
def test_a_renewal_in_progress_keeps_the_lane(bench: Bench, commits: bool) -> None:
    old, new = bench.holder(), bench.holder()
    old.take(LANE, lease=EXPIRED)
    renewal = bench.connect()
    assert bench.store.renew(renewal, old.id, [old.leases[LANE]], 60).keys() == {LANE}
    assert new.take(LANE) == {}
    if commits:
        renewal.commit()
        assert new.take(LANE) == {}
    else:
        renewal.rollback()
        assert new.take(LANE).keys() == {LANE}


@pytest.mark.parametrize("commits", [True, False])
def test_a_renewal_beside_a_takeover_does_not_wait_and_has_no_effect(
    bench: Bench, commits: bool
) -> None:
    old, new = bench.holder(), bench.holder()
    old.take(LANE, lease=EXPIRED)
    with bench.connect() as taker:
        new.begin_take(taker, LANE)
        before = bench.contents()
        assert old.renew() == set()
        assert bench.contents() == before
        if commits:
            taker.commit()
            before = bench.contents()
            assert old.renew() == set()
            assert bench.contents() == before
        else:
            taker.rollback()
            assert old.renew() == {LANE}
    assert bench.lane(LANE).holder == (new.id if commits else old.id)


@pytest.mark.parametrize("commits", [True, False])
def test_a_hand_back_in_progress_is_not_taken_over(bench: Bench, commits: bool) -> None:
    """Its commit leaves the next holder no suspects: its worker lives."""
    old, new = bench.holder(), bench.holder()
    bench.publish(new_event(KEY))
    old.take(LANE, lease=EXPIRED)
    [started] = old.claim(lease=EXPIRED)
    handing_back = bench.connect()
    assert old.relinquish(handing_back) == {LANE}
    assert new.take(LANE) == {}
    if commits:
        handing_back.commit()
    else:
        handing_back.rollback()
    taken = new.take(LANE)[LANE]
    assert taken.lease.epoch == 2
    assert taken.suspects.keys() == (set() if commits else {started.id})
    assert ids(new.claim()) == [started.id]


def test_a_hand_back_between_a_takers_snapshot_and_its_lock_leaves_no_suspects(
    bench: Bench,
) -> None:
    old, new = bench.holder(), bench.holder()
    bench.publish(new_event(KEY))
    old.take(LANE, lease=EXPIRED)
    old.claim(lease=EXPIRED)
    with bench.gate(new.taker) as gate:
        with waiting(new.taker, lambda: new.take(LANE)) as takeover:
            assert old.relinquish() == {LANE}
            gate.rollback()
            taken = takeover.result()[LANE]
    assert (taken.started, taken.suspects) == ([], {})
    assert bench.lane(LANE).holder == new.id


@pytest.mark.parametrize("commits", [True, False])
def test_a_hand_back_beside_a_takeover_does_not_wait_and_has_no_effect(
    bench: Bench, commits: bool
) -> None:
    old, new = bench.holder(), bench.holder()
    old.take(LANE, lease=EXPIRED)
    with bench.connect() as taker:
        new.begin_take(taker, LANE)
        before = bench.contents()
        assert old.relinquish() == set()
        assert bench.contents() == before
        if commits:
            taker.commit()
            before = bench.contents()
            assert old.relinquish() == set()
            assert bench.contents() == before
        else:
            taker.rollback()
            assert old.relinquish() == {LANE}
    assert bench.lane(LANE).holder == (new.id if commits else None)


def test_somebodys_lock_on_one_delivery_beside_the_renewal_of_the_lanes(bench: Bench) -> None:
    """An exchange that waits for it renews nothing; what is sent instead does."""
    holder, other = bench.holder(), bench.holder()
    bench.publish(new_event(key_on(1)), new_event(key_on(2)))
    holder.take(1, 2, lease=EXPIRED)
    locked, free = finished = holder.claim(lease=EXPIRED)
    with bench.connect() as stranger:
        bench.lock_delivery(stranger, locked.id)
        with waiting(holder.connection, lambda: holder.exchange(finished=finished)) as exchange:
            assert [bench.lane(lane).version for lane in (1, 2)] == [1, 1]
            with bench.engine.begin() as connection:  # as its lock timeout would
                connection.execute(select(func.pg_cancel_backend(backend(holder.connection))))
            with pytest.raises(OperationalError):
                exchange.result()
        assert holder.renew() == {1, 2}
        assert other.take(1, 2) == {}
        reply = holder.exchange(finished=finished, careful=True)
        assert reply.leases.keys() == {1, 2}
        assert (reply.deleted, reply.locked) == ({free.id}, {locked.id})
    assert holder.exchange(finished=[locked], careful=True).deleted == {locked.id}
    assert bench.deliveries() == []


# -- stale tokens ----------------------------------------------------------------------------------


@dataclass
class Scene:
    """A lane that has changed hands, and something in it for everything that its holder may do.

    A delivery that is claimed and suspect, one that is parked and due, one that waits behind it,
    and one of a handler that nobody has.
    """

    bench: Bench
    holder: Holder
    delivery: Delivery
    due: int

    @property
    def lease(self) -> Lease:
        return self.holder.leases[LANE]

    @lease.setter
    def lease(self, lease: Lease) -> None:
        self.holder.leases[LANE] = lease


@pytest.fixture
def scene(engine: Engine) -> Iterator[Scene]:
    with Bench(engine) as bench:
        bench.publish(
            new_event(KEY), new_event(OTHER_KEY), new_event(OTHER_KEY, handlers=("gone",))
        )
        before, holder = bench.holder(), bench.holder()
        before.take(LANE, lease=EXPIRED)
        before.claim(lease=EXPIRED)
        holder.take(LANE)  # epoch 2, both are suspects
        delivery, due = holder.claim()
        holder.park(parked(due, delay=0))
        bench.publish(new_event(OTHER_KEY))
        yield Scene(bench, holder, delivery, due.id)


def older_epoch(scene: Scene) -> None:
    scene.lease = scene.lease._replace(epoch=scene.lease.epoch - 1)
    scene.delivery.epoch -= 1


def other_holder(scene: Scene) -> None:
    """As after a restored backup, where an epoch comes again."""
    scene.holder.id = uuid4()


def taken_over(scene: Scene) -> None:
    """A zombie: what it believes was true until just now."""
    scene.holder.expire(LANE)
    assert scene.bench.holder().take(LANE).keys() == {LANE}


def handed_back(scene: Scene) -> None:
    """Nobody has taken it since, so the epoch is the same."""
    assert scene.holder.relinquish() == {LANE}


def older_version(scene: Scene) -> None:
    scene.lease = scene.lease._replace(version=scene.lease.version - 1)


def older_claims(scene: Scene) -> None:
    scene.delivery.claims -= 1


def finish(scene: Scene) -> bool:
    reply = scene.holder.exchange(finished=[scene.delivery], claim=False)
    assert reply.locked == set()
    assert bool(reply.leases) or not reply.deleted
    return reply.deleted == {scene.delivery.id}


def renew_and_claim(scene: Scene) -> bool:
    reply = scene.holder.exchange()
    assert not reply.deleted
    assert [d.id for d in reply.startable] == ([scene.delivery.id] if reply.leases else [])
    return reply.leases.keys() == {LANE}


def complete(scene: Scene) -> bool:
    return scene.holder.complete(scene.delivery)


def complete_in_a_transaction(scene: Scene) -> bool:
    with scene.bench.connect() as handler:
        done = scene.holder.complete(scene.delivery, handler)
        handler.commit()  # as nobody would that was refused
    return done


def park(scene: Scene) -> bool:
    reply = scene.bench.store.park(
        scene.holder.connection, scene.holder.id, [parked(scene.delivery)]
    )
    assert reply.locked == set()
    return reply.parked == {scene.delivery.id}


def renew(scene: Scene) -> bool:
    return scene.holder.renew() == {LANE}


def promote(scene: Scene) -> bool:
    return scene.holder.promote() == [LANE]


def absolve(scene: Scene) -> bool:
    suspects = scene.bench.suspects()
    scene.holder.absolve(scene.delivery)
    return scene.bench.suspects() != suspects


def set_aside(scene: Scene) -> bool:
    return scene.holder.set_aside() == 1


def hold_back(scene: Scene) -> bool:
    return scene.holder.hold_back() == {(LANE, Pair("a", OTHER_KEY))}


def thin_out(scene: Scene) -> bool:
    return scene.holder.thin_out([(LANE, PAIR)]) == {(LANE, PAIR)}


def relinquish(scene: Scene) -> bool:
    return scene.holder.relinquish() == {LANE}


OF_A_LANE = (
    renew_and_claim,
    renew,
    finish,
    complete,
    complete_in_a_transaction,
    park,
    promote,
    absolve,
    set_aside,
    hold_back,
    thin_out,
    relinquish,
)
STALE = (older_epoch, other_holder, taken_over, handed_back)


@pytest.mark.parametrize("act", OF_A_LANE)
def test_the_present_holder_acts(scene: Scene, act: Callable[[Scene], bool]) -> None:
    before = scene.bench.contents()
    assert act(scene)
    assert scene.bench.contents() != before


@pytest.mark.parametrize(
    ("act", "stale"),
    [
        *((act, stale) for act in OF_A_LANE for stale in STALE),
        *((act, older_version) for act in (renew_and_claim, renew, finish, relinquish)),
        *((act, older_claims) for act in (complete, complete_in_a_transaction, park)),
    ],
)
def test_a_stale_token_changes_nothing(
    scene: Scene, act: Callable[[Scene], bool], stale: Callable[[Scene], None]
) -> None:
    stale(scene)
    before = scene.bench.contents()
    assert not act(scene)
    assert scene.bench.contents() == before


def test_an_exchange_with_an_older_claim_deletes_nothing_but_renews(scene: Scene) -> None:
    older_claims(scene)
    before = scene.bench.deliveries()
    reply = scene.holder.exchange(finished=[scene.delivery], claim=False)
    assert reply.leases.keys() == {LANE}
    assert reply.deleted == reply.locked == set()
    assert scene.bench.deliveries() == before


def test_one_lost_lane_does_not_refuse_the_others(scene: Scene) -> None:
    bench, holder = scene.bench, scene.holder
    before = bench.deliveries()
    bench.publish(new_event(key_on(LANE + 1)))
    holder.take(LANE + 1)
    [other] = holder.exchange(LANE + 1).startable
    older_epoch(scene)
    reply = holder.exchange(finished=[scene.delivery, other])
    assert reply.leases.keys() == {LANE + 1}
    assert reply.deleted == {other.id}
    assert reply.startable == reply.prefetched == []
    assert bench.deliveries() == before


def test_a_takeover_that_commits_while_a_park_waits_refuses_it(scene: Scene) -> None:
    """The condition is checked again on the newest version of the lane that was locked."""
    before = scene.bench.deliveries()
    with scene.bench.connect() as other:
        scene.bench.lock_lane(other, LANE)
        with waiting(scene.holder.connection, lambda: park(scene)) as outcome:
            other.exec_driver_sql(
                "UPDATE relaybus_lanes SET epoch = epoch + 1 WHERE lane = %(lane)s", {"lane": LANE}
            )
            other.commit()
            assert outcome.result() is False
    assert scene.bench.deliveries() == before


# -- zombies ---------------------------------------------------------------------------------------


def test_a_zombie_sets_nothing_aside(bench: Bench) -> None:
    """The new holder may be running what it believes to be waiting."""
    zombie, holder = bench.holder("a"), bench.holder("a")
    bench.publish(*(new_event(KEY) for _ in range(4)))
    zombie.take(LANE)
    [head] = zombie.exchange(limit=1).startable
    assert zombie.park(parked(head)) == {head.id}
    zombie.expire(LANE)
    holder.take(LANE)
    before = bench.contents()
    assert zombie.hold_back() == set()
    assert bench.contents() == before
    assert holder.hold_back() == {(LANE, PAIR)}


def test_a_zombie_makes_no_room(bench: Bench) -> None:
    zombie, holder = bench.holder("a"), bench.holder("a")
    bench.publish(*(new_event(KEY) for _ in range(10)), new_event(key_on(LANE, 1)))
    zombie.take(LANE)
    zombie.expire(LANE)
    holder.take(LANE)
    before = bench.contents()
    assert zombie.thin_out([(LANE, PAIR)]) == set()
    assert bench.contents() == before


def test_they_are_set_aside_by_the_holder_alone_and_lowest_first(bench: Bench) -> None:
    zombie, holder = bench.holder("a"), bench.holder("a")
    bench.publish(*(new_event(KEY, handlers=("a", "gone")) for _ in range(3)))
    mine = bench.deliveries()[::2]
    zombie.take(LANE, lease=-1)
    holder.take(LANE)
    store = bench.store
    stale = list(zombie.leases.values())
    assert store.set_aside(zombie.connection, zombie.id, stale, ["a"], 10) == 0
    leases = list(holder.leases.values())
    assert store.set_aside(holder.connection, holder.id, leases, ["a"], 2) == 2
    first, second = bench.unhandled()
    assert first[0] < second[0] < max(bench.deliveries())
    assert ids(holder.claim()) == mine


def test_a_stolen_lane(bus: RelayBus, engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever is reported late is refused, nothing crashes, and the new holder has it all."""
    runs, go = Runs(), threading.Event()

    @bus.handler("step", name="plain")
    def plain(event: Event, context: Context) -> None:
        runs.add("plain", event.payload, context.fence)
        assert go.wait(30)

    @bus.handler("step", name="failing")
    def failing(event: Event, context: Context) -> None:
        runs.add("failing", event.payload, context.fence)
        assert go.wait(30)
        if context.fence == 1:
            raise RuntimeError("too late to count")

    @bus.handler("step", name="transactional", mode="transactional")
    def transactional(event: Event, context: Context, session: Session) -> None:
        runs.add("transactional", event.payload, context.fence)
        session.execute(text("INSERT INTO effects VALUES (:n)"), {"n": context.fence})
        assert go.wait(30)

    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE effects (n int)"))
    publish(bus, engine, "step", 1, 2, key="k")
    with working(bus, engine, lease_duration=2.0) as worker:
        runs.wait(3)
        lanes = held_lanes(bus, engine, worker.holder)
        steal(bus, engine, lanes)
        eventually(lambda: "lost the lease" in caplog.text)
        go.set()
        eventually(lambda: caplog.text.count("was refused") >= 2)
        with engine.connect() as connection:
            assert connection.scalar(text("SELECT count(*) FROM effects")) == 0
        with engine.begin() as connection:  # the thief dies
            connection.execute(
                update(bus.tables.lanes).values(lease_expires_at=text("clock_timestamp()"))
            )
        drained(bus, engine)
        assert worker.alive
    with engine.connect() as connection:
        assert list(connection.scalars(text("SELECT n FROM effects"))) == [3, 3]
    assert not dead(bus, engine)
    for name in ("plain", "failing", "transactional"):
        mine = [row[1:] for row in runs.rows if row[0] == name]
        assert mine == [(1, 1), (1, 3), (2, 3)], name


def test_a_lane_that_could_only_be_claimed_from_and_is_lost_is_noticed_at_once(
    bus: RelayBus, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """Not at its next renewal, which is far away."""
    runs = Runs()

    @bus.handler("step", name="h")
    async def h(event: Event) -> None:
        runs.add(event.payload)

    with working(bus, engine, lease_duration=600.0, lane_linger=60) as worker:
        publish(bus, engine, "step", 1, key="k")
        runs.wait(1)
        drained(bus, engine)
        lanes = held_lanes(bus, engine, worker.holder)
        assert lane_of("k") in lanes
        steal(bus, engine, {lane_of("k")}, seconds=-1)
        publish(bus, engine, "step", 2, key="k")
        runs.wait(2)
        drained(bus, engine)
        assert f"lost the lease on lane {lane_of('k')} " in caplog.text
