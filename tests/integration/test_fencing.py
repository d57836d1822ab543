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
from sqlalchemy import Engine, text, update
from sqlalchemy.orm import Session

from sqlalchemy_relaybus import Context, Event, RelayBus
from sqlalchemy_relaybus.lanes import lane_of
from sqlalchemy_relaybus.stores.base import Delivery, Lease, Pair
from tests.support.stores import EXPIRED, Bench, Holder, ids, key_on, new_event, parked, waiting
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


# -- stale tokens ----------------------------------------------------------------------------------


@dataclass
class Scene:
    """A lane that has changed hands, with a delivery claimed and one parked that is due."""

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
        bench.publish(new_event(KEY), new_event(OTHER_KEY))
        before, holder = bench.holder(), bench.holder()
        before.take(LANE, lease=EXPIRED)
        before.claim(lease=EXPIRED)
        holder.take(LANE)  # charges both: epoch 2, claims 1
        delivery, due = holder.claim()
        holder.park(parked(due, delay=0))
        yield Scene(bench, holder, delivery, due.id)


def older_epoch(scene: Scene) -> None:
    scene.lease = scene.lease._replace(epoch=scene.lease.epoch - 1)
    scene.delivery.epoch -= 1


def other_holder(scene: Scene) -> None:
    """As after a restored backup, where an epoch comes again."""
    scene.holder.id = uuid4()


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


def park(scene: Scene) -> bool:
    reply = scene.bench.store.park(
        scene.holder.connection, scene.holder.id, [parked(scene.delivery)]
    )
    assert reply.locked == set()
    return reply.parked == {scene.delivery.id}


def promote(scene: Scene) -> bool:
    return scene.holder.promote() == [LANE]


def relinquish(scene: Scene) -> bool:
    return scene.bench.store.relinquish(
        scene.holder.connection, scene.holder.id, [scene.lease]
    ) == {LANE}


OF_A_LANE = (renew_and_claim, finish, complete, park, promote, relinquish)


@pytest.mark.parametrize("act", OF_A_LANE)
def test_the_present_holder_acts(scene: Scene, act: Callable[[Scene], bool]) -> None:
    before = scene.bench.contents()
    assert act(scene)
    assert scene.bench.contents() != before


@pytest.mark.parametrize(
    ("act", "stale"),
    [
        *((act, stale) for act in OF_A_LANE for stale in (older_epoch, other_holder)),
        *((act, older_version) for act in (renew_and_claim, finish, relinquish)),
        *((act, older_claims) for act in (complete, park)),
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
    reply = scene.holder.exchange(finished=[scene.delivery], claim=False)
    assert reply.leases.keys() == {LANE}
    assert reply.deleted == reply.locked == set()
    assert scene.bench.deliveries() == [scene.delivery.id]


def test_one_lost_lane_does_not_refuse_the_others(scene: Scene) -> None:
    bench, holder = scene.bench, scene.holder
    bench.publish(new_event(key_on(LANE + 1)))
    holder.take(LANE + 1)
    [other] = holder.exchange(LANE + 1).startable
    older_epoch(scene)
    reply = holder.exchange(finished=[scene.delivery, other])
    assert reply.leases.keys() == {LANE + 1}
    assert reply.deleted == {other.id}
    assert reply.startable == reply.prefetched == []
    assert bench.deliveries() == [scene.delivery.id]


def test_a_takeover_that_commits_while_a_park_waits_refuses_it(scene: Scene) -> None:
    """The condition is checked again on the newest version of the lane that was locked."""
    with scene.bench.connect() as other:
        scene.bench.lock_lane(other, LANE)
        with waiting(scene.holder.connection, lambda: park(scene)) as outcome:
            other.exec_driver_sql(
                "UPDATE relaybus_lanes SET epoch = epoch + 1 WHERE lane = %(lane)s", {"lane": LANE}
            )
            other.commit()
            assert outcome.result() is False
    assert scene.bench.deliveries() == [scene.delivery.id]


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
