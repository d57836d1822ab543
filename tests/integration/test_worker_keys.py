"""What a dead, delayed or failing event does to the later ones of its key."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session

from sqlalchemy_relaybus import Event, Fixed, NoRetry, RelayBus, Snooze, admin
from sqlalchemy_relaybus.router import OnDead
from sqlalchemy_relaybus.worker import followers
from tests.support.workers import (
    Runs,
    dead,
    drained,
    eventually,
    publish,
    ready,
    waiting,
    working,
)

OTHER = "another key"


@pytest.fixture
def bus() -> RelayBus:
    return RelayBus()


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
        eventually(lambda: waiting(bus, engine) == 1)
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
        eventually(lambda: waiting(bus, engine) == 2 and behind(bus, engine) == 7)
    with engine.connect() as connection:
        first, second = admin.blocked_keys(connection, bus)
        assert admin.blocked_keys(connection, bus, limit=1) == [first]
    assert (first.handler, first.key, first.status, first.followers) == ("h", "k", "retrying", 10)
    assert (second.key, second.followers) == (OTHER, 0)
    assert first.attempts == 1
    assert first.last_error == "RuntimeError: not yet"
    assert first.next_try is not None
    assert 3500 < (first.next_try - first.since).total_seconds() <= 3601
