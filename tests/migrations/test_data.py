"""What the upgrade from 0.1.0 and the way back make of the rows."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID, uuid4, uuid5

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, Engine, text

import alembic_relaybus
from alembic_relaybus.options import Options, using
from alembic_relaybus.versions import relaybus_0002
from sqlalchemy_relaybus.codec import EVENT_ID_NAMESPACE, ORIGINAL_ID_HEADER, event_id
from sqlalchemy_relaybus.lanes import lane_of

PLAIN = "3f2504e0-4f89-41d3-9a0c-0305e82c3301"
HEX = "7f2504e04f8941d39a0c0305e82c3301"
UPPER = PLAIN.upper()  # to 0.1.0 another event than PLAIN


def rows(connection: Connection, statement: str) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in connection.execute(text(statement))]


def event(
    connection: Connection,
    id: str,
    key: str | None = None,
    sequence: int | None = None,
    age: int = 0,
    **columns: Any,
) -> None:
    values = {"payload": {"of": id}, "headers": {}, "occurred": age} | columns
    connection.execute(
        text(
            "INSERT INTO relaybus_events "
            "(id, type, payload, key, sequence, headers, occurred_at, created_at) VALUES "
            "(:id, 'order.placed', CAST(:payload AS jsonb), :key, :sequence, "
            "CAST(:headers AS jsonb), timestamptz '2024-05-01 12:00Z' - :occurred * interval '1 s',"
            " timestamptz '2024-05-01 12:00Z' - :age * interval '1 s')"
        ),
        {
            "id": id,
            "key": key,
            "sequence": sequence,
            "age": age,
            "occurred": values["occurred"],
            "payload": json.dumps(values["payload"]),
            "headers": json.dumps(values["headers"]),
        },
    )


def delivery(
    connection: Connection,
    event: str,
    handler: str,
    status: str = "pending",
    attempts: int = 0,
    due: int = -60,
    error: str | None = None,
) -> None:
    """*due*: in how many seconds."""
    connection.execute(
        text(
            "INSERT INTO relaybus_deliveries (id, event_id, handler, key, sequence, status, "
            "attempts, available_at, last_error, created_at, updated_at, completed_at, lease_owner)"
            " SELECT :id, id, :handler, key, sequence, :status, :attempts, "
            "now() + :due * interval '1 s', :error, created_at, created_at + interval '1 s', "
            "CASE :status WHEN 'completed' THEN created_at + interval '2 s' END, "
            "CASE :status WHEN 'processing' THEN 'w' END FROM relaybus_events WHERE id = :event"
        ),
        {
            "id": str(uuid4()),
            "event": event,
            "handler": handler,
            "status": status,
            "attempts": attempts,
            "due": due,
            "error": error,
        },
    )


@pytest.fixture
def old(empty_engine: Engine) -> Engine:
    """A 0.1.0 database with a row of every kind."""
    alembic_relaybus.migrate(empty_engine, "relaybus_0001")
    with empty_engine.begin() as c:
        event(c, PLAIN, "k", 1, age=50, headers={"trace": "abc"})
        event(c, "order-7", "k", 2, age=90, headers={"a": "b"})  # a clock that went back
        event(c, "Grüße 😀", "k", 3, age=30, payload={"n": [1, 2.5, None, "é"]})
        event(c, UPPER, None, None, age=100, occurred=160)
        event(c, HEX, "other", 1, age=10)
        event(c, "nobody's", None, None, age=5)
        delivery(c, PLAIN, "mail", "completed", 1)
        delivery(c, PLAIN, "stock", "processing", 2)
        delivery(c, "order-7", "mail", "dead", 5, error="boom")
        delivery(c, "order-7", "stock")
        delivery(c, "Grüße 😀", "mail", attempts=1, due=3600, error="later")
        delivery(c, "Grüße 😀", "stock", due=3600)
        delivery(c, UPPER, "mail", attempts=1, error="again")
        delivery(c, HEX, "stock")
        c.execute(text("INSERT INTO relaybus_ordering_keys VALUES ('k', 3), ('other', 1)"))
    return empty_engine


IDS = {
    PLAIN: UUID(PLAIN),
    "order-7": uuid5(EVENT_ID_NAMESPACE, "order-7"),
    "Grüße 😀": uuid5(EVENT_ID_NAMESPACE, "Grüße 😀"),
    UPPER: uuid5(EVENT_ID_NAMESPACE, UPPER),
    HEX: UUID(HEX),
    "nobody's": uuid5(EVENT_ID_NAMESPACE, "nobody's"),
}


def test_events(old: Engine) -> None:
    alembic_relaybus.migrate(old)
    with old.connect() as c:
        found = {row.id: row._asdict() for row in c.execute(text("SELECT * FROM relaybus_events"))}
    assert set(found) == set(IDS.values())
    one = found[IDS["order-7"]]
    assert (one["key"], one["sequence"], one["type"]) == ("k", 2, "order.placed")
    assert json.loads(one["payload"]) == {"of": "order-7"}
    assert json.loads(one["headers"]) == {"a": "b", ORIGINAL_ID_HEADER: "order-7"}
    assert one["handlers"] == ["mail", "stock"]
    assert json.loads(found[IDS[PLAIN]]["headers"]) == {"trace": "abc"}
    assert found[IDS[PLAIN]]["handlers"] == ["mail", "stock"]  # the completed one too
    assert json.loads(found[IDS["Grüße 😀"]]["payload"]) == {"n": [1, 2.5, None, "é"]}
    assert found[IDS[HEX]]["headers"] is None
    assert found[IDS["nobody's"]]["handlers"] == []
    assert json.loads(found[IDS[UPPER]]["headers"]) == {
        ORIGINAL_ID_HEADER: UPPER,
        "relaybus-occurred-at": "2024-05-01T11:57:20.000000Z",
    }


def test_deliveries(old: Engine) -> None:
    alembic_relaybus.migrate(old)
    with old.connect() as c:
        live = rows(
            c,
            "SELECT event_id, handler, key, attempts, claims, lane, last_error "
            "FROM relaybus_deliveries ORDER BY id",
        )
        parked = rows(
            c,
            "SELECT event_id, handler, key, attempts, status, blocks, lane, "
            "last_error, available_at > now() FROM relaybus_parked ORDER BY id",
        )
        completed = rows(
            c, "SELECT event_id, handler, key, attempts, completed_at::text FROM relaybus_completed"
        )
        ids = rows(
            c,
            "SELECT id FROM relaybus_deliveries UNION ALL SELECT id FROM "
            "relaybus_parked UNION ALL SELECT id FROM relaybus_completed ORDER BY 1",
        )
        following = c.scalar(text("SELECT nextval('relaybus_deliveries_id_seq')"))
        keys = rows(c, "SELECT key, last FROM relaybus_keys ORDER BY key")
        lanes = rows(c, "SELECT count(*), min(lane), max(lane) FROM relaybus_lanes")
        versions = rows(c, "SELECT version FROM relaybus_schema_version")
    k = lane_of("k")
    upper = IDS[UPPER]
    assert live == [
        (upper, "mail", None, 1, 0, lane_of(str(upper)), "again"),  # was due
        (IDS[PLAIN], "stock", "k", 2, 0, k, None),  # was in process
        (IDS["order-7"], "stock", "k", 0, 0, k, None),
        (IDS[HEX], "stock", "other", 0, 0, lane_of("other"), None),
    ]
    assert parked == [
        (IDS["order-7"], "mail", "k", 5, "dead", False, k, "boom", None),
        (IDS["Grüße 😀"], "mail", "k", 1, "retrying", True, k, "later", True),
        (IDS["Grüße 😀"], "stock", "k", 0, "delayed", True, k, None, True),
    ]
    assert [row[:4] for row in completed] == [(IDS[PLAIN], "mail", "k", 1)]
    assert ids == [(i,) for i in range(1, 9)]
    assert following == 9
    assert keys == [("k", 3), ("other", 1)]
    assert lanes == [(256, 0, 255)]
    assert versions == [(2,)]


def test_ids_follow_the_sequence_of_a_key(old: Engine) -> None:
    alembic_relaybus.migrate(old)
    with old.connect() as c:
        sequences = [
            row[0]
            for row in rows(
                c,
                "SELECT e.sequence FROM (SELECT id, event_id FROM relaybus_deliveries UNION ALL "
                "SELECT id, event_id FROM relaybus_parked UNION ALL "
                "SELECT id, event_id FROM relaybus_completed) d "
                "JOIN relaybus_events e ON e.id = d.event_id WHERE e.key = 'k' ORDER BY d.id",
            )
        ]
    assert sequences == [1, 1, 2, 2, 3, 3]


_STATE = (
    """
    SELECT id, type, payload, key, sequence, headers, occurred_at, created_at
    FROM relaybus_events ORDER BY id
    """,
    """
    SELECT event_id, handler, key, sequence, attempts, last_error,
      CASE status WHEN 'processing' THEN 'pending' ELSE status END,
      CASE WHEN status IN ('pending', 'processing') THEN available_at > now() END, completed_at
    FROM relaybus_deliveries
    """,
    "SELECT key, last_sequence FROM relaybus_ordering_keys",
    "SELECT version FROM relaybus_schema_version",
)


def test_down_gives_0_1_again(old: Engine) -> None:
    def state() -> list[Any]:
        with old.connect() as c:
            return [rows(c, statement) for statement in _STATE]

    before = state()
    alembic_relaybus.migrate(old)
    with old.connect() as c:
        alembic_relaybus.downgrade(c, "relaybus_0001")
    # a UUID without dashes is the one spelling that 0.2 does not keep
    expected = [
        [tuple(str(UUID(HEX)) if value == HEX else value for value in row) for row in table]
        for table in before
    ]
    assert [sorted(map(repr, table)) for table in state()] == [
        sorted(map(repr, table)) for table in expected
    ]


def test_up_down_up_delivers_the_same(old: Engine) -> None:
    statements = (
        """
        SELECT event_id, handler, key, attempts, lane, last_error
        FROM relaybus_deliveries ORDER BY id
        """,
        """
        SELECT event_id, handler, attempts, status, blocks, last_error
        FROM relaybus_parked ORDER BY event_id, handler
        """,
        "SELECT event_id, handler, attempts, completed_at FROM relaybus_completed",
        "SELECT id, payload, key, sequence, handlers, created_at FROM relaybus_events ORDER BY id",
        "SELECT key, last FROM relaybus_keys ORDER BY key",
    )

    def state() -> list[Any]:
        alembic_relaybus.migrate(old)
        with old.connect() as c:
            return [rows(c, statement) for statement in statements]

    first = state()
    with old.connect() as c:
        alembic_relaybus.downgrade(c, "relaybus_0001")
    assert state() == first


def test_a_failed_upgrade_changes_nothing(old: Engine) -> None:
    with old.begin() as c:
        c.execute(text("CREATE VIEW mine AS SELECT id FROM relaybus_events"))
    with pytest.raises(Exception, match="depend"):
        alembic_relaybus.migrate(old)
    with old.connect() as c:
        assert alembic_relaybus.current(c) == "relaybus_0001"
        assert c.scalar(text("SELECT count(*) FROM relaybus_deliveries WHERE status <> ''")) == 8


def test_the_frozen_names_are_those_in_use() -> None:
    assert UUID(relaybus_0002.EVENT_ID_NAMESPACE) == EVENT_ID_NAMESPACE
    assert relaybus_0002.ORIGINAL_ID_HEADER == ORIGINAL_ID_HEADER


@pytest.fixture
def functions(empty_engine: Engine) -> Any:
    """A connection on which the functions of the revision exist."""
    from alembic.operations import Operations
    from alembic.runtime.migration import MigrationContext

    with empty_engine.connect() as connection:
        context = MigrationContext.configure(connection)
        with Operations.context(context), using(Options()):
            relaybus_0002.create_functions()
        yield connection


# any text that PostgreSQL stores
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=120)
FEW = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@FEW
@given(st.lists(TEXT, min_size=1, max_size=40))
def test_lane_in_sql_equals_lane_of(functions: Connection, keys: list[str]) -> None:
    found = functions.execute(
        text("SELECT relaybus_lane_0002(key) FROM unnest(CAST(:keys AS text[])) AS key"),
        {"keys": keys},
    ).scalars()
    assert list(found) == [lane_of(key) for key in keys]


@FEW
@given(st.lists(TEXT.filter(bool), min_size=1, max_size=10))
def test_event_id_in_sql_equals_event_id(functions: Connection, ids: list[str]) -> None:
    found = functions.execute(
        text("SELECT relaybus_event_id_0002(id) FROM unnest(CAST(:ids AS text[])) AS id"),
        {"ids": ids},
    ).scalars()
    # ids that are UUIDs do not come to this function
    assert list(found) == [uuid5(EVENT_ID_NAMESPACE, id) for id in ids]


@settings(
    deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sets(
        st.one_of(
            TEXT.filter(bool),
            st.uuids().map(str),
            st.uuids().map(lambda u: u.hex),
            st.uuids().map(lambda u: str(u).upper()),
            st.uuids().map(lambda u: "{" + str(u) + "}"),
            st.uuids().map(lambda u: str(u) + "\n"),
        ),
        max_size=12,
    )
)
def test_ids_map_as_given_ids_do(empty_engine: Engine, ids: set[str]) -> None:
    alembic_relaybus.migrate(empty_engine, "relaybus_0001")
    with empty_engine.begin() as c:
        for id in ids:
            event(c, id)
            delivery(c, id, "h")
    alembic_relaybus.migrate(empty_engine)
    with empty_engine.connect() as c:
        found = rows(c, "SELECT id, headers FROM relaybus_events")
        pending = rows(c, "SELECT event_id FROM relaybus_deliveries")
        c.rollback()
        alembic_relaybus.downgrade(c, "base")
    expected = {event_id(id) for id in ids}
    assert {
        (id, json.loads(headers or "{}").get(ORIGINAL_ID_HEADER)) for id, headers in found
    } == expected
    assert sorted(pending) == sorted((id,) for id, _ in expected)
