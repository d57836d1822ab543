"""Notifications on PostgreSQL: a hint that something was published, never more."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

from sqlalchemy import Connection, func, select, text

from ...tables import Tables

#: How often a listener looks whether it is to stop, seconds.
_LOOK = 0.5


def channel(tables: Tables) -> str:
    """The channel of one set of tables: an identifier of at most 63 bytes."""
    name = f"{tables.schema or ''}.{tables.prefix}"
    return "relaybus_" + hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()[:16]


def can_listen(connection: Connection) -> bool:
    """Whether the driver hands out notifications as they come (psycopg 3.2 and later)."""
    return connection.dialect.driver == "psycopg"


def listen(tables: Tables, connection: Connection, stopped: Callable[[], bool]) -> Iterator[None]:
    """Yield once listening, and at each notification, until *stopped*."""
    connection.execute(text(f'LISTEN "{channel(tables)}"'))
    yield  # what was published while nobody listened
    driver: Any = connection.connection.driver_connection
    while not stopped():
        if any(True for _ in driver.notifies(timeout=_LOOK, stop_after=1)):
            yield


def notify(tables: Tables, connection: Connection) -> None:
    """Send a notification, which has no content, when the transaction commits."""
    connection.execute(select(func.pg_notify(channel(tables), "")))
