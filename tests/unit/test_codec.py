from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqlalchemy_relaybus import codec
from sqlalchemy_relaybus.codec import (
    EVENT_ID_NAMESPACE,
    MAX_DEPTH,
    check_handler_name,
    check_key,
    check_type,
    encode_headers,
    encode_payload,
    event_id,
    new_event_id,
)
from sqlalchemy_relaybus.exc import ConfigurationError, InvalidEventError, PayloadError

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts
plain = st.recursive(
    scalars.filter(lambda v: v not in (float("inf"), float("-inf"))),
    lambda children: st.lists(children) | st.dictionaries(texts, children),
)


class Colour(StrEnum):
    RED = "red"


class Old(str, Enum):  # noqa: UP042 - what people wrote before StrEnum
    RED = "red"


class Number(IntEnum):
    ONE = 1


class Text(str):
    __slots__ = ()


@dataclasses.dataclass
class Point:
    x: int


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


def nested(depth: int, kind: str = "list") -> Any:
    value: Any = [] if kind == "list" else {}
    for _ in range(depth - 1):
        value = [value] if kind == "list" else {"a": value}
    return value


def same(a: Any, b: Any) -> bool:
    """Equal, type for type: 1, 1.0 and True differ."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return bool(a == b)


@given(plain)
def test_plain_data_comes_back_as_it_was(value: Any) -> None:
    text = encode_payload(value)
    assert same(json.loads(text), value)
    text.encode("utf-8")
    assert "\0" not in text


def test_the_text_is_compact_and_not_escaped() -> None:
    assert encode_payload({"a": [1, 2.5, True, None], "ü": "é😀"}) == (
        '{"a":[1,2.5,true,null],"ü":"é😀"}'
    )


def test_it_is_a_snapshot() -> None:
    value = {"a": [1]}
    text = encode_payload(value)
    value["a"].append(2)
    assert json.loads(text) == {"a": [1]}


@pytest.mark.parametrize("value", ["\\u0000", "\\\\u0000", {"\\u0000": ["\\"]}, "\x7f", "\u2028"])
def test_what_only_looks_like_nul_is_taken(value: Any) -> None:
    assert json.loads(encode_payload(value)) == value


def payload_error(value: Any) -> PayloadError:
    with pytest.raises(PayloadError) as caught:
        encode_payload(value)
    return caught.value


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ((1, 2), "list(value)"),
        ({1}, "list(value)"),
        (frozenset(), "list(value)"),
        (b"x", "base64.b64encode(value).decode()"),
        (bytearray(), "base64.b64encode(value).decode()"),
        (Decimal("1.5"), "str(value)"),
        (datetime.now(UTC), "value.isoformat()"),
        (date(2024, 2, 29), "value.isoformat()"),
        (uuid.uuid4(), "str(value)"),
        (Colour.RED, "value.value"),
        (Old.RED, "value.value"),
        (Number.ONE, "value.value"),
        (Text("x"), "str(value)"),
        (Point(1), "dataclasses.asdict(value)"),
        (Order(id=1), "columns"),
        (OrderedDict(a=1), "dict(value)"),
        (object(), "str(value)"),
        (1j, "str(value)"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (float("-inf"), "-inf"),
        ("a\0b", "NUL"),
        ("\ud83d\ude00", "surrogate"),
        (10**640, "640"),
        (-(10**5000), "640"),
    ],
    ids=lambda v: type(v).__name__ if not isinstance(v, str) else None,
)
def test_all_else_is_refused_with_path_and_way_out(value: Any, hint: str) -> None:
    assert payload_error(value).path == "payload"
    error = payload_error({"items": [1, "a", {}, value], "late": 1})
    assert error.path == 'payload["items"][3]'
    assert str(error).startswith('payload["items"][3]: ')
    assert hint in str(error)
    assert payload_error([[{"a": value}]]).path == 'payload[0][0]["a"]'


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        (1, "str(key)"),
        (True, "str(key)"),
        (None, "str(key)"),
        (1.5, "str(key)"),
        ((1,), "str(key)"),
        (Colour.RED, "key.value"),
        (Text("x"), "str(key)"),
        (uuid.uuid4(), "str(key)"),
        ("\0", "NUL"),
        ("\udc00", "surrogate"),
    ],
)
def test_keys_are_plain_strings(key: Any, hint: str) -> None:
    error = payload_error({"a": {"ok": 1, key: 2}})
    assert error.path == 'payload["a"]'
    assert hint in str(error)
    str(error).encode("utf-8")  # can be logged


def test_ints_end_where_any_reader_still_parses_them() -> None:
    biggest = 10**640 - 1
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(640)
    try:
        for value in (biggest, -biggest):
            assert json.loads(encode_payload({"a": [value]})) == {"a": [value]}
    finally:
        sys.set_int_max_str_digits(before)
    assert payload_error({"a": [biggest + 1]}).path == 'payload["a"][0]'
    assert payload_error(["x" * 1000, -biggest - 1]).path == "payload[1]"


@pytest.mark.parametrize("kind", ["list", "dict"])
def test_depth(kind: str) -> None:
    deepest = nested(MAX_DEPTH, kind)
    assert json.loads(encode_payload(deepest)) == deepest
    error = payload_error(nested(MAX_DEPTH + 1, kind))
    assert str(MAX_DEPTH) in str(error)
    assert len(str(error)) < 400
    payload_error(nested(100_000, kind))  # no RecursionError


def test_cycles() -> None:
    looped: list[Any] = [1]
    looped.append({"self": looped})
    error = payload_error({"a": looped})
    assert error.path == 'payload["a"][1]["self"]'
    assert "cycle" in str(error)
    twice: list[Any] = []
    twice += [twice, twice]  # two branches a level: a walk of all of them would never end
    assert payload_error(twice).path == "payload[0]"


def test_the_same_value_twice_is_no_cycle() -> None:
    shared = [1]
    assert encode_payload([shared, shared]) == "[[1],[1]]"


@given(plain, st.sampled_from([(1,), b"", Decimal(1), float("nan"), "\0", "\ud800", 10**640]))
def test_a_bad_value_is_found_wherever_it_is(value: Any, bad: Any) -> None:
    for wrapped, path in (
        ([value, bad], "payload[1]"),
        ({"a": value, "b": [bad]}, 'payload["b"][0]'),
    ):
        assert payload_error(wrapped).path == path


# Headers


def test_headers() -> None:
    assert encode_headers(None) is None
    assert encode_headers({}) is None
    assert encode_headers({"trace": "ü"}) == '{"trace":"ü"}'

    class Own(Mapping[str, str]):
        def __getitem__(self, key: str) -> str:
            return {"a": "b"}[key]

        def __iter__(self) -> Any:
            return iter(["a"])

        def __len__(self) -> int:
            return 1

    assert encode_headers(Own()) == '{"a":"b"}'


@pytest.mark.parametrize(
    "headers",
    [
        {"a": 1},
        {"a": None},
        {1: "a"},
        {"": "a"},
        {"a\0": "b"},
        {"a": "\0"},
        {"a": "\ud800"},
        {"\ud800": "a"},
        {"a": Colour.RED},
        [("a", "b")],
        [],
        "",
        0,
    ],
)
def test_wrong_headers(headers: Any) -> None:
    with pytest.raises(InvalidEventError, match="^event headers: ") as caught:
        encode_headers(headers)
    assert caught.value.field == "headers"
    str(caught.value).encode("utf-8")


# Types, keys, names


@pytest.mark.parametrize("good", ["a", "order.placed", "x" * 200, "bestellung/größe", "\u4e2d"])
def test_types(good: str) -> None:
    assert check_type(good) == good


@pytest.mark.parametrize(
    "bad",
    ["", "x" * 201, "a b", "a\n", "\ta", "a\u00a0b", "a\u2003", "\0", "\x1f", "\x85", "\x9b"]
    + ["a\x7f", "\ud800", None, 1, b"a", ["a"]],
)
def test_wrong_types(bad: Any) -> None:
    with pytest.raises(InvalidEventError, match="^event type: ") as caught:
        check_type(bad)
    assert caught.value.field == "type"


def test_enum_members_become_plain_strings() -> None:
    for checked in (check_type(Colour.RED), check_key(Old.RED), event_id(Old.RED)[1]):
        assert type(checked) is str
        assert checked == "red"


@pytest.mark.parametrize("good", [None, "a", " ", "a b", "x" * 1024, "ü" * 512, "😀" * 256])
def test_keys(good: str | None) -> None:
    assert check_key(good) == good


@pytest.mark.parametrize(
    "bad", ["", "\0", "a\0", "\udfff", "x" * 1025, "ü" * 512 + "x", "😀" * 257, 1, b"a", ("a",)]
)
def test_wrong_keys(bad: Any) -> None:
    with pytest.raises(InvalidEventError, match="^event key: ") as caught:
        check_key(bad)
    assert caught.value.field == "key"
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("good", ["a", "mail.confirm", "a-b_c:d/E9", "x" * 200])
def test_handler_names(good: str) -> None:
    check_handler_name(good)


@pytest.mark.parametrize("bad", ["", "a b", "a\n", "ü", "a,b", "x" * 201, None, 1, b"a"])
def test_wrong_handler_names(bad: Any) -> None:
    with pytest.raises(ConfigurationError):
        check_handler_name(bad)


# Ids


def test_new_ids_are_version_7_of_now() -> None:
    before = time.time_ns() // 1_000_000
    id = new_event_id()
    after = time.time_ns() // 1_000_000
    assert (id.version, id.variant) == (7, uuid.RFC_4122)
    # another test may have drawn ids faster than 4,096 a millisecond
    assert before <= id.int >> 80 <= after + 100


def test_new_ids_grow_also_when_the_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = codec._EventIds()
    now = 1_700_000_000_000_000_000
    monkeypatch.setattr(time, "time_ns", lambda: now)
    made = [ids.new() for _ in range(10_000)]  # more than the counter holds
    now -= 3_600_000_000_000
    made += [ids.new() for _ in range(100)]
    now += 7_200_000_000_000
    made.append(ids.new())
    assert made == sorted(set(made))
    assert {(id.version, id.variant) for id in made} == {(7, uuid.RFC_4122)}
    assert made[0].int >> 80 == 1_700_000_000_000
    assert made[-1].int >> 80 == 1_700_000_000_000 + 3_600_000
    assert len({id.int & (2**62 - 1) for id in made}) == len(made)


def test_new_ids_from_threads_are_distinct_and_grow_in_each() -> None:
    made: list[list[UUID]] = [[] for _ in range(8)]
    start = threading.Barrier(8)

    def draw(into: list[UUID]) -> None:
        start.wait()
        into.extend(new_event_id() for _ in range(2_000))

    threads = [threading.Thread(target=draw, args=(each,)) for each in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stamps = [id.int >> 64 for each in made for id in each]
    assert len(set(stamps)) == 16_000
    assert all(each == sorted(each) for each in made)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_not_stuck_on_the_parents_lock() -> None:
    with codec._event_ids._lock:
        pid = os.fork()
        if not pid:
            try:
                drawn = threading.Thread(target=new_event_id, daemon=True)
                drawn.start()
                drawn.join(10)
                os._exit(3 if drawn.is_alive() else 0)
            finally:
                os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_uuid_is_taken_as_it_is() -> None:
    id = uuid.uuid4()
    for form in (id, str(id), str(id).upper(), id.hex):
        assert event_id(form) == (id, None)


def test_the_namespace_is_fixed() -> None:
    assert str(EVENT_ID_NAMESPACE) == "82953aa8-6db4-5e93-a2fb-15f74aaf4fb1"
    assert uuid.uuid5(uuid.NAMESPACE_DNS, "event-id.sqlalchemy-relaybus") == EVENT_ID_NAMESPACE
    assert event_id("order-7")[0] == UUID("2ff1c61e-b230-501f-b03f-7321294e2628")


@pytest.mark.parametrize(
    "given",
    ["order-7", " ", "größe", "{018f3f5e-7b1a-7c3d-9e2f-001122334455}"]
    + ["018f3f5e7-b1a-7c3d-9e2f-001122334455", " 18f3f5e7b1a7c3d9e2f001122334455"]
    + ["0x8f3f5e7b1a7c3d9e2f001122334455", "018f3f5e-7b1a-7c3d-9e2f-001122334455\n"]
    + ["\u0660" * 32, "x" * 10_000],
)
def test_other_strings_become_version_5(given: str) -> None:
    id, original = event_id(given)
    assert original == given
    assert id == uuid.uuid5(EVENT_ID_NAMESPACE, given)
    assert id.version == 5


@pytest.mark.parametrize("bad", ["", "a\0", "\ud800", None, 7, b"order-7"])
def test_wrong_ids(bad: Any) -> None:
    with pytest.raises(InvalidEventError, match="^event id: ") as caught:
        event_id(bad)
    assert caught.value.field == "id"
