"""The bus: the way in for events. No I/O of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast
from uuid import UUID

from sqlalchemy import Connection
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from . import codec
from .event import Event
from .exc import ConfigurationError, InvalidEventError, UnroutedEventError, shown
from .notify import Waker
from .record import C, Changes, record
from .router import Router, SessionFactory, check_session_factory
from .session import SessionHook, publish_on_connection, session_of
from .stores.base import NewEvent
from .tables import DEFAULT_PREFIX, Tables, tables_for

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import (
        AsyncConnection,
        AsyncSession,
        async_scoped_session,
        async_sessionmaker,
    )

#: What events are published on, and what sessions can be attached by.
Publishable: TypeAlias = (
    "Session | AsyncSession | scoped_session[Any] | async_scoped_session[Any] | Connection"
)
Attachable: TypeAlias = (
    "type[Session] | Session | AsyncSession | sessionmaker[Any] | async_sessionmaker[Any] "
    "| scoped_session[Any] | async_scoped_session[Any]"
)


class RelayBus(Router):
    """Takes events in the application's transactions and names the handlers that they go to.

    One instance describes one set of tables: *schema* (``None``: the search path's) and *prefix*
    say where they are. *unrouted* says what becomes of an event that no handler takes: ``"error"``
    refuses it, ``"store"`` keeps it without deliveries. *session_factory* makes the sessions of
    transactional handlers that name none; without one, a plain ``Session`` on the worker's engine.
    *wake*: after a session's commit, hint to idle workers that there is something new, from a
    thread with a connection of its own; without it, and for events that are published on a
    ``Connection``, they notice at their next look.
    """

    def __init__(
        self,
        *,
        schema: str | None = None,
        prefix: str = DEFAULT_PREFIX,
        unrouted: Literal["error", "store"] = "error",
        session_factory: SessionFactory | None = None,
        wake: bool = True,
    ) -> None:
        super().__init__()
        if unrouted not in ("error", "store"):
            raise ConfigurationError(f"unrouted must be 'error' or 'store', not {shown(unrouted)}")
        for name, value in (("schema", schema), ("prefix", prefix)):
            if not (isinstance(value, str) or (value is None and name == "schema")):
                raise ConfigurationError(f"{name} must be a str, not {shown(value)}")
        if session_factory is not None:
            check_session_factory("the bus", session_factory)
        self._tables = tables_for(schema, prefix)
        self._unrouted = unrouted
        self._session_factory = session_factory
        self._hook = SessionHook(self._tables, Waker(self._tables) if wake else None)

    @property
    def tables(self) -> Tables:
        """The tables that this bus writes."""
        return self._tables

    @property
    def session_factory(self) -> SessionFactory | None:
        """What makes the sessions of transactional handlers that name none."""
        return self._session_factory

    # -- events --------------------------------------------------------------------------------

    def attach(self, target: Attachable) -> None:
        """Let sessions of *target* insert this bus's events when they flush. Idempotent.

        *target* is a sessionmaker or async_sessionmaker, a scoped session over one, a Session
        class, or one session. A session that is not attached is given the hook by its first
        ``publish()``; attaching saves that.
        """
        self._hook.attach(target)

    def detach(self, target: Attachable) -> None:
        """Undo :meth:`attach`."""
        self._hook.detach(target)

    def publish(
        self,
        target: Publishable,
        type: str,
        payload: Any,
        *,
        key: str | None = None,
        id: UUID | str | None = None,
        headers: Mapping[str, str] | None = None,
        delay: timedelta | float | None = None,
        available_at: datetime | None = None,
    ) -> Event:
        """Publish an event in the transaction of *target*; it is stored if that commits.

        *target* is a ``Session``, an ``AsyncSession``, a scoped session of either, or a Core
        ``Connection``; for an ``AsyncConnection`` there is :meth:`publish_async`. On a session the
        event is written with the next flush, at the latest by the commit; on a connection at
        once. Until then it is one of the session's new objects: it goes with a rollback, with a
        ``close()``, and with ``expunge_all()``. Events with the same *key* (any text of up to
        1,024 bytes) are handled in the order in which their transactions committed, one at a time
        for each handler.

        *payload* is plain JSON data and is copied now. *id* makes publishing again harmless: a
        handler that the event has had a delivery for gets no other one, and what was stored first
        stays, whatever else differs. A text that is no UUID is mapped to one. *delay* (seconds) is
        added to the database's clock; *available_at* is a moment with a time zone instead; neither
        may be more than 100 years away. Later events of the same key wait for a delayed one.

        Raises a :class:`PublishError`, with nothing queued or written, for anything that cannot be
        stored, and :class:`UnroutedEventError` where no handler takes *type*.
        """
        session = session_of(target)
        if session is None and not isinstance(target, Connection):
            hint = ""
            if _is_async_connection(target):
                hint = "; for an AsyncConnection: await bus.publish_async(connection, ...)"
            raise TypeError(
                f"cannot publish on {shown(target)}: give a Session, an AsyncSession, a scoped "
                f"session of either, or a Connection{hint}"
            )
        new = self._new(type, payload, key, id, headers, delay, available_at)
        if session is not None:
            self._hook.publish(session, lambda: new)
        else:
            publish_on_connection(self._tables, cast(Connection, target), [new])
        return new.event

    async def publish_async(
        self,
        connection: AsyncConnection,
        type: str,
        payload: Any,
        *,
        key: str | None = None,
        id: UUID | str | None = None,
        headers: Mapping[str, str] | None = None,
        delay: timedelta | float | None = None,
        available_at: datetime | None = None,
    ) -> Event:
        """:meth:`publish` for a Core ``AsyncConnection``, which is written to at once."""
        if not _is_async_connection(connection):
            raise TypeError(
                f"publish_async() is for an AsyncConnection, not {shown(connection)}; publish() "
                "takes everything else, an AsyncSession included"
            )
        new = self._new(type, payload, key, id, headers, delay, available_at)
        await connection.run_sync(lambda sync: publish_on_connection(self._tables, sync, [new]))
        return new.event

    def record(
        self,
        instance: object,
        type: str,
        payload: Any,
        *,
        key: str | Callable[[Any], str | None] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Publish an event about the mapped object *instance*, on the session that it is in.

        *payload* and *key* may be functions of the object. They are called when the flush has
        given a new object its primary key; what is wrong with their results is raised there, and so
        it is if the object was taken out of the session and gets no key.
        """
        record(
            self._hook,
            lambda data, key: self._new(type, data, key, headers=headers),
            instance,
            payload,
            key,
        )

    def record_changes(
        self,
        *,
        insert: str | None = None,
        update: str | None = None,
        delete: str | None = None,
        payload: Callable[[Any], Any],
        key: Callable[[Any], str | None] | None = None,
    ) -> Callable[[C], C]:
        """Publish an event for each object of the decorated mapped class that a flush writes.

        *insert*, *update* and *delete* are the event types; what is not named is not published.
        *payload* and *key* are functions of the object, called at the end of the flush (for a
        delete, just before). An update counts if a column has changed. Bulk operations and Core
        statements do not go through the objects, and publish nothing.
        """
        return Changes.of(
            self._hook,
            self._new,
            {"after_insert": insert, "after_update": update, "before_delete": delete},
            payload,
            key,
        )

    def _new(
        self,
        type: str,
        payload: Any,
        key: str | None,
        id: UUID | str | None = None,
        headers: Mapping[str, str] | None = None,
        delay: timedelta | float | None = None,
        available_at: datetime | None = None,
    ) -> NewEvent:
        type = codec.check_type(type)
        key = codec.check_key(key)
        handlers: Sequence[str] = self._routes.get(type, ())
        if not handlers and self._unrouted == "error":
            raise UnroutedEventError(type)
        if id is None:
            event_id, original = codec.new_event_id(), None
        else:
            event_id, original = codec.event_id(id)
        wait = moment = None
        if delay is not None:
            if available_at is not None:
                raise InvalidEventError("delay", "give either a delay or available_at, not both")
            wait = codec.check_delay(delay)
        if available_at is not None:
            moment = codec.check_moment(available_at)
        event = Event(
            event_id,
            type,
            codec.encode_payload(payload),
            key,
            codec.encode_headers(headers, original),
        )
        passing = [
            name
            for name in handlers
            if name in self._handlers and self._handlers[name].on_delayed == "skip"
        ]
        return NewEvent(event, handlers, wait, id is not None, moment, passing)


def _is_async_connection(target: object) -> bool:
    asyncio = sys.modules.get("sqlalchemy.ext.asyncio")
    return asyncio is not None and isinstance(target, asyncio.AsyncConnection)
