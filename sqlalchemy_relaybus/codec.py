"""What may enter an event, and how it is stored: payloads, headers, types, keys, names and ids.

Everything is checked when ``publish()`` is called, with the same answer whatever the store. No
value is converted on the way in: what a handler reads equals what was published, type for type.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import threading
import time
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from datetime import time as clock_time
from enum import Enum
from typing import Any, Final
from uuid import UUID, uuid5

from sqlalchemy_relaybus.exc import (
    MAX_DELAY,
    ConfigurationError,
    InvalidEventError,
    PayloadError,
    as_seconds,
    shown,
)

#: How deep lists and dicts may nest. ``[]`` is one deep.
MAX_DEPTH: Final = 200
#: Most decimal digits of an int in a payload. 640 is the lowest value that Python's limit on
#: parsing ints can be set to (``sys.set_int_max_str_digits``), so every worker can read it.
MAX_INT_DIGITS: Final = 640
#: Most characters of an event type.
MAX_TYPE_LENGTH: Final = 200
#: Most bytes of an ordering key in UTF-8. An index row of PostgreSQL holds 2,704 bytes, and one of
#: them holds handler (200 at most) and key together.
MAX_KEY_BYTES: Final = 1024

#: Where ids that are no UUID are mapped to one. Never to change: an id published again must map to
#: the same UUID in every release. It is ``uuid5(NAMESPACE_DNS, "event-id.sqlalchemy-relaybus")``.
EVENT_ID_NAMESPACE: Final = UUID("82953aa8-6db4-5e93-a2fb-15f74aaf4fb1")
#: The header that keeps an id that was no UUID.
ORIGINAL_ID_HEADER: Final = "relaybus-original-id"

_INT_BOUND = 10**MAX_INT_DIGITS
_SCALARS = frozenset({str, int, float, bool, type(None)})
_STR_ONLY = frozenset({str})
_encode = json.JSONEncoder(
    # not ASCII only: shorter, and a lone surrogate is then to be seen in the text
    ensure_ascii=False,
    allow_nan=False,
    separators=(",", ":"),
    # the depth is bounded by the check before it
    check_circular=False,
).encode

_SURROGATE = re.compile("[\ud800-\udfff]")
_TYPE = re.compile(rf"[^\s\x00-\x1f\x7f-\x9f\ud800-\udfff]{{1,{MAX_TYPE_LENGTH}}}")
_HANDLER_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,200}")
# str(UUID) and UUID.hex, in either case. UUID() itself takes far more (dashes anywhere, braces,
# blanks, underscores), so that different ids would become one event.
_UUID = re.compile(
    "[0-9a-f]{32}|[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.IGNORECASE
)


# Payload


def encode_payload(value: object) -> str:
    """*value* as strict JSON text, a snapshot: later changes of *value* do not reach it.

    Taken are exactly ``None``, ``bool``, ``int`` of up to 640 digits, finite ``float``, ``str``
    without NUL and lone surrogates, ``list``, and ``dict`` with ``str`` keys, nested up to 200
    deep. All else raises :class:`PayloadError` with the path to it, subclasses of these too
    (``StrEnum``, ``OrderedDict``, ...): JSON would silently turn them, tuples and int keys into
    something that does not come back.
    """
    # The common case is decided by type checks and by looking at the finished text. Whatever does
    # not pass is walked again, slowly, for a path and a reason.
    text = None
    if _is_plain(value, MAX_DEPTH):
        try:
            text = _encode(value)
        except ValueError:
            pass  # NaN, infinity, or an int too long to print
        else:
            if (
                (text.isascii() or not _SURROGATE.search(text))
                and "\\u0000" not in text
                # a shorter text cannot hold a longer int
                and (len(text) <= MAX_INT_DIGITS or _ints_fit(value))
            ):
                return text
    _explain(value, "payload", [])
    if text is None:
        raise PayloadError("payload", "was changed by another thread while it was encoded")
    return text  # what looked like NUL was an escaped backslash before "u0000"


def _is_plain(value: object, depth: int) -> bool:
    """Whether *value* consists of the plain JSON types, at most *depth* containers deep.

    The depth also ends the walk of a cycle, on its first branch.
    """
    kind = type(value)
    if kind is dict:
        if not _STR_ONLY.issuperset(map(type, value)):  # type: ignore[call-overload]
            return False
        children: Any = value.values()  # type: ignore[attr-defined]
    elif kind is list:
        children = value
    else:
        return kind in _SCALARS
    if not depth:
        return False
    if _SCALARS.issuperset(map(type, children)):
        return True
    depth -= 1
    for child in children:
        if type(child) not in _SCALARS and not _is_plain(child, depth):
            return False
    return True


def _ints_fit(value: object) -> bool:
    kind = type(value)
    if kind is dict:
        children: Any = value.values()  # type: ignore[attr-defined]
    elif kind is list:
        children = value
    else:
        return kind is not int or -_INT_BOUND < value < _INT_BOUND  # type: ignore[operator]
    for child in children:
        kind = type(child)
        if kind is int:
            if not -_INT_BOUND < child < _INT_BOUND:
                return False
        elif (kind is dict or kind is list) and not _ints_fit(child):
            return False
    return True


def _explain(value: Any, path: str, above: list[int]) -> None:
    """Raise the :class:`PayloadError` for the first thing wrong in *value*; or return.

    *above* holds the ids of the containers that *value* is in.
    """
    kind = type(value)
    if kind is str:
        _explain_str(value, path, "the string")
    elif kind is int:
        if not -_INT_BOUND < value < _INT_BOUND:
            raise PayloadError(
                path,
                f"the int has more than {MAX_INT_DIGITS} decimal digits, which not every reader "
                "parses; convert it first, e.g. hex(value)",
            )
    elif kind is float:
        if not math.isfinite(value):
            raise PayloadError(
                path, f"JSON has no {value!r}; leave it out, or convert it first, e.g. to None"
            )
    elif kind is list or kind is dict:
        if id(value) in above:
            raise PayloadError(
                path, f"this {kind.__name__} contains itself; JSON has no cycles, so break it first"
            )
        if len(above) == MAX_DEPTH:
            # the path itself would be some thousand characters
            raise PayloadError(
                _cut(path),
                f"lists and dicts nest deeper than {MAX_DEPTH}; flatten the payload, or store the "
                "document elsewhere and publish a reference to it",
            )
        above.append(id(value))
        if kind is list:
            for index, child in enumerate(value):
                _explain(child, f"{path}[{index}]", above)
        else:
            for key, child in value.items():
                if type(key) is not str:
                    raise PayloadError(
                        path,
                        f"the key {_cut(shown(key))} is {_a(type(key))}, and JSON has str keys "
                        f"only; convert it first, e.g. {_way_out(key, 'key')}",
                    )
                _explain_str(key, path, f"the key {_cut(ascii(key))}")
                _explain(child, f"{path}[{_cut(json.dumps(key, ensure_ascii=False))}]", above)
        above.pop()
    elif value is not None and kind is not bool:
        raise PayloadError(
            path,
            f"{_a(kind)} is not plain JSON data; convert it first, e.g. {_way_out(value, 'value')}",
        )


def _explain_str(value: str, path: str, what: str) -> None:
    if "\0" in value:
        raise PayloadError(
            path,
            f"{what} contains NUL (character {value.index(chr(0))}), which databases do not "
            'store; remove it, e.g. value.replace("\\0", "")',
        )
    if found := _SURROGATE.search(value):
        raise PayloadError(
            path,
            f"{what} contains a lone surrogate (character {found.start()}), which has no UTF-8 "
            'form; repair it, e.g. value.encode("utf-8", "replace").decode()',
        )


def _way_out(value: object, name: str) -> str:
    """The expression that turns *value* into something a payload takes."""
    kind = type(value)
    if isinstance(value, Enum):
        return f"{name}.value"
    if isinstance(value, bool | int | float | str):  # a subclass of these, or a key
        base = next(t for t in (bool, int, float, str) if isinstance(value, t))
        return f"{base.__name__}({name})" if base is not kind else f"str({name})"
    if isinstance(value, (tuple, set, frozenset, list)):
        return f"str({name})" if name == "key" else f"list({name})"
    if isinstance(value, Mapping):
        return f"dict({name})"
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"base64.b64encode({name}).decode()"
    if isinstance(value, (datetime, date, clock_time)):
        return f"{name}.isoformat()"
    if hasattr(kind, "_sa_class_manager") or hasattr(kind, "__mapper__"):
        return f'a dict of the columns that matter, {{"id": {name}.id, ...}}'
    if dataclasses.is_dataclass(value):
        return f"dataclasses.asdict({name})"
    return f"str({name})"


# Headers, type, key, handler name


def encode_headers(headers: Mapping[str, str] | None, original_id: str | None = None) -> str | None:
    """*headers* as JSON text, or ``None`` where there are none.

    Names and values are ``str`` without NUL and lone surrogates, names not empty. Else
    :class:`InvalidEventError` for the field ``"headers"``. *original_id*, of :func:`event_id`, is
    kept among them.
    """
    if headers is None:
        headers = {}
    if not isinstance(headers, Mapping):
        raise InvalidEventError(
            "headers", f"must be a mapping of str to str or None, not {_a(type(headers))}"
        )
    plain = dict(headers)
    for name, value in plain.items():
        if type(name) is not str or not name:
            raise InvalidEventError(
                "headers", f"a name must be a str that is not empty, not {_cut(shown(name))}"
            )
        if type(value) is not str:
            raise InvalidEventError(
                "headers",
                f"the value of {_cut(ascii(name))} must be a str, not {_a(type(value))}; "
                "convert it first, e.g. str(value)",
            )
        for part, text in (("name", name), ("value", value)):
            if problem := _unstorable(text):
                raise InvalidEventError("headers", f"{part} of {_cut(ascii(name))} {problem}")
    if original_id is not None:
        plain[ORIGINAL_ID_HEADER] = original_id
    return _encode(plain) if plain else None


def check_type(type_: object) -> str:
    """*type_* as a plain ``str``, if it can be an event's type; else :class:`InvalidEventError`.

    That is a ``str`` (or ``StrEnum``) of 1 to 200 characters without white space, control
    characters and lone surrogates.
    """
    if not isinstance(type_, str):
        raise InvalidEventError("type", f"must be a str, not {_a(type(type_))}")
    if not _TYPE.fullmatch(type_):
        if not type_:
            problem = "must not be empty"
        elif len(type_) > MAX_TYPE_LENGTH:
            problem = f"has {len(type_)} characters, {MAX_TYPE_LENGTH} are allowed"
        else:
            problem = (
                f"{_plain_str(type_)!a} contains white space, a control character or a lone "
                'surrogate; use a name such as "order.placed"'
            )
        raise InvalidEventError("type", problem)
    return _plain_str(type_)


def check_key(key: object) -> str | None:
    """*key* as a plain ``str``, or ``None``, if it can be an ordering key.

    That is a ``str`` (or ``StrEnum``), not empty, without NUL and lone surrogates, of at most
    1,024 bytes in UTF-8: an index row of PostgreSQL holds 2,704 bytes, and one of them holds key
    and handler. Else :class:`InvalidEventError` for the field ``"key"``.
    """
    if key is None:
        return None
    if not isinstance(key, str):
        raise InvalidEventError(
            "key", f"must be a str or None, not {_a(type(key))}; convert it, e.g. str(key)"
        )
    if not key:
        raise InvalidEventError("key", "must not be empty; give None for an event without order")
    key = _plain_str(key)
    if problem := _unstorable(key):
        raise InvalidEventError("key", f"{_cut(ascii(key))} {problem}")
    # no character takes more than 4 bytes
    if len(key) * 4 > MAX_KEY_BYTES and (size := len(key.encode())) > MAX_KEY_BYTES:
        raise InvalidEventError(
            "key",
            f"has {size} bytes in UTF-8, {MAX_KEY_BYTES} are allowed (an index row of PostgreSQL "
            "holds 2704, for key and handler); use a digest of it, e.g. "
            "hashlib.sha256(key.encode()).hexdigest()",
        )
    return key


def check_delay(delay: timedelta | float) -> float:
    """*delay* in seconds; what is none is an :class:`InvalidEventError` for ``"delay"``."""
    try:
        return as_seconds(delay)
    except ValueError as error:
        raise InvalidEventError("delay", str(error)) from None


def check_moment(moment: datetime) -> datetime:
    """*moment* in UTC, if an event can become available then.

    That is a ``datetime`` with a time zone, less than 100 years from now: so no database fails on
    it, and no driver that shows it in another time zone. In UTC, since Python knows offsets of up
    to a day and of fractions of a second, and databases do not. Else :class:`InvalidEventError`
    for the field ``"available_at"``.
    """
    if not isinstance(moment, datetime):
        raise InvalidEventError(
            "available_at",
            f"must be a datetime with a time zone, not {shown(moment)}; for seconds from now there "
            "is delay",
        )
    if moment.utcoffset() is None:  # also for a tzinfo that does not say
        raise InvalidEventError(
            "available_at",
            f"{moment} has no time zone; give it one, e.g. moment.replace(tzinfo=timezone.utc)",
        )
    try:
        utc = moment.astimezone(UTC)
    except OverflowError:  # a day before the year 1, or after 9999
        utc = None
    if utc is None or not abs((utc - datetime.now(UTC)).total_seconds()) <= MAX_DELAY:
        raise InvalidEventError(
            "available_at",
            f"{moment} is more than 100 years from now; leave it out for an event that is "
            "available at once",
        )
    return utc


def check_handler_name(name: object) -> None:
    """Raise :class:`ConfigurationError` unless *name* can name a handler.

    That is a ``str`` of 1 to 200 of the characters ``A-Z a-z 0-9 _ . : / -``: it is stored with
    every delivery, part of an index row, and typed in shells.
    """
    if type(name) is not str:
        raise ConfigurationError(f"a handler's name must be a str, not {_a(type(name))}")
    if not _HANDLER_NAME.fullmatch(name):
        raise ConfigurationError(
            f"{_cut(ascii(name))} cannot name a handler: give 1 to 200 of the characters "
            'A-Z a-z 0-9 _ . : / -, such as "mail.confirm"'
        )


# Ids


class _EventIds:
    """UUIDv7s that grow within this process (RFC 9562, section 6.2, method 1).

    48 bits of Unix milliseconds, then ``rand_a`` as a 12-bit counter, then 62 random bits. Time
    and counter are one number that only grows: a counter that runs over carries into the
    milliseconds, and a clock that was set back is waited out with the counter.
    """

    def __init__(self) -> None:
        self._last = 0
        self.unlock()

    def unlock(self) -> None:
        # after a fork: the lock may have been held by a thread that the child does not have
        self._lock = threading.Lock()

    def new(self) -> UUID:
        noise = int.from_bytes(os.urandom(10))
        # the counter starts at random, in its lower half to leave room to count
        stamp = time.time_ns() // 1_000_000 << 12 | noise >> 69
        with self._lock:
            if stamp <= self._last:
                stamp = self._last + 1
            self._last = stamp
        return UUID(
            int=stamp >> 12 << 80
            | 0x7 << 76
            | (stamp & 0xFFF) << 64
            | 0b10 << 62
            | noise & 0x3FFF_FFFF_FFFF_FFFF
        )


_event_ids = _EventIds()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_event_ids.unlock)


def new_event_id() -> UUID:
    """A UUIDv7, greater than every one that this process has made before. Thread-safe."""
    return _event_ids.new()


def event_id(given: UUID | str) -> tuple[UUID, str | None]:
    """The event id for what the caller gave as one, and the original where that is no UUID.

    A ``UUID``, or a string that is one (with or without dashes, in either case), is taken as it
    is, with ``None``. Any other string becomes the UUIDv5 of it in :data:`EVENT_ID_NAMESPACE`,
    with the string, to be kept in the header :data:`ORIGINAL_ID_HEADER`. An empty string, NUL, a
    lone surrogate or another type is an :class:`InvalidEventError` for the field ``"id"``.
    """
    if isinstance(given, UUID):
        return given, None
    if not isinstance(given, str):
        raise InvalidEventError(
            "id", f"must be a UUID or a str, not {_a(type(given))}; convert it, e.g. str(id)"
        )
    given = _plain_str(given)
    if _UUID.fullmatch(given):
        return UUID(given), None
    if not given:
        raise InvalidEventError("id", "must not be empty; leave it out to have one made")
    if problem := _unstorable(given):
        raise InvalidEventError("id", f"{_cut(ascii(given))} {problem}")
    return uuid5(EVENT_ID_NAMESPACE, given), given


# Words for messages


def _unstorable(text: str) -> str | None:
    """Why no store holds *text*, or ``None``."""
    if "\0" in text:
        return "contains NUL, which databases do not store; remove it"
    if not text.isascii() and _SURROGATE.search(text):
        return "contains a lone surrogate, which has no UTF-8 form; remove it"
    return None


def _plain_str(text: str) -> str:
    # str() of a (str, Enum) member gives its name; drivers treat subclasses in ways of their own
    return text if type(text) is str else str.__str__(text)


def _a(kind: type) -> str:
    name = kind.__name__
    return f"{'an' if name[:1].lower() in 'aeio' else 'a'} {name}"


def _cut(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[: most - 20]}...{text[-17:]}"
