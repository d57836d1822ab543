"""What no store or worker could use is refused where it is given, with a typed error.

The message for each mistake is in ``tests/misuse``; here it is which values are taken.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.orm import Session

from sqlalchemy_relaybus import (
    ConfigurationError,
    Exponential,
    InvalidEventError,
    RelayBus,
    RelayBusError,
    Retry,
    Snooze,
)
from sqlalchemy_relaybus.codec import check_moment
from sqlalchemy_relaybus.exc import MAX_DELAY, as_seconds, shown
from sqlalchemy_relaybus.session import Pending
from sqlalchemy_relaybus.worker.dispatch import describe


@pytest.fixture
def bus() -> RelayBus:
    return RelayBus(unrouted="store", wake=False)


# -- durations -------------------------------------------------------------------------------------

#: What is no duration, or one that no store can add to the present.
NONE: list[Any] = [
    *(10**400, -(10**400), 10 ** (sys.get_int_max_str_digits() + 1)),
    *(float("nan"), float("inf"), -float("inf"), -1, -5e-324, MAX_DELAY * 1.001),
    *("5", b"5", True, False, Decimal(5), Fraction(1, 2), 5j, [], object()),
    *(timedelta.max, timedelta(seconds=-1)),
]


@given(st.floats(0, MAX_DELAY) | st.integers(0, int(MAX_DELAY)))
def test_numbers_are_seconds(value: float) -> None:
    assert as_seconds(value) == value
    assert isinstance(as_seconds(value), float)


@given(st.timedeltas(timedelta(0), timedelta(seconds=MAX_DELAY)))
def test_and_so_are_timedeltas(value: timedelta) -> None:
    assert as_seconds(value) == value.total_seconds()


@given(
    st.integers(max_value=-1)
    | st.integers(min_value=int(MAX_DELAY) + 1)
    | st.floats().filter(lambda number: not 0 <= number <= MAX_DELAY)
    | st.timedeltas(max_value=timedelta(microseconds=-1))
    | st.text()
    | st.booleans()
)
def test_all_else_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="^must be a timedelta or a number of seconds from 0 to "):
        as_seconds(value)


@pytest.mark.parametrize("value", NONE, ids=lambda value: shown(value).partition(" at 0x")[0][:30])
def test_wherever_a_duration_is_taken(bus: RelayBus, value: Any) -> None:
    with Session() as session:
        with pytest.raises(InvalidEventError) as refused:
            bus.publish(session, "a", {}, delay=value)
        assert refused.value.field == "delay"
        assert not session.new
    for take in (
        Retry,
        Snooze,
        lambda value: bus.handler("a", name="a", timeout=value),
        lambda value: Exponential(base=value),
    ):
        with pytest.raises(ConfigurationError, match="must be a timedelta or a number of seconds"):
            take(value)


@pytest.mark.parametrize("value", [0, 0.0, timedelta(0), MAX_DELAY, 1e-9])
def test_the_ends_are_taken(bus: RelayBus, value: Any) -> None:
    assert Retry(value).after == Snooze(value).after == as_seconds(value)
    with Session() as session:
        bus.publish(session, "a", {}, delay=value)
        (pending,) = session.new
        assert isinstance(pending, Pending)
        assert pending.new().delay == as_seconds(value)


def test_an_outcome_is_recorded_without_saying_its_name_twice() -> None:
    assert describe(Retry(90)) == "Retry: after 90 s"
    assert describe(Snooze(timedelta(hours=1))) == "Snooze: for 3600 s"


# -- moments ---------------------------------------------------------------------------------------

#: More than PostgreSQL's 16 hours, and fractions of a second, which it does not know either.
offsets = st.timedeltas(timedelta(hours=-23, minutes=-59), timedelta(hours=23, minutes=59))


@given(
    st.datetimes(datetime(1950, 1, 1), datetime(2099, 1, 1)),  # noqa: DTZ001 - it gets one
    offsets.map(timezone),
)
def test_a_moment_is_kept_in_utc(moment: datetime, zone: tzinfo) -> None:
    moment = moment.replace(tzinfo=zone)
    kept = check_moment(moment)
    assert kept == moment
    assert kept.tzinfo is UTC


@given(
    st.datetimes(max_value=datetime(1900, 1, 1))  # noqa: DTZ001
    | st.datetimes(min_value=datetime(2200, 1, 1)),  # noqa: DTZ001
    offsets.map(timezone),
)
def test_a_moment_far_away_is_refused(moment: datetime, zone: tzinfo) -> None:
    with pytest.raises(InvalidEventError, match="is more than 100 years from now"):
        check_moment(moment.replace(tzinfo=zone))


class Silent(tzinfo):
    """A time zone that does not say what it is."""

    def utcoffset(self, when: datetime | None) -> None:
        return None

    dst = tzname = utcoffset


@pytest.mark.parametrize(
    "moment",
    [
        datetime.now(),  # noqa: DTZ005 - that is the mistake
        datetime.now(UTC).replace(tzinfo=Silent()),
        datetime.now(UTC).date(),
        1_700_000_000.0,
        "tomorrow",
        timedelta(days=1),
    ],
)
def test_what_is_no_moment_is_refused(bus: RelayBus, moment: Any) -> None:
    with Session() as session:
        with pytest.raises(InvalidEventError) as refused:
            bus.publish(session, "a", {}, available_at=moment)
        assert refused.value.field == "available_at"
        assert not session.new


# -- headers, ids ----------------------------------------------------------------------------------


@pytest.mark.parametrize("id", [None, "order-7"], ids=["no id", "a text id"])
@pytest.mark.parametrize("headers", [[1], [], "a", 5, 0, False, [("a", "b")], {1: "a"}, {"a": 1}])
def test_headers_are_checked_with_and_without_an_id_to_keep(
    bus: RelayBus, headers: Any, id: str | None
) -> None:
    with Session() as session:
        with pytest.raises(InvalidEventError) as refused:
            bus.publish(session, "a", {}, id=id, headers=headers)
        assert refused.value.field == "headers"
        assert not session.new


def test_an_id_that_is_no_uuid_is_kept_beside_the_headers(bus: RelayBus) -> None:
    given = {"trace": "7"}
    with Session() as session:
        event = bus.publish(session, "a", {}, id="order-7", headers=given)
        assert event.headers == {"trace": "7", "relaybus-original-id": "order-7"}
        assert given == {"trace": "7"}
        assert bus.publish(session, "a", {}, id="order-7").headers == {
            "relaybus-original-id": "order-7"
        }
        session.expunge_all()


# -- handlers --------------------------------------------------------------------------------------


def test_the_decorator_without_its_parentheses(bus: RelayBus) -> None:
    def handle(event: Any) -> None: ...

    form = r'@bus\.handler\("order\.placed", name="mail\.confirm"\)'
    misuses: list[Any] = [
        lambda: bus.handler(handle),
        lambda: bus.handler(handle, name="a"),  # type: ignore[call-overload]
        lambda: bus.handler("a"),  # type: ignore[call-overload]
        lambda: bus.handler(),  # type: ignore[call-overload]
    ]
    for misuse in misuses:
        with pytest.raises(ConfigurationError, match=form):
            misuse()
    assert not bus.handlers


# -- messages --------------------------------------------------------------------------------------


class Broken:
    def __repr__(self) -> str:
        raise LookupError


def test_a_message_survives_the_repr_of_what_it_is_about(bus: RelayBus) -> None:
    assert shown(Broken()) == "<Broken whose repr raised LookupError>"
    assert shown(10**5000) == "<int whose repr raised ValueError>"
    assert len(shown("x" * 5000)) == 120
    broken: Any = Broken()
    with pytest.raises(TypeError, match="cannot publish on <Broken"):
        bus.publish(broken, "a", {})
    for misuse in (
        lambda: bus.publish(Session(), "a", {broken: 1}),
        lambda: bus.publish(Session(), "a", {}, headers={broken: "1"}),
        lambda: bus.publish(Session(), "a", {}, delay=broken),
        lambda: bus.publish(Session(), "a", {}, available_at=broken),
        lambda: bus.handler("a", name="a", retry=broken),
        lambda: bus.record(broken, "a", {}),
        lambda: bus.route("a", to=broken),
        lambda: bus.include(broken),
    ):
        with pytest.raises(RelayBusError, match="Broken"):
            misuse()
