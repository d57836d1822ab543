"""From ``publish()`` to rows: events wait in the session and are inserted when it flushes.

An event waits as an instance of a mapped class of our own, so the session treats it as it treats
any pending object: it makes the session dirty, so that a commit with nothing else to write still
flushes; a savepoint that is rolled back takes it along. Its table does not exist: the hook takes
the instances out before the flush looks at them and writes the events with Core statements.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Column, Connection, Engine, Integer, MetaData, Table, event, inspect
from sqlalchemy.orm import Session, UOWTransaction, registry, scoped_session, sessionmaker

from .exc import ConfigurationError
from .notify import Waker
from .stores import store_for
from .stores.base import NewEvent
from .tables import Tables

_order = itertools.count()
_mapping = threading.Lock()


class Pending:
    """An event that waits in a session for the flush."""

    def __init__(self, hook: SessionHook, new: NewEvent) -> None:
        self.hook = hook
        self.new = new
        self.order = next(_order)


def _map_pending() -> None:
    """Map the class, also again after ``clear_mappers()``."""
    if inspect(Pending, raiseerr=False) is None:
        with _mapping:
            if inspect(Pending, raiseerr=False) is None:
                table = Table(
                    "relaybus_pending", MetaData(), Column("n", Integer, primary_key=True)
                )
                registry().map_imperatively(Pending, table)


class SessionHook:
    """One bus's hook on sessions. Two buses on one session each take only their own events."""

    def __init__(self, tables: Tables, waker: Waker | None) -> None:
        self._tables = tables
        self._waker = waker
        self._classes: weakref.WeakSet[type[Session]] = weakref.WeakSet()
        #: sessions that wrote events in their present transaction, and through which engine
        self._written: weakref.WeakKeyDictionary[Session, Engine] = weakref.WeakKeyDictionary()

    @property
    def _listeners(self) -> tuple[tuple[str, Callable[..., None]], ...]:
        listeners: tuple[tuple[str, Callable[..., None]], ...] = (
            ("before_flush", self._before_flush),
        )
        if self._waker is not None:
            listeners += (("after_commit", self._after_commit),)
        return listeners

    def attach(self, target: Any) -> None:
        owner = _owner(target)
        if isinstance(owner, type):
            self._classes.add(owner)
        for name, listener in self._listeners:
            if not event.contains(owner, name, listener):
                event.listen(owner, name, listener)

    def detach(self, target: Any) -> None:
        owner = _owner(target)
        if isinstance(owner, type):
            self._classes.discard(owner)
        for name, listener in self._listeners:
            if event.contains(owner, name, listener):
                event.remove(owner, name, listener)

    def publish(self, session: Session, new: NewEvent) -> None:
        """Queue *new* on *session*."""
        if session._flushing:  # by a flush hook of the application: too late to queue
            self._write(session, [new])
            return
        if self._classes.isdisjoint(type(session).__mro__):
            self.attach(session)
        _map_pending()
        session.add(Pending(self, new))

    def _before_flush(
        self, session: Session, flush_context: UOWTransaction, instances: object
    ) -> None:
        mine = [each for each in session.new if type(each) is Pending and each.hook is self]
        if not mine:
            return
        mine.sort(key=lambda each: each.order)
        for each in mine:
            session.expunge(each)
        # Written here and not after the flush: that event does not fire where the events were all
        # there was to flush.
        self._write(session, [each.new for each in mine])

    def _write(self, session: Session, events: Sequence[NewEvent]) -> None:
        connection = session.connection(bind_arguments={"clause": self._tables.events})
        publish_on_connection(self._tables, connection, events)
        if self._waker is not None:
            self._written[session] = connection.engine

    def _after_commit(self, session: Session) -> None:
        # It fires when a savepoint is released too, and where the transaction around a test's
        # session is rolled back later: then the hint finds nothing.
        if self._waker is None or session.in_nested_transaction():
            return
        engine = self._written.pop(session, None)
        if engine is not None:
            self._waker.wake(engine)


def _owner(target: Any) -> Any:
    """What SQLAlchemy listens on for *target*."""
    if isinstance(target, scoped_session):
        target = target.session_factory
    if isinstance(target, sessionmaker):
        return target.class_
    if isinstance(target, Session) or (isinstance(target, type) and issubclass(target, Session)):
        return target
    raise ConfigurationError(
        f"cannot attach to {target!r}: give a sessionmaker, a scoped_session over one, a Session "
        "class or a Session"
    )


def publish_on_connection(
    tables: Tables, connection: Connection, events: Sequence[NewEvent]
) -> None:
    """Write *events* in the transaction of *connection*."""
    driver_connection = connection.connection.dbapi_connection
    if driver_connection is not None and connection.dialect.detect_autocommit_setting(
        driver_connection
    ):
        raise ConfigurationError(
            "the connection is in AUTOCOMMIT mode, where a rollback would keep the event; publish "
            "on a connection with a transaction"
        )
    store_for(connection.dialect.name, tables).publish(connection, events)
