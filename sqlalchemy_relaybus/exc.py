"""Every error that the library raises itself.

All of them descend from :class:`RelayBusError`; errors of the database or of the user's own
transaction pass through untouched. A message says what happened and what to do about it, and the
values it names are attributes too.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

#: The longest delay or time limit, in seconds: a hundred years. Beyond it databases fail on the
#: time stamp.
MAX_DELAY: Final = 100 * 365.25 * 86400


class RelayBusError(Exception):
    """Base of every error of this library."""


class ConfigurationError(RelayBusError):
    """A setting, URL, application or target that cannot be used as it is."""


class DuplicateHandlerError(ConfigurationError):
    """A second handler under a name that the bus already knows."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"a handler named {name!r} is registered already; names identify stored deliveries, "
            "so give each handler a name of its own"
        )


class HandlerSignatureError(ConfigurationError):
    """A handler whose parameters cannot be filled, or not in its mode."""

    def __init__(self, handler: str, parameter: str | None, problem: str) -> None:
        self.handler = handler
        self.parameter = parameter
        where = f"handler {handler!r}"
        if parameter is not None:
            where += f", parameter {parameter!r}"
        super().__init__(f"{where}: {problem}")


class PublishError(RelayBusError):
    """Base of what :meth:`RelayBus.publish` refuses. Nothing was queued or written."""


class InvalidEventError(PublishError, ValueError):
    """A type, key, id, header or delay that no store can hold."""

    def __init__(self, field: str, problem: str) -> None:
        self.field = field
        super().__init__(f"event {field}: {problem}")


class PayloadError(PublishError, TypeError):
    """A payload that is not plain JSON data. ``path`` leads to the offending value."""

    def __init__(self, path: str, problem: str) -> None:
        self.path = path
        super().__init__(f"{path}: {problem}")


class UnroutedEventError(PublishError):
    """An event that no handler takes."""

    def __init__(self, type: str) -> None:
        self.type = type
        super().__init__(
            f"no handler takes events of type {type!r}; register one with @bus.handler({type!r}, "
            'name=...), or keep such events with RelayBus(unrouted="store")'
        )


class SchemaError(RelayBusError):
    """The database's tables do not fit this release.

    *where* are the options that tell ``relaybus migrate`` of a schema or prefix of its own.
    """


class SchemaMissingError(SchemaError):
    """The database has no relaybus tables."""

    def __init__(self, table: str, where: str = "") -> None:
        self.table = table
        super().__init__(
            f"the database has no table {table!r}; create the tables with "
            f"'relaybus migrate upgrade --url URL{where}'"
        )


class SchemaVersionError(SchemaError):
    """The database's tables are of another version than this release works with."""

    def __init__(self, found: int, expected: int, where: str = "") -> None:
        self.found = found
        self.expected = expected
        if found > expected:
            remedy = "install a newer sqlalchemy-relaybus, or downgrade the schema with it"
        else:
            remedy = f"stop the old workers and run 'relaybus migrate upgrade --url URL{where}'"
        age = "newer" if found > expected else "older"
        super().__init__(
            f"the database's relaybus schema is version {found}, {age} than the version {expected} "
            f"that this release works with; {remedy}"
        )


class LostLeaseError(RelayBusError):
    """The delivery is not this worker's any more, so its outcome was refused.

    Nothing was written. The present holder of the lane runs the delivery again.
    """

    def __init__(self, lane: int, delivery: int) -> None:
        self.lane = lane
        self.delivery = delivery
        super().__init__(
            f"delivery {delivery} on lane {lane} is not held by this worker any more: its outcome "
            "was refused and whoever holds the lane runs it again"
        )


class HandlerOutcome(Exception):
    """Base of what a handler raises to say how its delivery goes on. Not an error."""


class Retry(HandlerOutcome):
    """Count one attempt and try again after *after*, instead of the policy's back-off."""

    def __init__(self, after: timedelta | float) -> None:
        self.after = _after("Retry", after)
        super().__init__(f"after {self.after:g} s")  # shown behind the name of the class


class Snooze(HandlerOutcome):
    """Try again after *after* without counting an attempt."""

    def __init__(self, after: timedelta | float) -> None:
        self.after = _after("Snooze", after)
        super().__init__(f"for {self.after:g} s")


class Bury(HandlerOutcome):
    """Move the delivery to the dead letters at once."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


def first_line(error: BaseException) -> str:
    """*error* in one line: the driver's own words where it is one of the database's."""
    original = getattr(error, "orig", None) or error
    return str(original).strip().split("\n", 1)[0] or type(original).__name__


def _after(outcome: str, value: timedelta | float) -> float:
    try:
        return as_seconds(value)
    except ValueError as error:
        raise ConfigurationError(f"{outcome}: after {error}") from None


def as_seconds(value: timedelta | float) -> float:
    """*value* in seconds, if it is a duration: the one place that decides what is.

    That is a ``timedelta``, an ``int`` or a ``float`` (seconds), from 0 to :data:`MAX_DELAY`. All
    else is a ``ValueError`` whose text goes on after the argument's name: callers make an error of
    their own of it.
    """
    seconds = -1.0
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        # compared before it is converted: not every int fits into a float
        seconds = float(value) if 0 <= value <= MAX_DELAY else -1.0
    if not 0 <= seconds <= MAX_DELAY:
        raise ValueError(
            f"must be a timedelta or a number of seconds from 0 to {MAX_DELAY:.0f} (100 years), "
            f"not {shown(value)}"
        )
    return seconds


def shown(value: object) -> str:
    """*value* as a message shows it: cut, and also where its own ``repr`` fails.

    That of an ORM object may read attributes that its session would have to load; that of a very
    long ``int`` is refused by Python.
    """
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - it must not hide what the message is about
        return f"<{type(value).__name__} whose repr raised {type(error).__name__}>"
    return text if len(text) <= 120 else f"{text[:100]}...{text[-17:]}"
