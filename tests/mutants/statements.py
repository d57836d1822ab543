"""The statements that are mutated, and the tests that have to notice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Dialect
from sqlalchemy.dialects.postgresql import psycopg

from sqlalchemy_relaybus.stores.postgresql import (
    followers,
    lanes,
    operations,
    outcomes,
    publish,
    pump,
    retention,
)
from sqlalchemy_relaybus.stores.postgresql.sql import Prepared
from sqlalchemy_relaybus.tables import Tables, tables_for
from tests.integration.test_store_plans import CASES

_DIALECT: Dialect = psycopg.dialect()  # type: ignore[no-untyped-call]
_PLANS = "tests/integration/test_store_plans.py"


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement of the store."""

    make: Callable[[Tables], Any]
    #: test files that may notice, besides the property histories; the likeliest first
    files: tuple[str, ...]
    #: its name among the tests of plans
    plan: str | None = None

    @property
    def tests(self) -> tuple[str, ...]:
        """What may notice, in pytest's words: first what is quick or likely to."""
        plans = f"{_PLANS}::test_rows_are_found_directly"
        planned = [f"{plans}[{when}-{name}]" for when, name in CASES if name == self.plan]
        return (*planned, "tests/property", *self.files)

    @property
    def sql(self) -> str:
        """The text that is sent."""
        made = self.make(tables_for())
        if isinstance(made, Prepared):
            return made.sql(_DIALECT)
        return str(made.compile(dialect=_DIALECT))


def _store(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/integration/test_{name}.py" for name in names)


_TAKE = _store("fencing_takeovers", "attempts_and_poison", "fencing", "store_followers")
_PUMP = _store(
    *("store_exchange", "fencing", "fencing_takeovers", "never_lose_an_event", "at_least_once"),
    *("order_per_key", "order_per_key_waiting", "store_plans"),
)
_OUTCOMES = _store(
    *("fencing", "retries_and_dead_letters", "order_per_key_waiting", "effectively_once"),
    *("fencing_takeovers", "store_exchange", "store_unhandled"),
)
_KEYS = _store("store_followers", "fencing", "order_per_key_waiting")
_OPERATORS = _store("store_operations", "order_per_key_waiting", "retries_and_dead_letters")

STATEMENTS: Mapping[str, Statement] = {
    "take": Statement(lanes.take, _TAKE, "take"),
    "suspect": Statement(lanes.suspect, _TAKE, "suspect"),
    "suspects": Statement(lanes.suspects, _TAKE, "suspects"),
    "renew": Statement(lanes.renew, _store("fencing", "fencing_takeovers", "store_exchange")),
    "relinquish": Statement(
        lanes.relinquish, _store("fencing", "fencing_takeovers", "store_exchange"), "relinquish"
    ),
    "exchange": Statement(lambda tables: pump.exchange(tables, False), _PUMP, "pump"),
    "careful exchange": Statement(
        lambda tables: pump.exchange(tables, True), _PUMP, "careful pump"
    ),
    "complete": Statement(outcomes.complete, _OUTCOMES, "complete"),
    "park": Statement(outcomes.park, _OUTCOMES, "park"),
    "promote": Statement(outcomes.promote, _OUTCOMES, "promote"),
    "set aside": Statement(
        outcomes.set_aside, _store("store_unhandled", "fencing", "order_per_key_waiting")
    ),
    "reclaim": Statement(outcomes.reclaim, _store("store_unhandled", "never_lose_an_event")),
    "absolve": Statement(outcomes.absolve, _TAKE, "absolve"),
    "hold back": Statement(followers.hold_back, _KEYS, "hold back"),
    "thin out": Statement(followers.thin_out, _KEYS, "thin out"),
    "let go": Statement(lambda tables: followers.let_go(tables, False), _KEYS, "let go"),
    "let go everywhere": Statement(
        lambda tables: followers.let_go(tables, True), _KEYS, "let go everywhere"
    ),
    "requeue": Statement(operations.requeue, _OPERATORS),
    "discard": Statement(operations.discard, _OPERATORS),
    "release": Statement(operations.release, _OPERATORS, "release"),
    "lock events": Statement(
        publish.lock_events, _store("one_run_per_event_id", "store_publish", "store_purge")
    ),
    "lock events to purge": Statement(retention.lock_page, _store("store_purge")),
    "remove events": Statement(retention.remove, _store("store_purge")),
}

#: Clauses that change nothing when they are taken out, by statement, and why.
EQUIVALENT: Mapping[tuple[str, str], str] = {}
