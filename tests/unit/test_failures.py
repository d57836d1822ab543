"""What failed is recorded once, whatever the store says, and only then followed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast
from uuid import UUID

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, OperationalError

from sqlalchemy_relaybus import Event, RelayBus
from sqlalchemy_relaybus.settings import Settings
from sqlalchemy_relaybus.stores.base import Delivery, Lease, Park, Parked, Store, Taken
from sqlalchemy_relaybus.worker.failures import Failures
from sqlalchemy_relaybus.worker.flight import RETRY_LOCKED, Flight
from sqlalchemy_relaybus.worker.followers import Followers
from sqlalchemy_relaybus.worker.hold import Hold

NOW = 1000.0
ME = UUID(int=1)
CONNECTION = cast(Connection, object())

bus = RelayBus()


@bus.handler("step", name="h")
async def h(event: Event) -> None: ...


def broken(*, invalidated: bool = False) -> DBAPIError:
    return OperationalError("park", None, Exception("refused"), connection_invalidated=invalidated)


class FakeStore:
    """Parks what it is asked to, but for what is *locked*, *refused* or makes it fail."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.locked: set[int] = set()
        self.refused: set[int] = set()
        self.errors: list[Callable[[Sequence[Park]], DBAPIError | None]] = []
        self.is_held_up = False

    def park(self, connection: object, holder: UUID, parks: Sequence[Park]) -> Parked:
        assert (connection, holder) == (CONNECTION, ME)
        ids = {park.delivery.id for park in parks}
        self.calls.append(sorted(ids))
        if self.errors and (error := self.errors.pop(0)(parks)) is not None:
            raise error
        return Parked(ids - self.locked - self.refused, ids & self.locked)

    def held_up(self, error: BaseException) -> bool:
        return self.is_held_up


class FakeFollowers:
    def __init__(self) -> None:
        self.failures: list[tuple[int, bool]] = []

    def failed(self, delivery: Delivery, *, blocks: bool) -> None:
        self.failures.append((delivery.id, blocks))


class Bench:
    def __init__(self) -> None:
        self.store, self.followers = FakeStore(), FakeFollowers()
        self.flight = Flight(bus.handlers, Settings())
        self.unblocked: list[int] = []
        self.failures = Failures(
            cast(Store, self.store),
            ME,
            self.flight,
            cast(Followers, self.followers),
            self._unblock,
        )
        self.hold = Hold(Taken(Lease(0, 1, 0), [], {}), NOW, 60.0)
        self.hold.ready = False

    def _unblock(self, deliveries: Iterable[Delivery]) -> None:
        self.unblocked += [each.id for each in deliveries]

    def started(self, id: int, key: str | None = None) -> Delivery:
        delivery = Delivery(id, 0, 1, 0, 0, "h", key, None)
        delivery.hold = self.hold
        self.hold.started[id] = delivery
        return delivery

    def fail(self, id: int, key: str | None = None, **options: Any) -> Delivery:
        delivery = self.started(id, key)
        delay = options.pop("delay", 5.0)
        blocks = options.pop("blocks", True)
        park = Park(delivery, "retrying", delay, 1, "it failed", blocks)
        self.failures.add(park, **options)
        return delivery


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr("time.monotonic", lambda: NOW)
    return Bench()


def test_all_are_recorded_in_one_statement(bench: Bench) -> None:
    assert not bench.failures
    assert bench.failures.record(CONNECTION, NOW) is None
    bench.fail(1, "k", delay=7.0)
    bench.fail(2, delay=3.0, blocks=False)
    bench.fail(3, delay=None)
    assert bench.failures
    assert bench.failures.record(CONNECTION, NOW) == 3.0
    assert bench.store.calls == [[1, 2, 3]]
    assert not bench.failures
    assert not bench.hold.started
    assert bench.hold.ready
    assert bench.followers.failures == [(1, True), (2, False), (3, True)]
    assert bench.unblocked == [1, 2, 3]
    assert bench.failures.record(CONNECTION, NOW) is None
    assert len(bench.store.calls) == 1


def test_what_comes_not_back_by_itself_is_not_waited_for(bench: Bench) -> None:
    bench.fail(1, delay=None)
    assert bench.failures.record(CONNECTION, NOW) is None
    assert bench.store.calls == [[1]]


def test_followers_claimed_meanwhile_are_given_back(bench: Bench) -> None:
    bench.fail(1, "k")
    for id, key in ((2, "k"), (3, "other")):
        follower = Delivery(id, 0, 1, 0, 0, "h", key, None)
        follower.hold = bench.hold
        bench.flight.prefetch(bench.hold, follower)
    bench.failures.record(CONNECTION, NOW)
    assert [each.id for each in bench.hold.prefetched] == [3]


def test_one_that_is_locked_is_tried_again(bench: Bench) -> None:
    bench.fail(1, "k")
    bench.fail(2)
    bench.store.locked = {1}
    bench.failures.record(CONNECTION, NOW)
    assert bench.failures
    assert list(bench.hold.started) == [1]
    assert bench.unblocked == [2]
    assert bench.failures.record_at == NOW + RETRY_LOCKED
    assert NOW < bench.hold.not_before < NOW + RETRY_LOCKED
    bench.failures.record(CONNECTION, NOW + RETRY_LOCKED - 0.01)
    assert bench.store.calls == [[1, 2]]
    bench.store.locked.clear()
    assert bench.failures.record(CONNECTION, NOW + RETRY_LOCKED) == 5.0
    assert bench.store.calls == [[1, 2], [1]]
    assert bench.unblocked == [2, 1]
    assert not bench.failures


def test_a_new_failure_is_recorded_at_once(bench: Bench) -> None:
    bench.fail(1)
    bench.store.locked = {1}
    bench.failures.record(CONNECTION, NOW)
    bench.fail(2)
    bench.failures.record(CONNECTION, NOW)
    assert bench.store.calls == [[1], [1, 2]]


def test_one_that_is_refused_is_over(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Its lane is somebody else's, or it ended long ago."""
    bench.fail(1, "k")
    bench.store.refused = {1}
    bench.failures.record(CONNECTION, NOW)
    assert not bench.failures
    assert not bench.hold.started
    assert bench.followers.failures == []
    assert bench.unblocked == [1]
    (told,) = caplog.records
    assert told.levelno == logging.WARNING
    assert "its outcome was refused" in told.getMessage()


def test_what_waits_to_be_recorded_concerns_its_followers(bench: Bench) -> None:
    bench.fail(1, "k")
    bench.fail(2)
    follower = Delivery(3, 0, 1, 0, 0, "h", "k", None)
    assert bench.failures.concern(follower)
    assert not bench.failures.concern(Delivery(3, 0, 1, 0, 0, "h", "other", None))
    assert not bench.failures.concern(Delivery(3, 0, 1, 0, 0, "other", "k", None))
    assert not bench.failures.concern(Delivery(3, 0, 1, 0, 0, "h", None, None))
    bench.failures.record(CONNECTION, NOW)
    assert not bench.failures.concern(follower)


def test_a_lost_lane_takes_its_failures_with_it(bench: Bench) -> None:
    bench.fail(1, "k")
    bench.fail(2, "other", ran=False)
    bench.started(3)
    bench.failures.forget(bench.hold)
    assert not bench.failures
    assert bench.unblocked == [1]
    # an id that was buried unrun on that lane is like any other when it fails again
    bench.fail(2, "other")
    bench.failures.record(CONNECTION, NOW)
    assert bench.unblocked == [1, 2]


def test_what_did_not_run_blocked_nothing(bench: Bench) -> None:
    bench.fail(1, "k", ran=False)
    bench.failures.record(CONNECTION, NOW)
    assert bench.followers.failures == [(1, True)]
    assert bench.unblocked == []
    bench.fail(1, "k")
    bench.failures.record(CONNECTION, NOW)
    assert bench.unblocked == [1]


def test_one_bad_row_does_not_keep_the_others(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    for id in (1, 2, 3):
        bench.fail(id, delay=float(id))

    def bad(parks: Sequence[Park]) -> DBAPIError | None:
        return broken() if any(park.delivery.id == 2 for park in parks) else None

    bench.store.errors = [bad] * 4
    assert bench.failures.record(CONNECTION, NOW) == 1.0
    assert bench.store.calls == [[1, 2, 3], [1], [2], [3]]
    assert list(bench.hold.started) == [2]
    assert bench.failures.record_at == NOW + RETRY_LOCKED
    (told,) = caplog.records
    assert told.levelno == logging.ERROR
    assert "could not be recorded as retrying (refused); trying again" in told.getMessage()


@pytest.mark.parametrize("alone", [False, True])
def test_a_connection_that_breaks_is_no_bad_row(bench: Bench, alone: bool) -> None:
    bench.fail(1)
    bench.fail(2)
    bench.store.errors = [lambda _: broken()] * alone + [lambda _: broken(invalidated=True)]
    with pytest.raises(OperationalError):
        bench.failures.record(CONNECTION, NOW)
    assert bench.store.calls == [[1, 2]] + [[1]] * alone
    assert bench.failures
    assert list(bench.hold.started) == [1, 2]


def test_what_is_held_up_is_not_tried_again_in_the_next_round(bench: Bench) -> None:
    bench.fail(1)
    bench.store.is_held_up = True
    bench.store.errors = [lambda _: broken()]
    with pytest.raises(OperationalError):
        bench.failures.record(CONNECTION, NOW)
    assert bench.failures.record(CONNECTION, NOW) is None
    assert bench.failures.record(CONNECTION, NOW + RETRY_LOCKED) == 5.0
    assert bench.store.calls == [[1], [1]]
