"""The tables of release 0.1.0: a delivery is one row, rewritten at claim and at completion."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.sql.elements import conv

from alembic_relaybus import options

revision = "relaybus_0001"
down_revision = None
branch_labels = ("relaybus",)
depends_on = None

_TIMESTAMP = sa.DateTime(timezone=True)


def upgrade() -> None:
    create_tables()
    here = options.current()
    op.create_table(
        here.name("schema_version"),
        sa.Column("version", sa.Integer, nullable=False, autoincrement=False),
        sa.PrimaryKeyConstraint("version", name=conv(here.name("schema_version_pkey"))),
        schema=here.schema,
    )
    op.execute(here.sql("INSERT INTO {schema_version} (version) VALUES (1)"))


def downgrade() -> None:
    here = options.current()
    for table in ("deliveries", "events", "ordering_keys", "schema_version"):
        op.drop_table(here.name(table), schema=here.schema)


def create_tables() -> None:
    """Events, deliveries and ordering keys as 0.1.0 has them, empty."""
    here = options.current()

    def now(name: str) -> sa.Column[object]:
        return sa.Column(name, _TIMESTAMP, nullable=False, server_default=sa.text("now()"))

    op.create_table(
        here.name("events"),
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("type", sa.Text, nullable=False),
        sa.Column("payload", JSONB, nullable=False),
        sa.Column("key", sa.Text),
        sa.Column("sequence", sa.BigInteger),
        sa.Column("headers", JSONB, nullable=False, server_default=sa.text("'{}'")),
        now("occurred_at"),
        now("created_at"),
        sa.PrimaryKeyConstraint("id", name=conv(here.name("events_pkey"))),
        schema=here.schema,
    )
    op.create_table(
        here.name("deliveries"),
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("event_id", sa.Text, nullable=False),
        sa.Column("handler", sa.Text, nullable=False),
        sa.Column("key", sa.Text),
        sa.Column("sequence", sa.BigInteger),
        sa.Column("status", sa.Text, nullable=False, server_default=sa.text("'pending'")),
        sa.Column("attempts", sa.Integer, nullable=False, server_default=sa.text("0")),
        now("available_at"),
        sa.Column("lease_owner", sa.Text),
        sa.Column("lease_token", sa.Text),
        sa.Column("lease_expires_at", _TIMESTAMP),
        sa.Column("last_error", sa.Text),
        now("created_at"),
        now("updated_at"),
        sa.Column("completed_at", _TIMESTAMP),
        sa.PrimaryKeyConstraint("id", name=conv(here.name("deliveries_pkey"))),
        sa.CheckConstraint(
            "status IN ('pending', 'processing', 'completed', 'dead')",
            name=conv(here.name("deliveries_status_check")),
        ),
        sa.UniqueConstraint(
            "event_id", "handler", name=conv(here.name("deliveries_event_handler_unique"))
        ),
        schema=here.schema,
    )
    op.create_foreign_key(
        conv(here.name("deliveries_event_id_fkey")),
        here.name("deliveries"),
        here.name("events"),
        ["event_id"],
        ["id"],
        ondelete="CASCADE",
        source_schema=here.schema,
        referent_schema=here.schema,
    )
    op.create_table(
        here.name("ordering_keys"),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("last_sequence", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("key", name=conv(here.name("ordering_keys_pkey"))),
        schema=here.schema,
    )

    open_ = "status IN ('pending', 'processing')"

    def index(name: str, *columns: str, where: str | None = None) -> None:
        op.create_index(
            conv(here.name(f"deliveries_{name}_idx")),
            here.name("deliveries"),
            list(columns),
            schema=here.schema,
            postgresql_where=None if where is None else sa.text(where),
        )

    # what is due, and what an expired lease makes due again
    index("due", "available_at", "id", where=open_)
    index("due_unkeyed", "available_at", "id", where=f"{open_} AND key IS NULL")
    # the head of a key, and whether one of its deliveries runs
    index("ordering", "handler", "key", "sequence", where=f"{open_} AND key IS NOT NULL")
    index("processing", "handler", "key", where="status = 'processing' AND key IS NOT NULL")
    # listings
    index("status_created", "status", "created_at", "id")
    index("handler_created", "handler", "created_at", "id")
    # retention
    index("completed", "completed_at", "id", where="status = 'completed'")
    index("dead", "updated_at", "id", where="status = 'dead'")
