"""A worker that lost its lease, or a run that has ended, changes nothing and is told so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from uuid import uuid4

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from sqlalchemy_relaybus.stores.base import Delivery, Lease
from tests.support.stores import (
    EXPIRED,
    Bench,
    Holder,
    key_on,
    new_event,
    parked,
    sqlstate,
    waiting,
)

LANE = 7
KEY, OTHER_KEY = key_on(LANE), key_on(LANE, 1)


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


def test_under_repeatable_read_a_zombies_completion_fails_to_serialize(engine: Engine) -> None:
    with Bench(engine) as bench:
        old, new = bench.holder(), bench.holder()
        bench.publish(new_event(KEY))
        old.take(LANE, lease=EXPIRED)
        [delivery] = old.exchange(room=0, lease=EXPIRED).prefetched  # so that it is not charged
        with bench.connect("REPEATABLE READ") as handler:
            handler.exec_driver_sql("SELECT count(*) FROM relaybus_lanes")  # the snapshot
            assert new.take(LANE).keys() == {LANE}
            with pytest.raises(OperationalError) as caught:
                old.complete(delivery, handler)
        assert sqlstate(caught.value) == "40001"
        assert bench.deliveries() == [delivery.id]


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
