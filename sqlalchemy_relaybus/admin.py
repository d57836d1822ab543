"""What an operator does: look at blocked keys and dead letters, and decide about them.

Each function works in the transaction of the connection that it is given, and the caller commits.
Workers notice what becomes ready at their next look.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection

from .bus import RelayBus
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
    return _store(connection, bus).dead_letters(connection, handler, limit, after)


def requeue(connection: Connection, bus: RelayBus | Tables, ids: Sequence[int]) -> set[int]:
    """Have the dead letters *ids* run again; those that were dead letters, by id.

    Each gets a fresh budget of attempts and keeps its last error until the next. It runs before
    the later deliveries of its key that no worker has claimed. Twice at once has one effect.
    """
    return _store(connection, bus).requeue(connection, ids)


def discard(connection: Connection, bus: RelayBus | Tables, ids: Sequence[int]) -> set[int]:
    """Remove the dead letters *ids*; those that were dead letters, by id.

    Their events stay, and keep on record that the handler had its delivery. What a dead letter
    held back goes on.
    """
    return _store(connection, bus).discard(connection, ids)


def release(connection: Connection, bus: RelayBus | Tables, handler: str, key: str) -> int:
    """Let the deliveries of *handler* and *key* go on, past their dead letters, in order.

    The dead letters stay as they are. Returns how many of them held the others back.
    """
    return _store(connection, bus).release(connection, handler, key)


def blocked_keys(
    connection: Connection, bus: RelayBus | Tables, *, limit: int = 100
) -> list[BlockedKey]:
    """The keys that a parked delivery holds back: the ones with the most followers in front.

    Counts every follower, so it reads all that is ready or parked on the lanes of these keys.
    """
    return _store(connection, bus).blocked_keys(connection, limit)


def _store(connection: Connection, bus: RelayBus | Tables) -> Store:
    tables = bus.tables if isinstance(bus, RelayBus) else bus
    return store_for(connection.dialect.name, tables)
