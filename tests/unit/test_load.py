"""Slots: no more is started than can begin, and a run of one key takes one."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy.orm import Session

from sqlalchemy_relaybus import ConfigurationError, Event, Exponential, NoRetry, RelayBus
from sqlalchemy_relaybus.settings import Settings
from sqlalchemy_relaybus.stores.base import Delivery, Live
from sqlalchemy_relaybus.worker.load import Load

bus = RelayBus()


@bus.handler("a", name="coroutine")
async def coroutine(event: Event) -> None: ...


@bus.handler("a", name="plain")
def plain(event: Event) -> None: ...


@bus.handler("a", name="transaction", mode="transactional")
def transaction(event: Event, session: Session) -> None: ...


def delivery(handler: str, key: str | None = None) -> Delivery:
    return Delivery(1, 0, 1, 0, 0, handler, key, Event(uuid4(), "a", "{}", key))


def load() -> Load:
    return Load(bus.handlers, Settings(concurrency=5, threads=3, pool_size=2))


def test_each_executor_has_slots_of_its_own() -> None:
    it = load()
    assert (it.free("coroutine"), it.free("plain"), it.free("transaction")) == (5, 3, 2)
    it.begin([delivery("transaction"), delivery("transaction"), delivery("plain")])
    assert (it.free("coroutine"), it.free("plain"), it.free("transaction")) == (2, 2, 0)
    assert not it.fits(delivery("transaction"))
    assert it.fits(delivery("plain"))


def test_what_may_be_anything_can_begin_if_all_have_room() -> None:
    it = load()
    assert it.free() == 2
    it.begin([delivery("transaction")])
    assert it.free() == 1


def test_a_run_takes_one_slot_until_its_last_delivery_ends() -> None:
    it = load()
    run = [delivery("transaction", "k") for _ in range(10)]
    it.begin(run)
    assert it.free("transaction") == 1
    assert it.deliveries == 10
    for each in run[:9]:
        it.end(each)
    assert it.free("transaction") == 1
    it.end(run[9])
    assert it.free("transaction") == 2
    assert (it.deliveries, it.slots) == (0, 0)


def test_followers_of_a_run_fit_where_nothing_else_does() -> None:
    it = load()
    it.begin([delivery("transaction", "k"), delivery("transaction", "l")])
    assert it.fits(delivery("transaction", "k"))
    assert not it.fits(delivery("transaction", "m"))
    assert not it.fits(delivery("transaction"))


def test_lanes_are_shared_among_those_with_the_same_handlers() -> None:
    live = Live([frozenset({"a", "b"}), frozenset({"b"})])
    assert (live.having("a"), live.having("b"), live.having("c")) == (2, 3, 1)
    assert live.elsewhere == {"a", "b"}


@pytest.mark.parametrize("retry", [5, Exponential, NoRetry, "often"])
def test_a_retry_that_is_no_policy_is_refused(retry: Any) -> None:
    with pytest.raises(ConfigurationError, match="retry must be a policy"):
        RelayBus().handler("a", name="h", retry=retry)(lambda event: None)
