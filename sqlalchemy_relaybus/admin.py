"""What an operator does: look at blocked keys and dead letters, and decide about them.

Each function works in the transaction of the connection that it is given, and the caller commits.
Workers notice what becomes ready at their next look.

Arguments that cannot be used are a :class:`ConfigurationError`, and a database whose tables do not
fit this release is a :class:`SchemaError`; nothing is written then, and the transaction goes on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import Connection

from .bus import RelayBus
from .exc import ConfigurationError, shown
from .schema import check_schema
from .stores import store_for
from .stores.base import BlockedKey, DeadLetter, Store
from .tables import Tables

__all__ = [
    "BlockedKey",
    "DeadLetter",
    "blocked_keys",
    "dead_letters",
    "discard",
    "release",
    "requeue",
]


def dead_letters(
    connection: Connection,
    bus: RelayBus | Tables,
    *,
    handler: str | None = None,
    limit: int = 100,
    after: DeadLetter | None = None,
) -> list[DeadLetter]:
    """The dead letters, those that died first in front; of *handler*, or of all.

    *after*: the last one of the page before.
    """
    _check(handler is None or isinstance(handler, str), "handler", "the name of one", handler)
    _check(_is_int(limit, 1), "limit", "a whole number from 1", limit)
    _check(
        after is None or isinstance(after, DeadLetter),
        "after",
        "the last DeadLetter of the page before",
        after,
    )
    return _store(connection, bus).dead_letters(connection, handler, limit, after)


def requeue(connection: Connection, bus: RelayBus | Tables, ids: Sequence[int]) -> set[int]:
    """Have the dead letters *ids* run again; those that were dead letters, by id.

    Each gets a fresh budget of attempts and keeps its last error until the next. It runs before
    the later deliveries of its key that no worker has claimed. Twice at once has one effect.
    """
    _check_ids(ids)
    return _store(connection, bus).requeue(connection, ids)


def discard(connection: Connection, bus: RelayBus | Tables, ids: Sequence[int]) -> set[int]:
    """Remove the dead letters *ids*; those that were dead letters, by id.

    Their events stay, and keep on record that the handler had its delivery. What a dead letter
    held back goes on.
    """
    _check_ids(ids)
    return _store(connection, bus).discard(connection, ids)


def release(connection: Connection, bus: RelayBus | Tables, handler: str, key: str) -> int:
    """Let the deliveries of *handler* and *key* go on, past their dead letters, in order.

    The dead letters stay as they are. Returns how many of them held the others back.
    """
    _check(isinstance(handler, str), "handler", "the name of one", handler)
    _check(isinstance(key, str), "key", "a str, as the event has it", key)
    return _store(connection, bus).release(connection, handler, key)


def blocked_keys(
    connection: Connection, bus: RelayBus | Tables, *, limit: int = 100
) -> list[BlockedKey]:
    """The keys that a parked delivery holds back: the ones with the most followers in front.

    Counts every follower, so it reads all that is ready or parked on the lanes of these keys.
    """
    _check(_is_int(limit, 1), "limit", "a whole number from 1", limit)
    return _store(connection, bus).blocked_keys(connection, limit)


def _store(connection: Connection, bus: RelayBus | Tables) -> Store:
    if not isinstance(connection, Connection):
        raise ConfigurationError(
            f"this takes a Connection, not {shown(connection)}; use one of engine.begin(), or "
            "session.connection(), or of an asynchronous connection or session the one that "
            "run_sync() gives"
        )
    _check(isinstance(bus, RelayBus | Tables), "bus", "a RelayBus or its tables", bus)
    tables = bus.tables if isinstance(bus, RelayBus) else bus
    store = store_for(connection.dialect.name, tables)
    check_schema(connection, tables)
    return store


def _check_ids(ids: Sequence[int]) -> None:
    # a text is a sequence too: of its digits, each of which would be some other delivery
    _check(
        isinstance(ids, Collection) and not isinstance(ids, str | bytes),
        "ids",
        "a list of whole numbers, as [letter.id]",
        ids,
    )
    for id in ids:
        _check(_is_int(id), "ids", "whole numbers, such as letter.id", id)


def _is_int(value: object, low: int = 0) -> bool:
    # more than 63 bits no database takes
    return isinstance(value, int) and not isinstance(value, bool) and low <= value < 1 << 63


def _check(holds: bool, name: str, wanted: str, value: object) -> None:
    if not holds:
        raise ConfigurationError(f"{name} must be {wanted}, not {shown(value)}")
