"""The tables of 0.1.0 cost what the reference says that they cost."""

from __future__ import annotations

from collections import Counter

from sqlalchemy import Connection, Engine, text

import alembic_relaybus

# reference: "What one delivery leaves behind"
ENTRIES = {
    "relaybus_deliveries_completed_idx": 1,
    "relaybus_deliveries_due_idx": 2,
    "relaybus_deliveries_due_unkeyed_idx": 2,
    "relaybus_deliveries_event_handler_unique": 3,
    "relaybus_deliveries_handler_created_idx": 3,
    "relaybus_deliveries_pkey": 3,
    "relaybus_deliveries_status_created_idx": 3,
}


def index_entries(connection: Connection) -> Counter[str]:
    """The entries in each index of the deliveries, dead ones too."""
    names = connection.scalars(
        text(
            "SELECT indexrelid::regclass::text FROM pg_index "
            "WHERE indrelid = 'relaybus_deliveries'::regclass"
        )
    ).all()
    assert len(names) == 10
    return Counter(
        {
            name: connection.execute(
                text(
                    "SELECT count(*) FROM "
                    "generate_series(1, pg_relation_size(CAST(:name AS text)) / 8192 - 1) AS block,"
                    " bt_page_items(CAST(:name AS text), block::int)"
                ),
                {"name": name},
            ).scalar_one()
            for name in names
        }
    )


def test_one_delivery_leaves_17_index_entries(empty_engine: Engine) -> None:
    alembic_relaybus.migrate(empty_engine, "relaybus_0001")

    def step(statement: str) -> Counter[str]:
        with empty_engine.begin() as connection:
            connection.execute(text(statement))
        with empty_engine.connect() as connection:
            return index_entries(connection)

    with empty_engine.begin() as connection:
        connection.execute(text("CREATE EXTENSION pageinspect"))
        connection.execute(text("ALTER TABLE relaybus_deliveries SET (autovacuum_enabled = off)"))
        connection.execute(
            text("INSERT INTO relaybus_events (id, type, payload) VALUES ('e', 't', '{}')")
        )
    published = step(
        "INSERT INTO relaybus_deliveries (id, event_id, handler) VALUES ('d', 'e', 'h')"
    )
    claimed = step(
        "UPDATE relaybus_deliveries SET status = 'processing', attempts = attempts + 1, "
        "lease_owner = 'w', lease_token = 't', lease_expires_at = now() + interval '30 s', "
        "updated_at = now()"
    )
    completed = step(
        "UPDATE relaybus_deliveries SET status = 'completed', completed_at = now(), "
        "lease_owner = NULL, lease_token = NULL, lease_expires_at = NULL, updated_at = now()"
    )
    assert (published.total(), claimed.total(), completed.total()) == (6, 12, 17)
    assert +completed == ENTRIES
