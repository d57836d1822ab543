"""The application's own tables: what was published, and what transactional handlers did."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Identity, MetaData, Table, Text, Uuid

metadata = MetaData()

#: One row an event, written in the transaction that publishes it.
orders = Table("chaos_orders", metadata, Column("event_id", Uuid, primary_key=True))

#: One row a run that committed. Nothing here is unique but the number: a second effect is seen.
effects = Table(
    "chaos_effects",
    metadata,
    Column("n", BigInteger, Identity(), primary_key=True),
    Column("event_id", Uuid, nullable=False),
    Column("handler", Text, nullable=False),
    Column("worker", Text, nullable=False),
)
