"""Publishing: what is written, and in how many statements."""

from __future__ import annotations

from uuid import uuid4

from sqlalchemy import event, select, text

from sqlalchemy_relaybus.lanes import lane_of_event
from sqlalchemy_relaybus.stores.base import NewEvent
from tests.support.stores import Bench, key_on, new_event

LANE = 7
KEY, OTHER_KEY = key_on(LANE), key_on(LANE, 1)


def test_each_handler_has_a_delivery_on_the_lane_of_the_key_or_else_of_the_event(
    bench: Bench,
) -> None:
    keyed, keyless = new_event(KEY, handlers=("b", "a")), new_event(handlers=("a",))
    bench.publish(keyed, keyless)
    rows = bench.read(
        select(text("event_id, handler, lane, key"), bench.tables.deliveries.c.attempts)
    )
    assert rows == [
        (keyed.event.id, "b", LANE, KEY, 0),
        (keyed.event.id, "a", LANE, KEY, 0),
        (keyless.event.id, "a", lane_of_event(keyless.event.id), None, 0),
    ]


def test_an_event_that_no_handler_takes_is_stored_alone(bench: Bench) -> None:
    bench.publish(new_event(handlers=()), new_event(id=uuid4(), handlers=()))
    assert [handlers for _, handlers in bench.events()] == [[], []]
    assert bench.deliveries() == []


def test_a_delay_counts_from_the_statement_and_not_from_the_transactions_start(
    bench: Bench,
) -> None:
    with bench.engine.begin() as connection:
        start = connection.scalar(text("SELECT now()"))
        while connection.scalar(text("SELECT clock_timestamp() - now() < interval '20 ms'")):
            pass
        bench.store.publish(connection, [new_event(delay=60)])
    [(due,)] = bench.read(select(bench.tables.parked.c.available_at))
    assert (due - start).total_seconds() > 60.02


def test_publishing_needs_no_more_than_one_statement_or_two_with_keys(bench: Bench) -> None:
    def statements(*new: NewEvent) -> int:
        seen: list[str] = []
        with bench.engine.connect() as connection:
            event.listen(connection, "before_cursor_execute", lambda *args: seen.append(args[2]))
            bench.store.publish(connection, new)
        return len(seen)

    assert statements(*(new_event() for _ in range(50))) == 1
    assert statements(*(new_event(KEY, delay=1) for _ in range(50))) == 2
    assert statements(*(new_event(id=uuid4()) for _ in range(50))) == 1
