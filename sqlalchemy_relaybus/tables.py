"""The tables of schema version 2 (release 0.2), as SQLAlchemy metadata of their own.

They are never part of the application's metadata. The migrations do not import this module: a
test holds the two equal. Two instances with the same schema and prefix are the same object, so
that SQLAlchemy's statement cache works across buses.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Connection,
    DateTime,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    Sequence,
    SmallInteger,
    Table,
    Text,
    Uuid,
    event,
    text,
)
from sqlalchemy.sql.elements import conv

from .exc import ConfigurationError

SCHEMA_VERSION = 2
DEFAULT_PREFIX = "relaybus_"

_TIMESTAMP = DateTime(timezone=True)


def _store(table: Table, **parameters: str) -> None:
    """Give *table* storage parameters. (``postgresql_with`` on tables is new in SQLAlchemy 2.1.)"""
    settings = ", ".join(f"{name} = {value}" for name, value in parameters.items())

    def set_parameters(target: Table, connection: Connection, **kw: Any) -> None:
        if connection.dialect.name == "postgresql":
            quoted = connection.dialect.identifier_preparer.format_table(target)
            # as text() wants it: no parameter in it, and percent signs doubled by itself
            name = quoted.replace("%%", "%").replace(":", r"\:")
            connection.execute(text(f"ALTER TABLE {name} SET ({settings})"))

    event.listen(table, "after_create", set_parameters)


class Tables:
    """The tables under one schema and prefix. Use :func:`tables_for` to get one."""

    def __init__(self, schema: str | None, prefix: str) -> None:
        self.schema = schema
        self.prefix = prefix
        self.metadata = MetaData(schema=schema)

        def name(suffix: str) -> str:
            return prefix + suffix

        def primary_key(table: str, *columns: str) -> PrimaryKeyConstraint:
            # conv() keeps a naming convention from rewriting the name
            return PrimaryKeyConstraint(*columns, name=conv(name(f"{table}_pkey")))

        #: One row an event, kept until retention removes it. No index but its key.
        self.events = Table(
            name("events"),
            self.metadata,
            Column("id", Uuid, nullable=False),
            Column(
                "created_at", _TIMESTAMP, nullable=False, server_default=text("clock_timestamp()")
            ),
            Column("sequence", BigInteger),
            Column("type", Text, nullable=False),
            # JSON text: decoded when a handler asks, never by the driver
            Column("payload", Text, nullable=False),
            # every handler that ever had a delivery of this event: outlives the deliveries, so
            # that a redelivered id adds only what is new
            Column("handlers", ARRAY(Text), nullable=False),
            Column("headers", Text),
            Column("key", Text),
            primary_key("events", "id"),
        )

        #: Draws delivery ids. CACHE 1: within a key, id order must be commit order.
        self.delivery_id = Sequence(
            name("deliveries_id_seq"),
            metadata=self.metadata,
            schema=schema,
            data_type=BigInteger,
            cache=1,
        )

        #: What is ready to run or running. One index: claim order, fenced writes and uniqueness.
        #: Eight columns, so that the null bitmap costs no padding; wide fixed columns first.
        self.deliveries = Table(
            name("deliveries"),
            self.metadata,
            Column("id", BigInteger, nullable=False, server_default=self.delivery_id.next_value()),
            Column("event_id", Uuid, nullable=False),  # no foreign key: retention checks instead
            Column("attempts", Integer, nullable=False, server_default=text("0")),
            # bumped whenever a claim ends without deleting the row: an older run of the same
            # delivery cannot touch a newer one
            Column("claims", Integer, nullable=False, server_default=text("0")),
            Column("lane", SmallInteger, nullable=False),
            Column("handler", Text, nullable=False),
            Column("key", Text),
            Column("last_error", Text),
            primary_key("deliveries", "lane", "id"),
        )
        _store(
            self.deliveries, autovacuum_vacuum_scale_factor="0.02", autovacuum_vacuum_cost_delay="0"
        )

        #: What is not to be claimed now: delayed, retrying, snoozed, dead, of no known handler, or
        #: behind one of these in its key.
        #: Out of the range that claims scan, so that any number of them costs a claim nothing.
        self.parked = Table(
            name("parked"),
            self.metadata,
            Column("id", BigInteger, nullable=False, server_default=self.delivery_id.next_value()),
            Column("event_id", Uuid, nullable=False),
            # when the holder moves the row back to the deliveries; null: not by itself
            Column("available_at", _TIMESTAMP),
            Column(
                "parked_at", _TIMESTAMP, nullable=False, server_default=text("clock_timestamp()")
            ),
            Column("attempts", Integer, nullable=False, server_default=text("0")),
            Column("claims", Integer, nullable=False, server_default=text("0")),
            Column("lane", SmallInteger, nullable=False),
            # later deliveries of its handler and key wait for it
            Column("blocks", Boolean, nullable=False),
            Column("status", Text, nullable=False),
            Column("handler", Text, nullable=False),
            Column("key", Text),
            Column("last_error", Text),
            primary_key("parked", "lane", "id"),
            CheckConstraint(
                "status IN ('delayed', 'retrying', 'snoozed', 'dead', 'unhandled', 'behind')",
                name=conv(name("parked_status_check")),
            ),
        )
        Index(
            name("parked_due_idx"),
            self.parked.c.lane,
            self.parked.c.available_at,
            postgresql_where=self.parked.c.available_at.is_not(None),
        )
        Index(
            name("parked_blocks_idx"),
            self.parked.c.lane,
            self.parked.c.handler,
            self.parked.c.key,
            self.parked.c.id,
            postgresql_where=self.parked.c.blocks & self.parked.c.key.is_not(None),
        )
        Index(
            name("parked_dead_idx"),
            self.parked.c.parked_at,
            self.parked.c.id,
            postgresql_where=self.parked.c.status == text("'dead'"),
        )
        Index(
            name("parked_unhandled_idx"),
            self.parked.c.handler,
            self.parked.c.id,
            postgresql_where=self.parked.c.status == text("'unhandled'"),
        )

        Index(
            name("parked_behind_idx"),
            self.parked.c.lane,
            self.parked.c.handler,
            self.parked.c.key,
            self.parked.c.id,
            postgresql_where=self.parked.c.status == text("'behind'"),
        )

        #: The leases. Unchanging columns first: an update logs only what follows them. The low
        #: fillfactor keeps every update heap-only, with 200 ids in flight too.
        self.lanes = Table(
            name("lanes"),
            self.metadata,
            Column("epoch", BigInteger, nullable=False, server_default=text("0")),
            Column("holder", Uuid),
            Column("lane", SmallInteger, nullable=False, autoincrement=False),
            # how many deliveries the holder may be running, on all its lanes
            Column("company", Integer, nullable=False, server_default=text("0")),
            Column("version", BigInteger, nullable=False, server_default=text("0")),
            Column("lease_expires_at", _TIMESTAMP),
            # what the holder may be running now: suspects if it dies
            Column("started", ARRAY(BigInteger), nullable=False, server_default=text("'{}'")),
            # what it claimed ahead and has not started
            Column("prefetched", ARRAY(BigInteger), nullable=False, server_default=text("'{}'")),
            primary_key("lanes", "lane"),
            CheckConstraint("lane BETWEEN 0 AND 255", name=conv(name("lanes_lane_check"))),
        )
        _store(self.lanes, fillfactor="10")

        #: Deliveries that were started when their worker died, until they have ended. Apart from
        #: the deliveries, which no takeover writes.
        self.suspects = Table(
            name("suspects"),
            self.metadata,
            Column("id", BigInteger, nullable=False, autoincrement=False),
            Column("crashes", Integer, nullable=False),
            # how many deliveries the last worker had started in all
            Column("company", Integer, nullable=False),
            Column("lane", SmallInteger, nullable=False, autoincrement=False),
            primary_key("suspects", "lane", "id"),
        )

        #: One row an ordering key: its counter, locked by a publisher until it commits.
        self.keys = Table(
            name("keys"),
            self.metadata,
            Column("last", BigInteger, nullable=False),
            Column("key", Text, nullable=False),
            primary_key("keys", "key"),
        )
        _store(self.keys, fillfactor="70")

        #: The worker processes alive, for sharing lanes among them. A hint: no guarantee rests
        #: on it.
        self.workers = Table(
            name("workers"),
            self.metadata,
            Column("holder", Uuid, nullable=False),
            Column("started_at", _TIMESTAMP, nullable=False),
            Column("expires_at", _TIMESTAMP, nullable=False),
            Column("owner", Text, nullable=False),
            Column("handlers", ARRAY(Text), nullable=False),
            primary_key("workers", "holder"),
        )

        #: Deliveries that completed, where they are kept: those of a 0.1 database.
        self.completed = Table(
            name("completed"),
            self.metadata,
            Column("id", BigInteger, nullable=False, autoincrement=False),
            Column("event_id", Uuid, nullable=False),
            Column("completed_at", _TIMESTAMP, nullable=False),
            Column("attempts", Integer, nullable=False),
            Column("handler", Text, nullable=False),
            Column("key", Text),
            primary_key("completed", "id"),
        )
        Index(name("completed_at_idx"), self.completed.c.completed_at, self.completed.c.id)

        #: The version of these tables: one row.
        self.schema_version = Table(
            name("schema_version"),
            self.metadata,
            Column("version", Integer, nullable=False, autoincrement=False),
            primary_key("schema_version", "version"),
        )


#: PostgreSQL cuts names after 63 bytes; the longest one after the prefix has 31.
MAX_PREFIX_BYTES = 32


@lru_cache(maxsize=32)
def tables_for(schema: str | None = None, prefix: str = DEFAULT_PREFIX) -> Tables:
    """The tables under *schema* (``None``: the search path's) with names that begin *prefix*."""
    for what, name in (("schema", schema), ("prefix", prefix)):
        try:
            if name is not None and "\0" in name:
                raise ConfigurationError(f"the {what} {name!r} has a NUL character in it")
            (name or "").encode()
        except UnicodeEncodeError:
            raise ConfigurationError(
                f"the {what} {name!r} is no text that can be encoded"
            ) from None
    if schema == "":
        raise ConfigurationError("the schema must not be empty; leave it out for the default")
    if len(prefix.encode()) > MAX_PREFIX_BYTES:
        raise ConfigurationError(
            f"the prefix {prefix!r} is longer than {MAX_PREFIX_BYTES} bytes, with which names of "
            "indexes would be cut off"
        )
    return Tables(schema, prefix)
