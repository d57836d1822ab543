"""From the tables of 0.1.0 to those of 0.2.0, with all that is in them.

The old tables are renamed, the new ones are filled from them, and the old ones are dropped, in the
transaction of the migration: the columns of 0.2 are in an order of their own, which no ``ALTER``
gives. What becomes of a row:

- An event's id that is a UUID stays the same, any other becomes the UUIDv5 of it, as ``publish()``
  maps given ids; the original is kept in a header. So is a time of occurrence of its own.
- Deliveries in process, and pending ones that are due, become deliveries; pending ones that wait
  for a time are parked and hold up their key; dead ones are parked for good; completed ones are
  kept as such. Attempts stay counted, the one in process too.
- Delivery ids are numbered by age, and within a key by its sequence: their order is the order of
  delivery.
"""

from __future__ import annotations

import importlib

import sqlalchemy as sa
from alembic import op
from sqlalchemy.schema import CreateSequence, DropSequence
from sqlalchemy.sql.elements import conv

from alembic_relaybus import options

revision = "relaybus_0002"
down_revision = "relaybus_0001"
branch_labels = None
depends_on = None

ORIGINAL_ID_HEADER = "relaybus-original-id"
OCCURRED_AT_HEADER = "relaybus-occurred-at"
EVENT_ID_NAMESPACE = "82953aa8-6db4-5e93-a2fb-15f74aaf4fb1"
_UUID = "^([0-9A-Fa-f]{{32}}|[0-9A-Fa-f]{{8}}(-[0-9A-Fa-f]{{4}}){{3}}-[0-9A-Fa-f]{{12}})$"

_TIMESTAMP = sa.DateTime(timezone=True)


def upgrade() -> None:
    here = options.current()
    _set_aside("old")
    _create_tables()
    create_functions()
    for statement in _UPGRADE:
        op.execute(here.sql(statement))
    drop_functions()
    _create_indexes()
    for table in ("events", "deliveries", "parked", "keys", "completed"):
        # a freshly filled table has no statistics until autovacuum comes round
        op.execute(here.sql("ANALYZE {%s}" % table))


def downgrade() -> None:
    here = options.current()
    _set_aside("new")
    # a frozen revision, too
    importlib.import_module("alembic_relaybus.versions.relaybus_0001").create_tables()
    for statement in _DOWNGRADE:
        op.execute(here.sql(statement))
    unused = (
        *("deliveries_new", "events_new", "parked", "lanes", "suspects", "keys", "workers"),
        "completed",
    )
    for table in unused:
        op.drop_table(here.name(table), schema=here.schema)
    op.execute(DropSequence(sa.Sequence(here.name("deliveries_id_seq"), schema=here.schema)))


def _set_aside(suffix: str) -> None:
    """Rename what the other version has under the same name, to ``events_new`` for example."""
    here = options.current()
    for table in ("events", "deliveries"):
        aside = f"{table}_{suffix}"
        op.execute(here.sql("ALTER TABLE {%s} RENAME TO {%s!r}" % (table, aside)))
        op.execute(here.sql("ALTER INDEX {%s_pkey} RENAME TO {%s_pkey!r}" % (table, aside)))
        op.execute(here.sql(_SET_NOT_NULL_ASIDE % aside))


def _create_tables() -> None:
    here = options.current()
    schema = here.schema

    def primary_key(table: str, *columns: str) -> sa.PrimaryKeyConstraint:
        return sa.PrimaryKeyConstraint(*columns, name=conv(here.name(f"{table}_pkey")))

    sequence = sa.Sequence(
        here.name("deliveries_id_seq"), schema=schema, data_type=sa.BigInteger, cache=1
    )
    op.execute(CreateSequence(sequence))
    op.create_table(
        here.name("events"),
        sa.Column("id", sa.Uuid, nullable=False),
        sa.Column(
            "created_at", _TIMESTAMP, nullable=False, server_default=sa.text("clock_timestamp()")
        ),
        sa.Column("sequence", sa.BigInteger),
        sa.Column("type", sa.Text, nullable=False),
        sa.Column("payload", sa.Text, nullable=False),
        sa.Column("handlers", sa.ARRAY(sa.Text), nullable=False),
        sa.Column("headers", sa.Text),
        sa.Column("key", sa.Text),
        primary_key("events", "id"),
        schema=schema,
    )
    op.create_table(
        here.name("deliveries"),
        sa.Column("id", sa.BigInteger, nullable=False, server_default=sequence.next_value()),
        sa.Column("event_id", sa.Uuid, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("claims", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("lane", sa.SmallInteger, nullable=False),
        sa.Column("handler", sa.Text, nullable=False),
        sa.Column("key", sa.Text),
        sa.Column("last_error", sa.Text),
        primary_key("deliveries", "lane", "id"),
        schema=schema,
    )
    op.execute(
        here.sql(
            "ALTER TABLE {deliveries} SET"
            " (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0)"
        )
    )
    op.create_table(
        here.name("parked"),
        sa.Column("id", sa.BigInteger, nullable=False, server_default=sequence.next_value()),
        sa.Column("event_id", sa.Uuid, nullable=False),
        sa.Column("available_at", _TIMESTAMP),
        sa.Column(
            "parked_at", _TIMESTAMP, nullable=False, server_default=sa.text("clock_timestamp()")
        ),
        sa.Column("attempts", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("claims", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("lane", sa.SmallInteger, nullable=False),
        sa.Column("blocks", sa.Boolean, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("handler", sa.Text, nullable=False),
        sa.Column("key", sa.Text),
        sa.Column("last_error", sa.Text),
        primary_key("parked", "lane", "id"),
        sa.CheckConstraint(
            "status IN ('delayed', 'retrying', 'snoozed', 'dead', 'unhandled', 'behind')",
            name=conv(here.name("parked_status_check")),
        ),
        schema=schema,
    )
    op.create_table(
        here.name("lanes"),
        sa.Column("epoch", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.Column("holder", sa.Uuid),
        sa.Column("lane", sa.SmallInteger, nullable=False, autoincrement=False),
        sa.Column("company", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("version", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.Column("lease_expires_at", _TIMESTAMP),
        sa.Column(
            "started", sa.ARRAY(sa.BigInteger), nullable=False, server_default=sa.text("'{}'")
        ),
        sa.Column(
            "prefetched", sa.ARRAY(sa.BigInteger), nullable=False, server_default=sa.text("'{}'")
        ),
        primary_key("lanes", "lane"),
        sa.CheckConstraint("lane BETWEEN 0 AND 255", name=conv(here.name("lanes_lane_check"))),
        schema=schema,
    )
    op.execute(here.sql("ALTER TABLE {lanes} SET (fillfactor = 10)"))
    op.create_table(
        here.name("suspects"),
        sa.Column("id", sa.BigInteger, nullable=False, autoincrement=False),
        sa.Column("crashes", sa.Integer, nullable=False),
        sa.Column("company", sa.Integer, nullable=False),
        sa.Column("lane", sa.SmallInteger, nullable=False, autoincrement=False),
        primary_key("suspects", "lane", "id"),
        schema=schema,
    )
    op.create_table(
        here.name("keys"),
        sa.Column("last", sa.BigInteger, nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        primary_key("keys", "key"),
        schema=schema,
    )
    op.execute(here.sql("ALTER TABLE {keys} SET (fillfactor = 70)"))
    op.create_table(
        here.name("workers"),
        sa.Column("holder", sa.Uuid, nullable=False),
        sa.Column("started_at", _TIMESTAMP, nullable=False),
        sa.Column("expires_at", _TIMESTAMP, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("handlers", sa.ARRAY(sa.Text), nullable=False),
        primary_key("workers", "holder"),
        schema=schema,
    )
    op.create_table(
        here.name("completed"),
        sa.Column("id", sa.BigInteger, nullable=False, autoincrement=False),
        sa.Column("event_id", sa.Uuid, nullable=False),
        sa.Column("completed_at", _TIMESTAMP, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("handler", sa.Text, nullable=False),
        sa.Column("key", sa.Text),
        primary_key("completed", "id"),
        schema=schema,
    )


def _create_indexes() -> None:
    here = options.current()

    def index(table: str, name: str, *columns: str, where: str | None = None) -> None:
        op.create_index(
            conv(here.name(f"{table}_{name}_idx")),
            here.name(table),
            list(columns),
            schema=here.schema,
            postgresql_where=None if where is None else sa.text(where),
        )

    index("parked", "due", "lane", "available_at", where="available_at IS NOT NULL")
    index(
        *("parked", "blocks", "lane", "handler", "key", "id"),
        where="blocks AND key IS NOT NULL",
    )
    index("parked", "dead", "parked_at", "id", where="status = 'dead'")
    index("parked", "unhandled", "handler", "id", where="status = 'unhandled'")
    index("parked", "behind", "lane", "handler", "key", "id", where="status = 'behind'")
    index("completed", "at", "completed_at", "id")


def create_functions() -> None:
    """Functions for the time of the migration, beside the tables.

    Not in ``pg_temp``: the right to make temporary objects is often taken away, the right to make
    objects here is needed anyway.
    """
    here = options.current()
    for statement in _FUNCTIONS:
        op.execute(here.sql(statement))


def drop_functions() -> None:
    here = options.current()
    for signature in ("event_id_0002(text)", "sha1_0002(bytea)", "lane_0002(text)"):
        name, arguments = signature.split("(")
        op.execute(here.sql("DROP FUNCTION {%s} (%s" % (name, arguments)))


# From PostgreSQL 18, NOT NULL is a constraint with a name, and a name that is taken would give
# the new table's another one.
_SET_NOT_NULL_ASIDE = """
DO $$
DECLARE
  found record;
BEGIN
  FOR found IN
    SELECT conrelid::regclass AS relation, conname, conrelid, conkey[1] AS attribute
    FROM pg_constraint WHERE conrelid = {%s:literal}::regclass AND contype = 'n'
  LOOP
    EXECUTE format('ALTER TABLE %%s RENAME CONSTRAINT %%I TO %%I', found.relation,
      found.conname, 'relaybus_aside_' || found.conrelid || '_' || found.attribute);
  END LOOP;
END $$
"""

_FUNCTIONS = (
    # The lane of a key: the low byte of its 32-bit FNV-1a hash, which depends on nothing but low
    # bytes: of the offset basis 0x811C9DC5 and of the prime 0x01000193.
    """
CREATE FUNCTION {lane_0002} (key text) RETURNS smallint
LANGUAGE plpgsql IMMUTABLE STRICT AS $$
DECLARE
  bytes CONSTANT bytea := convert_to(key, 'UTF8');
  state integer := 197;
BEGIN
  FOR i IN 0 .. length(bytes) - 1 LOOP
    state := ((state # get_byte(bytes, i)) * 147) & 255;
  END LOOP;
  RETURN state;
END $$
""",
    # PostgreSQL has SHA-1, which UUIDv5 is made of, only in extensions. FIPS 180-4, section 6.1.
    """
CREATE FUNCTION {sha1_0002} (message bytea) RETURNS bytea
LANGUAGE plpgsql IMMUTABLE STRICT AS $$
DECLARE
  size CONSTANT integer := length(message);
  padded CONSTANT bytea := message || decode('80' || repeat('00', (119 - size % 64) % 64), 'hex')
    || int8send(size * 8::bigint);
  h0 bigint := 1732584193; h1 bigint := 4023233417; h2 bigint := 2562383102;
  h3 bigint := 271733878; h4 bigint := 3285377520;
  a bigint; b bigint; c bigint; d bigint; e bigint; f bigint; t bigint; w bigint[];
BEGIN
  FOR block IN 0 .. length(padded) / 64 - 1 LOOP
    FOR i IN 0 .. 15 LOOP
      t := block * 64 + i * 4;
      w[i] := (get_byte(padded, t::integer)::bigint << 24)
        | (get_byte(padded, t::integer + 1) << 16)
        | (get_byte(padded, t::integer + 2) << 8) | get_byte(padded, t::integer + 3);
    END LOOP;
    FOR i IN 16 .. 79 LOOP
      t := w[i - 3] # w[i - 8] # w[i - 14] # w[i - 16];
      w[i] := ((t << 1) | (t >> 31)) & 4294967295;
    END LOOP;
    a := h0; b := h1; c := h2; d := h3; e := h4;
    FOR i IN 0 .. 79 LOOP
      IF i < 20 THEN f := ((b & c) | (~b & d)) + 1518500249;
      ELSIF i < 40 THEN f := (b # c # d) + 1859775393;
      ELSIF i < 60 THEN f := ((b & c) | (b & d) | (c & d)) + 2400959708;
      ELSE f := (b # c # d) + 3395469782;
      END IF;
      t := (((a << 5) | (a >> 27)) + f + e + w[i]) & 4294967295;
      e := d; d := c; c := ((b << 30) | (b >> 2)) & 4294967295; b := a; a := t;
    END LOOP;
    h0 := (h0 + a) & 4294967295; h1 := (h1 + b) & 4294967295; h2 := (h2 + c) & 4294967295;
    h3 := (h3 + d) & 4294967295; h4 := (h4 + e) & 4294967295;
  END LOOP;
  RETURN substr(int8send(h0), 5) || substr(int8send(h1), 5) || substr(int8send(h2), 5)
    || substr(int8send(h3), 5) || substr(int8send(h4), 5);
END $$
""",
    # The UUIDv5 of an id that is no UUID
    """
CREATE FUNCTION {event_id_0002} (id text) RETURNS uuid
LANGUAGE plpgsql IMMUTABLE STRICT AS $$
DECLARE
  hash bytea := {sha1_0002}(
    uuid_send('%s'::uuid) || convert_to(id, 'UTF8')
  );
BEGIN
  hash := set_byte(hash, 6, (get_byte(hash, 6) & 15) | 80);
  hash := set_byte(hash, 8, (get_byte(hash, 8) & 63) | 128);
  RETURN encode(substr(hash, 1, 16), 'hex')::uuid;
END $$
"""
    % EVENT_ID_NAMESPACE,
)

_UPGRADE = (
    # Old and new ids of all events, and what is computed from them. Two spellings of one UUID were
    # two events: the canonical or else the older one keeps it, the others are mapped like any
    # other text.
    """
CREATE TABLE {event_map_0002} AS
SELECT old_id, new_id, new_id::text <> lower(old_id) AND replace(new_id::text, '-', '')
    <> lower(old_id) AS mapped
FROM (
  SELECT id AS old_id, CASE
      WHEN is_uuid AND row_number() OVER (
        PARTITION BY CASE WHEN is_uuid THEN replace(lower(id), '-', '') ELSE id END
        ORDER BY id = lower(id) AND length(id) = 36 DESC, created_at, id
      ) = 1 THEN id::uuid
      ELSE {event_id_0002}(id)
    END AS new_id
  FROM (SELECT id, created_at, id ~ '%s' AS is_uuid FROM {events_old}) AS given
) AS ids
"""
    % _UUID,
    "ALTER TABLE {event_map_0002} ADD PRIMARY KEY (old_id)",
    "ANALYZE {event_map_0002}",
    # The events, with every handler that they ever had a delivery for: nothing that completed
    # runs again when its event is published again.
    """
INSERT INTO {events} (id, created_at, sequence, type, payload, handlers, headers, key)
SELECT
  map.new_id, event.created_at, event.sequence, event.type, event.payload::text,
  coalesce(delivery.handlers, '{{}}'),
  nullif(
    CASE WHEN jsonb_typeof(event.headers) = 'object' THEN event.headers ELSE '{{}}' END
    || CASE WHEN map.mapped THEN jsonb_build_object('%s', event.id) ELSE '{{}}' END
    || CASE WHEN event.occurred_at <> event.created_at THEN jsonb_build_object('%s',
         to_char(event.occurred_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'))
       ELSE '{{}}' END,
    '{{}}'
  )::text,
  event.key
FROM {events_old} AS event
JOIN {event_map_0002} AS map ON map.old_id = event.id
LEFT JOIN (
  SELECT event_id, array_agg(handler ORDER BY handler) AS handlers
  FROM {deliveries_old} GROUP BY event_id
) AS delivery ON delivery.event_id = event.id
"""
    % (ORIGINAL_ID_HEADER, OCCURRED_AT_HEADER),
    # All deliveries with their new ids: by age, where no delivery is taken for older than an
    # earlier one of its key, and by the key's sequence.
    """
CREATE TABLE {delivery_map_0002} AS
SELECT
  row_number() OVER (
    ORDER BY age, key, sequence NULLS FIRST, created_at, handler, old_id
  ) AS id,
  new_id AS event_id, {lane_0002}(coalesce(key, new_id::text)) AS lane, handler, key, attempts,
  available_at, last_error, updated_at, completed_at,
  CASE
    WHEN status IN ('completed', 'dead') THEN status
    WHEN status = 'processing' OR available_at <= clock THEN 'ready'
    WHEN attempts > 0 THEN 'retrying'
    ELSE 'delayed'
  END AS status
FROM (
  SELECT
    delivery.*, delivery.id AS old_id, map.new_id, statement_timestamp() AS clock,
    CASE WHEN key IS NULL THEN created_at ELSE max(created_at) OVER (
      PARTITION BY key ORDER BY sequence NULLS FIRST
    ) END AS age
  FROM {deliveries_old} AS delivery
  JOIN {event_map_0002} AS map ON map.old_id = delivery.event_id
) AS numbered
""",
    """
INSERT INTO {deliveries} (id, event_id, attempts, lane, handler, key, last_error)
SELECT id, event_id, attempts, lane, handler, key, last_error
FROM {delivery_map_0002} WHERE status = 'ready' ORDER BY lane, id
""",
    """
INSERT INTO {parked} (
  id, event_id, available_at, parked_at, attempts, lane, blocks, status, handler, key, last_error
)
SELECT
  id, event_id, CASE WHEN status <> 'dead' THEN available_at END, updated_at, attempts, lane,
  status <> 'dead', status, handler, key, last_error
FROM {delivery_map_0002} WHERE status IN ('retrying', 'delayed', 'dead') ORDER BY lane, id
""",
    """
INSERT INTO {completed} (id, event_id, completed_at, attempts, handler, key)
SELECT id, event_id, coalesce(completed_at, updated_at), attempts, handler, key
FROM {delivery_map_0002} WHERE status = 'completed' ORDER BY id
""",
    """
SELECT setval({deliveries_id_seq:literal}, max(id)) FROM {delivery_map_0002} HAVING count(*) > 0
""",
    "INSERT INTO {keys} (key, last) SELECT key, last_sequence FROM {ordering_keys}",
    # A page for each lane: seeded wider than the fillfactor leaves room for, then emptied in place.
    # Ten lanes a page, as the fillfactor alone gives, leave a twentieth of the updates not HOT.
    """
INSERT INTO {lanes} (lane, prefetched)
SELECT lane, array_fill(0::bigint, ARRAY[120]) FROM generate_series(0, 255) AS lane
""",
    "UPDATE {lanes} SET prefetched = '{{}}'",
    """
DROP TABLE {delivery_map_0002}, {event_map_0002}, {deliveries_old}, {events_old}, {ordering_keys}
""",
    "UPDATE {schema_version} SET version = 2",
)

_DOWNGRADE = (
    """
INSERT INTO {events} (id, type, payload, key, sequence, headers, occurred_at, created_at)
SELECT
  coalesce(headers ->> '%(id)s', id::text), type, payload::jsonb, key, sequence,
  headers - '%(id)s' - '%(at)s', coalesce((headers ->> '%(at)s')::timestamptz, created_at),
  created_at
FROM (
  SELECT id, type, payload, key, sequence, coalesce(headers::jsonb, '{{}}') AS headers, created_at
  FROM {events_new}
) AS event
"""
    % {"id": ORIGINAL_ID_HEADER, "at": OCCURRED_AT_HEADER},
    # A delivery whose event is gone would be buried by the next worker, and has no place here.
    """
INSERT INTO {deliveries} (
  id, event_id, handler, key, sequence, status, attempts, available_at, last_error, created_at,
  updated_at, completed_at
)
SELECT
  gen_random_uuid()::text, coalesce(event.headers::jsonb ->> '%s', event.id::text),
  delivery.handler, delivery.key, event.sequence, delivery.status, delivery.attempts,
  coalesce(delivery.available_at, statement_timestamp()), delivery.last_error,
  event.created_at, coalesce(delivery.updated_at, statement_timestamp()), delivery.completed_at
FROM (
  SELECT event_id, handler, key, 'pending' AS status, attempts, NULL::timestamptz AS available_at,
    last_error, NULL::timestamptz AS updated_at, NULL::timestamptz AS completed_at
  FROM {deliveries_new}
  UNION ALL
  SELECT event_id, handler, key, CASE status WHEN 'dead' THEN status ELSE 'pending' END, attempts,
    available_at, last_error, parked_at, NULL
  FROM {parked}
  UNION ALL
  SELECT event_id, handler, key, 'completed', attempts, NULL, NULL, completed_at, completed_at
  FROM {completed}
) AS delivery
JOIN {events_new} AS event ON event.id = delivery.event_id
ON CONFLICT (event_id, handler) DO NOTHING
"""
    % ORIGINAL_ID_HEADER,
    "INSERT INTO {ordering_keys} (key, last_sequence) SELECT key, last FROM {keys}",
    "UPDATE {schema_version} SET version = 1",
)
