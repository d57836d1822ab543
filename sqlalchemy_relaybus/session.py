"""From ``publish()`` to rows: events wait in the session and are inserted when it flushes.

An event waits as an instance of a mapped class of our own, so the session treats it as it treats
any pending object: it makes the session dirty, so that a commit with nothing else to write still
flushes; a savepoint that is rolled back takes it along. Its table does not exist: the hook takes
the instances out before the flush looks at them and writes the events with Core statements.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

from sqlalchemy import Column, Connection, Engine, Integer, MetaData, Table, event, inspect
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.orm import (
    InstanceState,
    Session,
    SessionTransaction,
    UOWTransaction,
    registry,
    scoped_session,
    sessionmaker,
)

from .exc import ConfigurationError
from .notify import Waker
from .stores import store_for
from .stores.base import NewEvent
from .tables import Tables

_order = itertools.count()
_mapping = threading.Lock()


class Pending:
    """An event that waits in a session for the flush.

    ``new`` is made when it is written: where it needs the primary key of an object that the same
    flush inserts (``after`` is that object), only then.
    """

    def __init__(
        self, hook: SessionHook, new: Callable[[], NewEvent], after: object | None = None
    ) -> None:
        self.hook = hook
        self.new = new
        self.after = after
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
                event.listen(Pending, "before_insert", _refuse_left_over)


def _refuse_left_over(mapper: object, connection: object, pending: Pending) -> None:
    """In a flush that should write an event as any other object: its bus's hook is not there."""
    raise ConfigurationError(
        "an event waits in a session that its bus has been detached from, or was moved to another "
        "session; flush before you detach, and publish on the session that commits"
    )


def _renew_listeners(owner: type[Session] | Session, name: str) -> None:
    """Make way for a change to the session's own listeners while SQLAlchemy goes through them.

    It does where one of them, of the application, is the first to publish on the session; the
    commit that called it would fail after the fact. What it goes through is left as it is.
    """
    if isinstance(owner, Session):
        its_own = getattr(owner.dispatch, name)
        if its_own.listeners:
            its_own.listeners = its_own.listeners.copy()


class SessionHook:
    """One bus's hook on sessions. Two buses on one session each take only their own events."""

    def __init__(self, tables: Tables, waker: Waker | None) -> None:
        self._tables = tables
        self._waker = waker
        #: the flush that a session was last seen to begin
        self._flushes: weakref.WeakKeyDictionary[Session, weakref.ref[UOWTransaction]] = (
            weakref.WeakKeyDictionary()
        )
        #: sessions whose flush is at its statements, and the events that wait for their end
        self._deferred: weakref.WeakKeyDictionary[Session, list[Pending]] = (
            weakref.WeakKeyDictionary()
        )
        #: sessions at the end of a flush, behind our own hook there: nothing can wait for it more
        self._flushed: weakref.WeakSet[Session] = weakref.WeakSet()
        #: Attached classes, kept alive: SQLAlchemy knows listeners by the id of their class, and
        #: takes a new class at the address of one that is gone for attached already.
        self._classes: set[type[Session]] = set()
        #: sessions that wrote events in their present transaction, and through which engine
        self._written: weakref.WeakKeyDictionary[Session, Engine] = weakref.WeakKeyDictionary()
        #: the sync session class that each attached async_sessionmaker was given
        self._private: weakref.WeakKeyDictionary[Any, type[Session]] = weakref.WeakKeyDictionary()
        self._listeners: tuple[tuple[str, Callable[..., None]], ...] = (
            ("before_flush", self._before_flush),
            ("after_transaction_create", self._after_transaction_create),
            ("after_flush", self._after_flush),
            ("after_flush_postexec", self._after_flush_postexec),
            ("after_soft_rollback", self._after_soft_rollback),
            ("after_transaction_end", self._after_transaction_end),
        )
        if waker is not None:
            self._listeners += (("after_commit", self._after_commit),)

    # -- attaching -----------------------------------------------------------------------------

    def attach(self, target: Any) -> None:
        owner = self._owner(target)
        if isinstance(owner, type):
            if owner in self._classes:
                return
            self._classes.add(owner)
        for name, listener in self._listeners:
            if not event.contains(owner, name, listener):
                _renew_listeners(owner, name)
                event.listen(owner, name, listener)

    def detach(self, target: Any) -> None:
        owner = self._owner(target)
        if isinstance(owner, type):
            self._classes.discard(owner)
        for name, listener in self._listeners:
            if event.contains(owner, name, listener):
                _renew_listeners(owner, name)
                event.remove(owner, name, listener)

    def _owner(self, target: Any) -> type[Session] | Session:
        """What SQLAlchemy listens on for *target*."""
        asyncio = sys.modules.get("sqlalchemy.ext.asyncio")
        factories: tuple[type[Any], ...] = (scoped_session,)
        if asyncio is not None:
            factories += (asyncio.async_scoped_session,)
        if isinstance(target, factories):
            target = target.session_factory
        if isinstance(target, sessionmaker):
            return cast(type[Session], target.class_)
        if isinstance(target, Session) or (
            isinstance(target, type) and issubclass(target, Session)
        ):
            return target
        if asyncio is not None:
            if isinstance(target, asyncio.async_sessionmaker):
                return self._sync_class(target)
            if isinstance(target, asyncio.AsyncSession):
                return cast(Session, target.sync_session)
        raise ConfigurationError(
            f"cannot attach to {target!r}: give a sessionmaker or async_sessionmaker, a scoped "
            "session over one, a Session class or a session"
        )

    def _sync_class(self, maker: Any) -> type[Session]:
        """A class of the maker's own for its sync sessions.

        The one that they have by default is the ``Session`` of the whole process.
        """
        try:
            return self._private[maker]
        except KeyError:
            base = maker.kw.get("sync_session_class") or maker.class_.sync_session_class
            private = type(base.__name__, (base,), {"__module__": base.__module__})
            maker.configure(sync_session_class=private)
            self._private[maker] = private
            return private

    # -- publishing ----------------------------------------------------------------------------

    def publish(
        self, session: Session, new: Callable[[], NewEvent], after: object | None = None
    ) -> None:
        """Queue an event on *session*; *after*: an object whose primary key it needs."""
        _map_pending()
        pending = Pending(self, new, after)
        if not session._flushing:
            self._ensure(session)
            session.add(pending)
        elif not self._attached(session):
            # by a flush hook of the application, which cannot be joined by ours now
            if lacks_key(after):
                raise ConfigurationError(
                    f"{after!r} has no primary key yet, and its session is in a flush that it was "
                    "not attached for; attach the session or its sessionmaker when it is made"
                )
            self.write(session, [new()])
        elif session not in self._deferred:
            self._release(session, [*self._take(session), pending])
        elif self._deferred[session] or after in session.new:
            self._deferred[session].append(pending)
        else:
            self.write(session, [new()])

    def defer(self, session: Session, new: Callable[[], NewEvent]) -> None:
        """From within a flush of *session*: write an event at its end."""
        _map_pending()
        self._ensure(session)
        self._deferred.setdefault(session, []).append(Pending(self, new))

    def _ensure(self, session: Session) -> None:
        if self._classes.isdisjoint(type(session).__mro__):
            self.attach(session)

    def _attached(self, session: Session) -> bool:
        return not self._classes.isdisjoint(type(session).__mro__) or event.contains(
            session, "before_flush", self._before_flush
        )

    def _before_flush(
        self, session: Session, flush_context: UOWTransaction, instances: object
    ) -> None:
        self._flushes[session] = weakref.ref(flush_context)
        self._release(session, self._take(session))

    def _take(self, session: Session) -> list[Pending]:
        """Take what waits in *session* out of it, in the order in which it was published."""
        mine = self._waiting(session)
        for each in mine:
            session.expunge(each)
        return mine

    def _waiting(self, session: Session) -> list[Pending]:
        mine = [each for each in session.new if type(each) is Pending and each.hook is self]
        return sorted(mine, key=lambda each: each.order)

    def _release(self, session: Session, events: Sequence[Pending]) -> None:
        """Write *events* now; if one of them must wait for its object's key, they all wait.

        They do so in the session: should a hook of the application refuse the flush, or leave it
        nothing else to write, they are still there and keep the session dirty.
        """
        new, flushed = session.new, session in self._flushed
        if any(each.after in new and (not flushed or lacks_key(each.after)) for each in events):
            session.add_all(events)
        elif events:
            self.write(session, [each.new() for each in events])

    def _after_transaction_create(self, session: Session, transaction: SessionTransaction) -> None:
        """At the beginning of a flush's statements: what it would write is settled by then.

        Hooks of the application cannot refuse it any more, and it comes to ``after_flush`` or
        fails. The events leave it here. It saves nothing of their class, not even the lack of any,
        for which it would ask the session for a connection to that class's table.
        """
        flush = self._flushes.get(session, lambda: None)()
        if flush is None or not flush.has_work:
            return  # some other transaction
        del self._flushes[session]
        deferred = self._deferred.setdefault(session, [])
        for each in self._waiting(session):
            if flush.states.pop(inspect(each), None):  # not of a flush of chosen objects
                session.expunge(each)
                deferred.append(each)
        for action in flush.postsort_actions.values():
            if deferred and getattr(action, "mapper", None) is inspect(Pending):
                action.disabled = True

    def _after_flush(self, session: Session, flush_context: UOWTransaction) -> None:
        self._flushed.add(session)
        self._release(session, self._deferred.pop(session, ()))

    def _after_flush_postexec(self, session: Session, flush_context: UOWTransaction) -> None:
        self._flushed.discard(session)

    def _after_soft_rollback(self, session: Session, previous: SessionTransaction) -> None:
        self._forget(session)  # of a flush that failed

    def _after_transaction_end(self, session: Session, transaction: SessionTransaction) -> None:
        # The only one that fires for a session closed with a flush behind it that a hook of the
        # application refused; what was published belongs to the transaction that is over.
        if transaction.parent is None:
            self._forget(session)
            self._written.pop(session, None)

    def _forget(self, session: Session) -> None:
        self._deferred.pop(session, None)
        self._flushed.discard(session)

    def write(self, session: Session, events: Sequence[NewEvent]) -> None:
        """Insert *events* now, in the session's transaction on the database of our tables."""
        try:
            connection = session.connection(bind_arguments={"clause": self._tables.events})
        except UnboundExecutionError as error:
            raise ConfigurationError(
                "the session is bound to no engine for the bus's tables; bind one in general, or "
                "these tables: Session(binds={bus.tables.events: engine, ...})"
            ) from error
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


def lacks_key(instance: object) -> bool:
    """Whether *instance* is new and has no primary key yet: another flush will give it one."""
    state = inspect(instance, raiseerr=False) if instance is not None else None
    return (
        isinstance(state, InstanceState)
        and state.key is None
        and None in state.mapper.primary_key_from_instance(instance)
    )


def session_of(target: object) -> Session | None:
    """The ``Session`` behind *target*: itself, or what a scoped or async one stands for."""
    if isinstance(target, Session):
        return target
    if isinstance(target, scoped_session):
        return session_of(target())
    asyncio = sys.modules.get("sqlalchemy.ext.asyncio")
    if asyncio is not None:
        if isinstance(target, asyncio.AsyncSession):
            return target.sync_session  # type: ignore[no-any-return]
        if isinstance(target, asyncio.async_scoped_session):
            return session_of(target())
    return None


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
