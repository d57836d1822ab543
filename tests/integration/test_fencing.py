"""A worker that was thought dead changes nothing when it comes back.

A lane has one holder at a time, and its epoch grows in the write that names the next one. Every
write of a worker names the lane's epoch and its holder and checks them on the newest version of a
lane that it locks. What is refused changes nothing, and the worker is told so. Takeovers against
these writes, step by step: ``test_fencing_takeovers.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from uuid import uuid4

import pytest
from sqlalchemy import Engine, select, text, update
from sqlalchemy.orm import Session

from sqlalchemy_relaybus import Context, Event, RelayBus
from sqlalchemy_relaybus.lanes import lane_of
from sqlalchemy_relaybus.stores.base import Delivery, Lease, Pair, Park
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


def finish(scene: Scene, *, careful: bool = False) -> bool:
    reply = scene.holder.exchange(finished=[scene.delivery], claim=False, careful=careful)
    assert reply.locked == set()
    assert bool(reply.leases) or not reply.deleted
    return reply.deleted == {scene.delivery.id}


def finish_carefully(scene: Scene) -> bool:
    return finish(scene, careful=True)


def renew_and_claim(scene: Scene, *, careful: bool = False) -> bool:
    reply = scene.holder.exchange(careful=careful)
    assert not reply.deleted
    assert [d.id for d in reply.startable] == ([scene.delivery.id] if reply.leases else [])
    return reply.leases.keys() == {LANE}


def renew_and_claim_carefully(scene: Scene) -> bool:
    return renew_and_claim(scene, careful=True)


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


EXCHANGES = (renew_and_claim, renew_and_claim_carefully, finish, finish_carefully)
#: They lock the lane's row against a takeover, and wait for one.
SHARING = (complete, park, promote, absolve, set_aside, hold_back, thin_out)
OF_A_LANE = (*EXCHANGES, renew, *SHARING, complete_in_a_transaction, relinquish)
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
        *((act, older_version) for act in (*EXCHANGES, renew, relinquish)),
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


@pytest.mark.parametrize("careful", [False, True])
def test_an_exchange_with_an_older_claim_deletes_nothing_but_renews(
    scene: Scene, careful: bool
) -> None:
    older_claims(scene)
    before = scene.bench.deliveries()
    reply = scene.holder.exchange(finished=[scene.delivery], claim=False, careful=careful)
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


@pytest.mark.parametrize("act", SHARING)
def test_a_takeover_that_commits_while_it_waits_refuses_it(
    scene: Scene, act: Callable[[Scene], bool]
) -> None:
    """The condition is checked again on the newest version of the lane that was locked."""
    scene.holder.expire(LANE)
    with scene.bench.connect() as taker:
        scene.bench.holder().begin_take(taker, LANE)
        with waiting(scene.holder.connection, lambda: act(scene)) as outcome:
            taker.commit()
            before = scene.bench.contents()
            assert outcome.result() is False
    assert scene.bench.contents() == before


@pytest.mark.parametrize("act", SHARING)
def test_a_takeover_that_is_rolled_back_lets_it_go_on(
    scene: Scene, act: Callable[[Scene], bool]
) -> None:
    scene.holder.expire(LANE)
    with scene.bench.connect() as taker:
        scene.bench.holder().begin_take(taker, LANE)
        with waiting(scene.holder.connection, lambda: act(scene)) as outcome:
            taker.rollback()
            assert outcome.result() is True


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


def test_a_run_under_an_earlier_lease_is_refused_beside_one_under_the_present(
    engine: Engine,
) -> None:
    """Its holder has lost the lane and taken it again; the run has not been charged."""
    with Bench(engine) as bench:
        holder, other = bench.holder(), bench.holder()
        bench.publish(*(new_event(key_on(LANE, n)) for n in range(4)))
        holder.take(LANE, lease=EXPIRED)
        before = holder.claim(lease=EXPIRED)
        other.take(LANE, lease=EXPIRED)
        holder.take(LANE)
        now = holder.claim()
        assert [d.id for d in now] == [d.id for d in before]

        assert holder.park(parked(before[0]), parked(now[1])) == {now[1].id}
        reply = holder.exchange(finished=[before[0], now[2]], started=[now[3]], claim=False)
        assert reply.deleted == {now[2].id}
        holder.absolve(before[0], now[3])
        assert bench.suspects().keys() == {now[0].id, now[1].id, now[2].id}
        assert bench.deliveries() == [now[0].id, now[3].id]


def test_a_delivery_that_failed_under_both_leases_is_parked_once(engine: Engine) -> None:
    """As the present one says: the run under the earlier one was abandoned, and fails as well."""
    with Bench(engine) as bench:
        holder, other = bench.holder(), bench.holder()
        bench.publish(new_event(KEY))
        holder.take(LANE, lease=EXPIRED)
        [before] = holder.claim(lease=EXPIRED)
        other.take(LANE, lease=EXPIRED)
        holder.take(LANE)
        [now] = holder.claim()
        abandoned = Park(before, "dead", None, 1, "too late", False)
        assert holder.park(abandoned, parked(now), abandoned) == {now.id}
        table = bench.tables.parked
        rows = bench.read(select(table.c.id, table.c.status, table.c.last_error, table.c.blocks))
        assert rows == [(now.id, "retrying", "it failed", True)]
