"""A handler that kills its process goes to the dead letters, and nothing that ran beside it does.

A claim records in the lane's row what may start at once and what only waits. Whoever takes over a
lane from a dead worker counts a crash for what had started, never an attempt. From the second crash
on such deliveries run apart from all others, half as many each time; the one that ran alone in the
third crash or a later one is the culprit. Attempts are counted in the write that reschedules.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import threading
import time
from pathlib import Path

import pytest
from sqlalchemy import Engine, func, literal, select, text, update

from sqlalchemy_relaybus import Event, Fixed, RelayBus, admin
from sqlalchemy_relaybus.lanes import lane_of
from sqlalchemy_relaybus.stores.base import Suspect
from tests.support.application import QUICK, application_bus, ledger, noted, suspects
from tests.support.stores import EXPIRED, Bench, ids, key_on, new_event, parked
from tests.support.workers import Runs, dead, drained, eventually, publish, worker_process, working

LANE = 7
KEY, OTHER_KEY = key_on(LANE), key_on(LANE, 1)


@pytest.fixture
def bus() -> RelayBus:
    """It publishes to the application, too."""
    return application_bus()


# -- what a claim records --------------------------------------------------------------------------


def test_room_divides_what_may_start_from_what_is_claimed_ahead(bench: Bench) -> None:
    holder = bench.holder()
    bench.publish(*(new_event(KEY) for _ in range(3)), new_event(key_on(LANE + 1)))
    holder.take(LANE, LANE + 1)
    reply = holder.exchange(LANE, LANE + 1, room=2)
    assert [len(reply.startable), len(reply.prefetched)] == [2, 2]
    for lane in (LANE, LANE + 1):
        row = bench.lane(lane)
        assert sorted(row.started) == [d.id for d in reply.startable if d.lane == lane]
        assert sorted(row.prefetched) == [d.id for d in reply.prefetched if d.lane == lane]
        assert row.version == holder.leases[lane].version == 1

    started, (first, second) = reply.startable, reply.prefetched
    reply = holder.exchange(
        finished=started[:1], started=[*started[1:], first], prefetched=[second], claim=False
    )
    assert reply.deleted == {started[0].id}
    assert bench.lane(LANE).started == [started[1].id, first.id]
    assert bench.lane(LANE).prefetched == []
    assert bench.lane(LANE + 1).started == []
    assert bench.lane(LANE + 1).prefetched == [second.id]


# -- what a takeover counts ------------------------------------------------------------------------


def test_only_what_was_started_and_is_still_there_is_suspect(bench: Bench) -> None:
    old, new = bench.holder(), bench.holder()
    bench.publish(*(new_event(KEY) for _ in range(4)))
    old.take(LANE, lease=EXPIRED)
    reply = old.exchange(room=3, lease=EXPIRED, company=9)
    completed, failed, started = reply.startable
    assert len(reply.prefetched) == 1
    assert old.complete(completed)
    assert old.park(parked(failed, charge=0)) == {failed.id}
    before = bench.contents()

    taken = new.take(LANE)[LANE]

    assert set(taken.started) == {completed.id, failed.id, started.id}
    assert taken.suspects == {started.id: Suspect(1, 9)}
    assert bench.lane(LANE).started == bench.lane(LANE).prefetched == []
    assert not old.complete(started)
    # no attempt is counted, and no delivery written or locked
    after = bench.contents()
    assert {name for name in after if after[name] != before[name]} == {
        bench.tables.lanes.name,
        bench.tables.suspects.name,
    }


def test_each_crash_counts_until_the_delivery_has_ended(bench: Bench) -> None:
    bench.publish(new_event(KEY), new_event(KEY), new_event(KEY))
    holders = [bench.holder() for _ in range(4)]
    for n, holder in enumerate(holders):
        taken = holder.take(LANE, lease=EXPIRED)[LANE]
        if n == 0:
            assert taken.suspects == {}
        reply = holder.exchange(room=3 - n, lease=EXPIRED, company=10 - n)
        first, second, third = [*reply.startable, *reply.prefetched]
        if n == 2:
            # the second did not run again, and is as suspect as it was
            assert taken.suspects == {
                first.id: Suspect(2, 9),
                second.id: Suspect(2, 9),
                third.id: Suspect(1, 10),
            }
            zombie = holders[1]
            zombie.absolve(first)
            assert len(bench.suspects()) == 3  # by its epoch
            holder.absolve(second)
    assert bench.suspects() == {first.id: Suspect(3, 8), third.id: Suspect(1, 10)}
    assert taken.suspects == bench.suspects()


def test_a_suspect_that_is_gone_is_forgotten_and_one_that_waits_is_not(bench: Bench) -> None:
    old, new, last = bench.holder(), bench.holder(), bench.holder()
    bench.publish(*(new_event(KEY) for _ in range(3)))
    old.take(LANE, lease=EXPIRED)
    old.claim(lease=EXPIRED)
    new.take(LANE, lease=EXPIRED)
    completed, waits, stays = new.exchange(room=0, lease=EXPIRED).prefetched
    assert new.complete(completed)
    assert new.park(parked(waits, charge=0)) == {waits.id}
    suspects = {waits.id: Suspect(1, 1000), stays.id: Suspect(1, 1000)}
    assert last.take(LANE)[LANE].suspects == suspects
    assert bench.suspects() == suspects


def test_a_holder_never_takes_from_itself_although_its_lease_ran_out(bench: Bench) -> None:
    holder, other = bench.holder(), bench.holder()
    bench.publish(new_event(KEY))
    holder.take(LANE, lease=EXPIRED)
    [running] = holder.claim(lease=EXPIRED)
    assert holder.take(LANE) == {}
    assert holder.complete(running)
    assert other.take(LANE).keys() == {LANE}


def test_a_takeover_waits_for_no_lock_on_a_delivery(bench: Bench) -> None:
    """Its taker has leases to renew."""
    old, new = bench.holder(), bench.holder()
    bench.publish(new_event(KEY), new_event(KEY))
    old.take(LANE, lease=EXPIRED)
    first, second = old.claim(lease=EXPIRED)
    with bench.connect() as other:
        bench.lock_delivery(other, first.id)
        assert new.take(LANE)[LANE].suspects.keys() == {first.id, second.id}
    assert not old.complete(first)
    assert ids(new.claim()) == [first.id, second.id]


# -- what becomes of suspects ----------------------------------------------------------------------


def test_suspects_of_two_crashes_run_apart(bus: RelayBus, engine: Engine) -> None:
    """Half as many as in the last crash, and nothing beside them; then everything goes on."""
    running: set[str] = set()
    seen: list[set[str]] = []

    @bus.handler("step", name="h")
    async def h(event: Event) -> None:
        running.add(event.payload)
        seen.append(set(running))
        await asyncio.sleep(0.05)
        running.discard(event.payload)

    suspects = [f"suspect {n}" for n in range(8)]
    one_lane = (key for key in map(str, itertools.count()) if lane_of(key) == 7)
    for suspect, key in zip(suspects, one_lane, strict=False):
        publish(bus, engine, "step", suspect, key=key)
    table, deliveries = bus.tables.suspects, bus.tables.deliveries
    crashed = select(deliveries.c.id, deliveries.c.lane, literal(2), literal(8))
    with engine.begin() as connection:
        connection.execute(
            table.insert().from_select(["id", "lane", "crashes", "company"], crashed)
        )
    publish(bus, engine, "step", *[f"other {n}" for n in range(40)])
    with working(bus, engine):
        drained(bus, engine)
        eventually(lambda: suspects_left(bus, engine) == 0)
    apart = [each for each in seen if any(name.startswith("suspect") for name in each)]
    assert all(name.startswith("suspect") for each in apart for name in each)
    assert max(map(len, apart)) == 4
    assert max(map(len, seen)) > 10
    assert set().union(*seen) == {*suspects, *(f"other {n}" for n in range(40))}


def suspects_left(bus: RelayBus, engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.scalar(select(func.count()).select_from(bus.tables.suspects)) or 0


@pytest.mark.parametrize(("crashes", "company"), [(3, 1), (3, 2), (2, 1)])
def test_only_the_proven_culprit_is_buried_unrun(
    bus: RelayBus, engine: Engine, crashes: int, company: int
) -> None:
    runs = Runs()

    @bus.handler("step", name="h")
    def h(event: Event) -> None:
        runs.add(event.payload)

    publish(bus, engine, "step", 1, key="k")
    table, deliveries = bus.tables.suspects, bus.tables.deliveries
    crashed = select(deliveries.c.id, deliveries.c.lane, literal(crashes), literal(company))
    with engine.begin() as connection:
        connection.execute(
            table.insert().from_select(["id", "lane", "crashes", "company"], crashed)
        )
    publish(bus, engine, "step", 2, key="k")
    with working(bus, engine):
        drained(bus, engine)
    if (crashes, company) == (3, 1):
        (letter,) = dead(bus, engine)
        assert letter.last_error.startswith("its worker died 3 times while it ran")
        assert runs.rows == [(2,)]
    else:
        assert runs.rows == [(1,), (2,)]


def test_used_up_attempts_are_not_run_once_more(bus: RelayBus, engine: Engine) -> None:
    """As where a release allows fewer attempts than one has had."""

    @bus.handler("step", name="h", retry=Fixed(wait=0.02, max_attempts=3))
    async def h(event: Event) -> None:
        raise AssertionError("must not run")

    publish(bus, engine, "step", 1)
    with engine.begin() as connection:
        connection.execute(update(bus.tables.deliveries).values(attempts=3))
    with working(bus, engine):
        (letter,) = eventually(lambda: dead(bus, engine))
    assert letter.attempts == 3
    assert letter.last_error.startswith("3 attempts are used up")


@pytest.mark.parametrize("locked", [False, True])
def test_used_up_attempts_hold_back_what_is_behind_them(
    bus: RelayBus, engine: Engine, locked: bool
) -> None:
    """Claimed together with it; and while somebody keeps the burial from being recorded."""
    runs = Runs()

    @bus.handler("step", name="h", retry=Fixed(wait=0.02, max_attempts=3), on_dead="block")
    def h(event: Event) -> None:
        runs.add(event.payload)

    publish(bus, engine, "step", 1, 2, key="k")
    publish(bus, engine, "step", 3, key=key_on(lane_of("k")))
    table = bus.tables.deliveries
    first = select(func.min(table.c.id)).scalar_subquery()
    with engine.begin() as connection:
        connection.execute(update(table).where(table.c.id == first).values(attempts=3))
    with engine.connect() as other, working(bus, engine):
        if locked:
            other.execute(select(table.c.id).where(table.c.id == first).with_for_update())
        runs.wait(1)
        if locked:
            publish(bus, engine, "step", 4, key="k")
            time.sleep(0.6)  # it is tried again meanwhile
            assert not dead(bus, engine)
            other.rollback()
        (letter,) = eventually(lambda: dead(bus, engine))
        assert letter.last_error.startswith("3 attempts are used up")
        assert runs.rows == [(3,)]
        with engine.begin() as connection:
            admin.discard(connection, bus, [letter.id])
        drained(bus, engine)
    assert runs.rows == [(3,), (2,), *([(4,)] if locked else [])]


def test_a_kill_with_much_in_flight_slows_nothing_down(
    app: Path, bus: RelayBus, engine: Engine, database_url: str
) -> None:
    """Suspects of one crash run as everything does, all at once."""
    options = (*QUICK, "--concurrency", "200")
    publish(bus, engine, "slow", *[2] * 200)
    with worker_process(app, *options, url=database_url) as first:
        first.until(lambda: len(noted(app, "began")) == 200)
        first.signal(signal.SIGKILL)
        first.wait()
    with worker_process(app, *options, url=database_url) as second:
        second.until(lambda: len(noted(app, "ended")) == 200)
        pid = str(second.process.pid)
        eventually(lambda: not suspects(bus, engine))
    mine = [row[0] for row in ledger(app) if row[-1] == pid]
    assert mine.index("ended") >= 150  # how many had begun by then


def test_a_holder_that_lives_takes_back_the_crash_that_was_counted_for_it(bench: Bench) -> None:
    """And none that was counted for another."""
    bench.publish(new_event(KEY), new_event(KEY))
    holders = [bench.holder() for _ in range(3)]
    for holder in holders[:2]:
        holder.take(LANE, lease=EXPIRED)
        first, second = holder.claim(lease=EXPIRED)
    holders[2].take(LANE)
    assert bench.suspects() == {first.id: Suspect(2, 1000), second.id: Suspect(2, 1000)}
    holders[0].survived(first)
    assert bench.suspects() == {first.id: Suspect(1, 1000), second.id: Suspect(2, 1000)}
    holders[1].survived(first, second)
    holders[1].survived(first)
    assert bench.suspects() == {first.id: Suspect(0, 1000), second.id: Suspect(1, 1000)}


def test_a_worker_that_lost_its_lanes_and_lives_takes_the_crash_back(
    bus: RelayBus, engine: Engine
) -> None:
    """What ran while it was cut off, or stopped, did not kill it."""
    runs, release = Runs(), threading.Event()

    @bus.handler("step", name="h")
    def h(event: Event) -> None:
        runs.add(event.payload)
        release.wait(30)

    suspects = select(bus.tables.suspects.c.crashes)
    publish(bus, engine, "step", 1, key="k")
    with Bench(engine) as bench, working(bus, engine, lease_duration=60.0):
        runs.wait(1)
        with engine.begin() as connection:
            connection.execute(
                update(bus.tables.lanes).values(lease_expires_at=text("clock_timestamp()"))
            )
        taker = bench.holder("h")
        assert len(taker.take(lane_of("k"))[lane_of("k")].suspects) == 1
        assert bench.read(suspects) == [(1,)]
        release.set()  # what it reports is refused, and so it comes to know
        eventually(lambda: bench.read(suspects) == [(0,)])
