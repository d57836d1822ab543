"""What a delivery costs in the tables: row versions, index entries, heap-only updates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, func, select, text
from sqlalchemy.exc import DBAPIError

from tests.support.stores import Bench, Holder, key_on, new_event, parked

LANE = 7
KEY = key_on(LANE)
IN_FLIGHT = 200


@pytest.fixture
def bench(engine: Engine) -> Iterator[Bench]:
    with Bench(engine) as bench:
        yield bench


def writes(bench: Bench, table: str, *sessions: Connection) -> dict[str, int]:
    """How many rows of *table* were written in all, by *sessions*."""
    for session in sessions:
        session.execute(select(func.pg_stat_force_next_flush()))
        if session.in_transaction() and session.get_isolation_level() != "AUTOCOMMIT":
            session.commit()  # the counters are sent when the session becomes idle
    with bench.engine.connect() as connection:
        connection.execute(select(func.pg_stat_clear_snapshot()))
        row = connection.execute(
            text(
                "SELECT n_tup_ins AS inserted, n_tup_upd AS updated, n_tup_hot_upd AS hot, "
                "n_tup_del AS deleted FROM pg_stat_user_tables WHERE relname = :table"
            ),
            {"table": table},
        ).one()
    return dict(row._mapping)


def index_entries(bench: Bench, *tables: Any) -> int:
    """How many entries all indexes of *tables* hold, those of dead rows included."""
    with bench.engine.begin() as connection:
        try:
            connection.execute(text("CREATE EXTENSION IF NOT EXISTS pageinspect"))
        except DBAPIError as error:
            pytest.skip(f"needs the embedded server: {error.orig}")
        return sum(
            connection.scalars(
                text(
                    """
                    SELECT count(*)
                    FROM pg_index AS i,
                      LATERAL generate_series(
                        1, pg_relation_size(i.indexrelid) / current_setting('block_size')::int - 1
                      ) AS block,
                      LATERAL bt_page_items(i.indexrelid::regclass::text, block)
                    WHERE i.indrelid = CAST(:table AS regclass)
                    """
                ),
                {"table": table.name},
            ).one()
            for table in tables
        )


def run_one(bench: Bench, holder: Holder, how: str) -> Connection:
    """Publish, claim and complete one delivery; the session that published."""
    publisher = bench.connect()
    bench.store.publish(publisher, [new_event(KEY)])
    publisher.commit()
    holder.take(LANE)
    [delivery] = holder.claim()
    if how == "pump":
        assert holder.exchange(finished=[delivery]).deleted == {delivery.id}
    else:
        assert holder.complete(delivery)
    return publisher


@pytest.mark.parametrize("how", ["pump", "transaction"])
def test_a_delivery_is_written_once_and_deleted_once(bench: Bench, how: str) -> None:
    holder = bench.holder()
    publisher = run_one(bench, holder, how)
    sessions = publisher, holder.connection, holder.taker
    deliveries = writes(bench, bench.tables.deliveries.name, *sessions)
    assert deliveries == {"inserted": 1, "updated": 0, "hot": 0, "deleted": 1}
    parked_rows = writes(bench, bench.tables.parked.name)
    assert parked_rows == {"inserted": 0, "updated": 0, "hot": 0, "deleted": 0}
    lanes = writes(bench, bench.tables.lanes.name)
    assert lanes["updated"] == lanes["hot"] == (3 if how == "pump" else 2)


@pytest.mark.parametrize("how", ["pump", "transaction"])
def test_a_delivery_has_one_index_entry(bench: Bench, how: str) -> None:
    run_one(bench, bench.holder(), how)
    assert index_entries(bench, bench.tables.deliveries, bench.tables.parked) == 1


def test_a_retry_costs_index_entries_only_where_it_happens(bench: Bench) -> None:
    """Of the parked table: its key, when it is due, whom it blocks; and again of the deliveries."""
    bench.publish(new_event(KEY))
    holder = bench.holder()
    holder.take(LANE)
    [delivery] = holder.claim()
    holder.park(parked(delivery, delay=0))
    assert index_entries(bench, bench.tables.parked) == 3
    holder.promote()
    holder.exchange(finished=holder.claim())
    assert index_entries(bench, bench.tables.deliveries) == 2


@pytest.mark.parametrize("lanes", [1, 4, 8, 64])
def test_every_update_of_a_lane_is_heap_only_with_a_batch_in_flight(
    bench: Bench, lanes: int
) -> None:
    """The lanes are neighbours, so that they share pages."""
    each = IN_FLIGHT // lanes + 1
    bench.publish(*(new_event(key_on(lane)) for lane in range(lanes) for _ in range(each)))
    holder = bench.holder()
    holder.take(*range(lanes))
    running = holder.exchange(limit=IN_FLIGHT).startable
    assert len(running) == IN_FLIGHT
    for _ in range(300):
        assert len(holder.exchange(started=running, claim=False).leases) == lanes
    counted = writes(bench, bench.tables.lanes.name, holder.connection, holder.taker)
    # each was taken once, and written once more by the claim if it got any of the batch
    assert counted["updated"] == lanes * 302
    assert counted["hot"] == counted["updated"]
