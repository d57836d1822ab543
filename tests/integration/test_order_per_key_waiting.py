"""Later events of a key wait for one that is to be tried again, is delayed, or is dead and blocks.

A parked delivery carries a mark that holds back the later ones of its handler and key: claims look
for it. A delivery changes between ready and parked in one statement and keeps its id, so those
behind it see it parked and blocking, or ready and in front of them, never neither. Followers that
are set aside block in turn what is behind them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session

from sqlalchemy_relaybus import Context, Event, Fixed, NoRetry, RelayBus, Snooze, admin
from sqlalchemy_relaybus.codec import new_event_id
from sqlalchemy_relaybus.lanes import lane_of
from sqlalchemy_relaybus.router import OnDead
from sqlalchemy_relaybus.stores.postgresql.store import PostgreSQLStore
from sqlalchemy_relaybus.worker import followers
from sqlalchemy_relaybus.worker.exchanges import Exchanges
from tests.support.stores import Bench, ids, key_on, new_event, parked
from tests.support.workers import LIMIT, Runs, dead, drained, eventually, publish, ready, working
from tests.support.workers import waiting as scheduled

LANE = 7
KEY, OTHER_KEY = key_on(LANE), key_on(LANE, 1)


@pytest.fixture
def bus() -> RelayBus:
    return RelayBus()


# -- with the store --------------------------------------------------------------------------------


def test_a_parked_head_blocks_its_own_handler_and_key_only(bench: Bench) -> None:
    holder = bench.holder()
    bench.publish(
        new_event(KEY),
        new_event(KEY, handlers=("a", "b")),
        new_event(OTHER_KEY),
        new_event(KEY),
    )
    holder.take(LANE)
    head, *_ = holder.exchange(limit=1).startable
    holder.park(parked(head, blocks=True))
    claimed = holder.claim()
    assert [(d.handler, d.key) for d in claimed] == [("b", KEY), ("a", OTHER_KEY)]


@pytest.mark.parametrize("order", [1, -1])
def test_an_id_that_comes_twice_blocks_for_none_of_the_handlers_that_pass(
    bench: Bench, order: int
) -> None:
    """Those of both entries need not wait for it; the others do."""
    id = new_event_id()
    twice = [
        new_event(KEY, id=id, delay=3600, handlers=("a", "b"))._replace(passing=["a"]),
        new_event(KEY, id=id, delay=3600, handlers=("b", "c"))._replace(passing=["c"]),
    ]
    bench.publish(*twice[::order])
    bench.publish(new_event(KEY, handlers=("a", "b", "c")))
    holder = bench.holder("a", "b", "c")
    holder.take(LANE)
    assert sorted(each.handler for each in holder.claim()) == ["a", "c"]


def test_a_dead_letter_that_does_not_block_lets_its_key_go_on(bench: Bench) -> None:
    holder = bench.holder()
    bench.publish(new_event(KEY), new_event(KEY))
    holder.take(LANE)
    head, follower = holder.claim()
    holder.park(parked(head, "dead", delay=None, blocks=False))
    assert ids(holder.claim()) == [follower.id]


def test_one_parked_later_does_not_hold_up_those_before_it(bench: Bench) -> None:
    holder = bench.holder()
    bench.publish(new_event(KEY), new_event(KEY))
    holder.take(LANE)
    head, follower = holder.claim()
    holder.park(parked(follower, blocks=True))
    assert ids(holder.claim()) == [head.id]


def test_what_is_due_comes_back_as_the_first_of_its_key(bench: Bench) -> None:
    holder = bench.holder()
    bench.publish(new_event(KEY), new_event(KEY))
    holder.take(LANE)
    head, follower = holder.claim()
    holder.park(parked(head, delay=0))
    assert bench.parked() == [head.id]
    assert holder.claim() == []
    assert holder.promote() == [LANE]
    again, after = holder.claim()
    assert ids([again, after]) == [head.id, follower.id]
    assert (again.attempts, again.claims) == (1, 1)
    assert bench.read(select(bench.tables.deliveries.c.last_error).order_by("id")) == [
        ("it failed",),
        (None,),
    ]


def test_a_delayed_head_keeps_its_place_before_later_events_of_its_key(bench: Bench) -> None:
    delayed, follower, other = new_event(KEY, delay=0), new_event(KEY), new_event(OTHER_KEY)
    bench.publish(delayed, follower, other)
    holder = bench.holder()
    holder.take(LANE)
    [flows] = holder.claim()
    assert flows.event == other.event
    holder.exchange(finished=[flows], claim=False)
    assert holder.promote() == [LANE]
    claimed = holder.claim()
    assert [d.event for d in claimed] == [delayed.event, follower.event]
    assert ids(claimed) == sorted(ids(claimed))


def test_later_ones_of_the_key_stay_behind_them(bench: Bench) -> None:
    holder, other = bench.holder("a"), bench.holder("gone")
    bench.publish(new_event(KEY, handlers=("gone",)))
    holder.take(LANE)
    leases = list(holder.leases.values())
    assert bench.store.set_aside(holder.connection, holder.id, leases, ["a"], 10) == 1
    ((id, _),) = bench.unhandled()
    bench.publish(new_event(KEY, handlers=("gone",)))
    bench.store.relinquish(holder.connection, holder.id, leases)
    other.take(LANE)
    assert other.claim() == []
    assert bench.store.reclaim(other.connection, ["else"], 10) == 0
    assert bench.store.reclaim(other.connection, ["gone"], 10) == 1
    assert ids(other.claim()) == [id, *(each for each in bench.deliveries() if each != id)]


def test_a_head_that_fails_while_its_followers_are_claimed(bench: Bench) -> None:
    """Until its failure is committed followers seem free: so long the worker holds them back."""
    holder = bench.holder()
    bench.publish(*(new_event(KEY) for _ in range(4)))
    holder.take(LANE)
    head, *followers = holder.exchange(limit=3).startable
    last = bench.deliveries()[3]
    failing = bench.connect()
    assert bench.store.park(failing, holder.id, [parked(head, delay=0)]).parked == {head.id}
    # the park holds the lane, and the pump does not wait for it
    reply = holder.exchange(started=[head, *followers])
    assert reply.leases.keys() == {LANE}
    assert ids(reply.startable) == [last]
    failing.commit()
    # they were given back: nothing of the key is claimed, whatever is kept of it
    assert holder.claim() == []
    assert holder.exchange(started=followers).startable == []
    assert bench.parked() == [head.id]
    assert holder.promote() == [LANE]
    again = holder.claim()
    assert ids(again) == [head.id, *ids(followers), last]
    # and the failure was charged to the head alone
    assert [each.attempts for each in again] == [1, 0, 0, 0]


def test_a_predecessor_that_is_requeued_while_its_follower_is_in_flight(bench: Bench) -> None:
    holder, operator = bench.holder(), bench.connect()
    bench.publish(*(new_event(KEY) for _ in range(3)))
    holder.take(LANE)
    head, *_ = holder.exchange(limit=1).startable
    holder.park(parked(head, "dead", delay=None, blocks=False))
    [follower] = holder.exchange(limit=1).startable
    assert bench.store.requeue(operator, [head.id]) == {head.id}
    [last] = holder.exchange(started=[follower], limit=1).startable  # not seen yet
    operator.commit()
    # it comes before what nobody has claimed yet; the worker runs it when the follower has ended
    bench.publish(new_event(KEY))
    again, fourth = holder.exchange(started=[follower, last]).startable
    assert (again.id, again.attempts) == (head.id, 0)
    assert ids([follower, last, fourth]) == [head.id + 1, head.id + 2, fourth.id]
    # a run of before it died ends nothing
    assert not holder.complete(head)
    assert holder.complete(again)


# -- heads that fail -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["async", "plain"])
def test_followers_wait_for_a_failed_head(bus: RelayBus, engine: Engine, kind: str) -> None:
    """They wait through its retries, uncharged, while other keys of the same lane flow."""
    runs = Runs()

    def step(event: Event, context: Context) -> None:
        runs.add(event.key, event.payload, context.attempt)
        if (event.key, event.payload) == ("a", 3) and context.attempt < 3:
            raise RuntimeError("not yet")

    if kind == "async":

        @bus.handler("step", name="h", retry=Fixed(wait=0.3))
        async def coroutine(event: Event, context: Context) -> None:
            step(event, context)

    else:
        bus.handler("step", name="h", retry=Fixed(wait=0.3))(step)

    others = same_lane("a", 5)
    with Session(engine) as session, session.begin():
        for n in range(20):
            for key in ("a", *others):
                bus.publish(session, "step", n, key=key)
    with working(bus, engine, concurrency=8, prefetch=8):
        eventually(lambda: sum(row[0] != "a" for row in runs.rows) == 100)
        assert len([row for row in runs.rows if row[0] == "a"]) < 20 + 2
        publish(bus, engine, "step", 20, key="a")
        drained(bus, engine)
    mine = [row[1:] for row in runs.rows if row[0] == "a"]
    assert mine == [(0, 1), (1, 1), (2, 1), (3, 1), (3, 2), (3, 3), *((n, 1) for n in range(4, 21))]
    for key in others:
        assert [row[1] for row in runs.rows if row[0] == key] == list(range(20))


def same_lane(key: str, count: int) -> list[str]:

    found = (f"{key}{n}" for n in range(100_000) if lane_of(f"{key}{n}") == lane_of(key))
    return [next(found) for _ in range(count)]


def test_a_dead_head_lets_its_followers_pass(bus: RelayBus, engine: Engine) -> None:
    runs = Runs()

    @bus.handler("step", name="h", retry=Fixed(wait=0.05, max_attempts=2))
    async def h(event: Event, context: Context) -> None:
        runs.add(event.payload, context.attempt)
        if event.payload == 1:
            raise RuntimeError("never")

    publish(bus, engine, "step", *range(6), key="k")
    with working(bus, engine):
        drained(bus, engine)
    assert runs.rows == [(0, 1), (1, 1), (1, 2), (2, 1), (3, 1), (4, 1), (5, 1)]
    assert len(dead(bus, engine)) == 1


def test_a_failure_that_cannot_be_recorded_holds_its_followers(
    bus: RelayBus, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody has the failed row locked: nothing of its key runs before it is parked."""
    runs, locked, calls = Runs(), threading.Event(), Counter[str]()
    for name in ("exchange", "renew", "park", "read_lanes", "probe"):
        _count(monkeypatch, name, calls)

    @bus.handler("step", name="h", retry=Fixed(wait=0.05))
    def h(event: Event, context: Context) -> None:
        runs.add(event.key, event.payload, context.attempt)
        if (event.key, event.payload, context.attempt) == ("a", 0, 1):
            assert locked.wait(30)
            raise RuntimeError("once")

    (other,) = same_lane("a", 1)
    publish(bus, engine, "step", *range(5), key="a")
    with working(bus, engine, lease_duration=2.0):
        runs.wait(1)
        with lock_rows(bus, engine, 1):
            locked.set()
            publish(bus, engine, "step", *range(5), key=other)
            publish(bus, engine, "step", 5, key="a")
            eventually(lambda: sum(row[0] == other for row in runs.rows) == 5)
            before = calls.total()
            time.sleep(1)
            assert calls.total() - before < 40, calls  # no hot loop either
            assert [row[1:] for row in runs.rows if row[0] == "a"] == [(0, 1)]
        drained(bus, engine)
    assert [row[1:] for row in runs.rows if row[0] == "a"] == [
        (0, 1),
        (0, 2),
        *((n, 1) for n in range(1, 6)),
    ]


@contextlib.contextmanager
def lock_rows(bus: RelayBus, engine: Engine, count: int) -> Iterator[list[Any]]:
    """Somebody else's transaction that locks the first deliveries."""
    table = bus.tables.deliveries
    with engine.connect() as connection, connection.begin():
        query = select(table).order_by(table.c.id).limit(count).with_for_update()
        yield list(connection.execute(query))


def test_the_lease_of_a_lane_that_is_left_alone_for_a_moment_is_renewed_after_it(
    bus: RelayBus, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is due and may not be asked for yet is waited for: not in a loop, and not for long."""
    begun, locked, sent = threading.Event(), threading.Event(), Counter[str]()
    send = Exchanges.send

    def counted(self: Exchanges, *args: Any, **options: Any) -> None:
        sent["exchanges"] += 1
        send(self, *args, **options)

    monkeypatch.setattr(Exchanges, "send", counted)

    @bus.handler("step", name="h", retry=Fixed(wait=0.05))
    def h(event: Event, context: Context) -> None:
        if context.attempt == 1:
            begun.set()
            assert locked.wait(30)
            raise RuntimeError("once")

    publish(bus, engine, "step", 0, key="a")
    lanes = bus.tables.lanes
    live = select(lanes.c.lease_expires_at > func.clock_timestamp()).where(
        lanes.c.lane == lane_of("a")
    )
    with working(bus, engine, lease_duration=1.0):
        assert begun.wait(30)
        with lock_rows(bus, engine, 1):
            locked.set()
            time.sleep(0.2)  # until it is found locked
            before = sent.total()
            end = time.monotonic() + 2
            while time.monotonic() < end:
                with engine.connect() as connection:
                    assert connection.scalar(live)
                time.sleep(0.05)
            assert 5 <= sent.total() - before < 40
        drained(bus, engine)


def _count(monkeypatch: pytest.MonkeyPatch, name: str, calls: Counter[str]) -> None:
    """Count the calls of a method of the store."""
    method = getattr(PostgreSQLStore, name)

    def counted(*arguments: Any, **options: Any) -> Any:
        calls[name] += 1
        return method(*arguments, **options)

    monkeypatch.setattr(PostgreSQLStore, name, counted)


def test_a_requeued_event_does_not_run_beside_a_later_one_of_its_key(
    bus: RelayBus, engine: Engine
) -> None:
    runs, mended, go_on = Runs(), threading.Event(), threading.Event()

    @bus.handler("step", name="h", retry=NoRetry())
    def h(event: Event) -> None:
        if event.payload == "bad" and not mended.is_set():
            raise RuntimeError("not yet")
        runs.add("began", event.payload)
        if event.payload == 1:
            assert go_on.wait(LIMIT)
        runs.add("ended", event.payload)

    publish(bus, engine, "step", "bad", 1, key="k")
    lanes = bus.tables.lanes
    with working(bus, engine):
        runs.wait(1)
        (letter,) = eventually(lambda: dead(bus, engine))
        mended.set()
        with engine.begin() as connection:
            assert admin.requeue(connection, bus, [letter.id]) == {letter.id}
        publish(bus, engine, "step", 2, key="k")

        def claimed() -> bool:
            with engine.connect() as connection:
                row = connection.execute(select(lanes).where(lanes.c.lane == lane_of("k"))).one()
            return len(row.started) + len(row.prefetched) == 3

        eventually(claimed)
        assert runs.rows == [("began", 1)]
        go_on.set()
        drained(bus, engine)
    assert runs.rows == [(what, n) for n in (1, "bad", 2) for what in ("began", "ended")]


# -- what a dead or delayed event does is a choice of the handler ----------------------------------


OTHER = "another key"


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few followers are many, and they are tended at once."""
    monkeypatch.setattr(followers, "BEYOND", 3)
    monkeypatch.setattr(followers, "LET_GO", 4)
    monkeypatch.setattr(followers, "PAUSE", 0.05)


def behind(bus: RelayBus, engine: Engine) -> int:
    parked = bus.tables.parked
    with engine.connect() as connection:
        return connection.scalar(select(func.count()).where(parked.c.status == "behind")) or 0


def failing_first(bus: RelayBus, runs: Runs, **options: Any) -> threading.Event:
    """A handler that fails for "bad" until the event is set."""
    mended = threading.Event()

    @bus.handler("step", name="h", **options)
    async def h(event: Event) -> None:
        if event.payload == "bad" and not mended.is_set():
            raise RuntimeError("not yet")
        runs.add(event.key, event.payload)

    return mended


def of(runs: Runs, key: str) -> list[Any]:
    return [payload for each, payload in runs.rows if each == key]


def test_followers_of_a_failing_head_are_set_aside_and_come_in_order(
    bus: RelayBus, engine: Engine
) -> None:
    runs = Runs()
    mended = failing_first(bus, runs, retry=Fixed(wait=0.3, max_attempts=1000))
    publish(bus, engine, "step", "bad", *range(30), key="k")
    with working(bus, engine):
        publish(bus, engine, "step", *range(10), key=OTHER)
        runs.wait(10)
        eventually(lambda: behind(bus, engine) >= 20)
        publish(bus, engine, "step", *range(30, 40), key="k")
        eventually(lambda: behind(bus, engine) >= 30)
        assert of(runs, "k") == []
        mended.set()
        drained(bus, engine)
        assert of(runs, "k") == ["bad", *range(40)]
        assert of(runs, OTHER) == list(range(10))
    assert behind(bus, engine) == 0


@pytest.mark.parametrize("on_dead", ["skip", "block", "park"])
def test_a_dead_event_and_its_key(bus: RelayBus, engine: Engine, on_dead: OnDead) -> None:
    runs = Runs()
    failing_first(bus, runs, retry=NoRetry(), on_dead=on_dead)
    publish(bus, engine, "step", "bad", *range(10), key="k")
    publish(bus, engine, "step", *range(10), key=OTHER)
    with working(bus, engine):
        eventually(lambda: dead(bus, engine))
        if on_dead == "skip":
            drained(bus, engine)
            assert of(runs, "k") == list(range(10))
            return
        runs.wait(10)
        # one that blocks leaves a few where they are, one that parks none
        left = 3 if on_dead == "block" else 0
        eventually(lambda: (ready(bus, engine), behind(bus, engine)) == (left, 10 - left))
        assert of(runs, "k") == []
        assert of(runs, OTHER) == list(range(10))


@pytest.mark.parametrize("way", ["requeue", "discard", "release"])
@pytest.mark.parametrize("on_dead", ["block", "park"])
def test_what_a_dead_event_holds_back_is_let_go_in_order(
    bus: RelayBus, engine: Engine, on_dead: OnDead, way: str
) -> None:
    runs = Runs()
    mended = failing_first(bus, runs, retry=NoRetry(), on_dead=on_dead)
    publish(bus, engine, "step", "bad", *range(20), key="k")
    with working(bus, engine):
        (letter,) = eventually(lambda: dead(bus, engine))
        eventually(lambda: behind(bus, engine) >= 17)
        publish(bus, engine, "step", 20, key="k")
        mended.set()
        with engine.begin() as connection:
            if way == "requeue":
                assert admin.requeue(connection, bus, [letter.id]) == {letter.id}
            elif way == "discard":
                assert admin.discard(connection, bus, [letter.id]) == {letter.id}
            else:
                assert admin.release(connection, bus, "h", "k") == 1
        drained(bus, engine)
        eventually(lambda: behind(bus, engine) == 0)
        drained(bus, engine)
    expected: list[Any] = list(range(21))
    assert of(runs, "k") == (["bad", *expected] if way == "requeue" else expected)
    assert len(dead(bus, engine)) == (1 if way == "release" else 0)


@pytest.mark.parametrize("how", ["delayed", "snoozed"])
@pytest.mark.parametrize("on_delayed", ["block", "skip"])
def test_a_waiting_event_and_its_key(
    bus: RelayBus, engine: Engine, how: str, on_delayed: Any
) -> None:
    runs = Runs()

    @bus.handler("step", name="h", on_delayed=on_delayed)
    def h(event: Event) -> None:
        if event.payload == "snoozed":
            raise Snooze(3600)
        runs.add(event.key, event.payload)

    with Session(engine) as session, session.begin():
        delay = 3600 if how == "delayed" else None
        bus.publish(session, "step", how, key="k", delay=delay)
        bus.publish(session, "step", "next", key="k")
        bus.publish(session, "step", "other", key=OTHER)
    with working(bus, engine):
        eventually(lambda: of(runs, OTHER))
        eventually(lambda: scheduled(bus, engine) == 1)
        if on_delayed == "skip":
            eventually(lambda: of(runs, "k") == ["next"])
        else:
            eventually(lambda: ready(bus, engine) == 1)
            assert of(runs, "k") == []


def test_followers_of_a_worker_that_died_are_let_go_by_another(
    bus: RelayBus, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nothing but followers is left of the lane, which nobody would take for it."""
    runs = Runs()
    mended = failing_first(bus, runs, retry=NoRetry(), on_dead="park")
    publish(bus, engine, "step", "bad", *range(5), key="k")
    with working(bus, engine):
        (letter,) = eventually(lambda: dead(bus, engine))
        eventually(lambda: behind(bus, engine) == 5)
    with engine.begin() as connection:  # as if it had died between the head's end and letting go
        parked = bus.tables.parked
        connection.execute(parked.delete().where(parked.c.id == letter.id))
    mended.set()
    with working(bus, engine):
        eventually(lambda: len(runs) == 5)
        drained(bus, engine)
    assert of(runs, "k") == list(range(5))


def test_blocked_keys_are_listed(bus: RelayBus, engine: Engine) -> None:
    runs = Runs()
    failing_first(bus, runs, retry=Fixed(wait=3600))
    publish(bus, engine, "step", "bad", *range(10), key="k")
    publish(bus, engine, "step", "bad", key=OTHER)
    with working(bus, engine):
        eventually(lambda: scheduled(bus, engine) == 2 and behind(bus, engine) == 7)
    with engine.connect() as connection:
        first, second = admin.blocked_keys(connection, bus)
        assert admin.blocked_keys(connection, bus, limit=1) == [first]
    assert (first.handler, first.key, first.status, first.followers) == ("h", "k", "retrying", 10)
    assert (second.key, second.followers) == (OTHER, 0)
    assert first.attempts == 1
    assert first.last_error == "RuntimeError: not yet"
    assert first.next_try is not None
    assert 3500 < (first.next_try - first.since).total_seconds() <= 3601
