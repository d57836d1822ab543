"""Deliveries of handlers that no worker has: out of the way, kept, and given back in order."""

from __future__ import annotations

from tests.support.stores import Bench, key_on, new_event

LANE = 7
KEY = key_on(LANE)


def test_a_locked_one_is_left_for_later(bench: Bench) -> None:
    holder = bench.holder("a")
    bench.publish(*(new_event(KEY, handlers=("gone",)) for _ in range(2)))
    first, second = bench.deliveries()
    holder.take(LANE)
    leases = list(holder.leases.values())
    with bench.connect() as other:
        bench.lock_delivery(other, first)
        assert bench.store.set_aside(holder.connection, holder.id, leases, ["a"], 10) == 1
    assert [id for id, _ in bench.unhandled()] == [second]


def test_what_somebody_has_locked_is_made_ready_later(bench: Bench) -> None:
    """Such as another worker that has the handler as well."""
    holder = bench.holder("a")
    bench.publish(*(new_event(KEY, handlers=("gone",)) for _ in range(3)))
    first, second, third = bench.deliveries()
    holder.take(LANE)
    assert holder.set_aside() == 3
    with bench.connect() as other:
        bench.lock_parked(other, second)
        assert bench.store.reclaim(holder.connection, ["gone"], 10) == 2
    assert bench.deliveries() == [first, third]
    assert bench.store.reclaim(holder.connection, ["gone"], 10) == 1
    assert bench.deliveries() == [first, second, third]
