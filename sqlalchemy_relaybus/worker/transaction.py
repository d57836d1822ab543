"""Running a transactional handler: its writes and its completion commit together."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import TYPE_CHECKING, Any, NoReturn
from uuid import UUID

from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from ..event import Context
from ..exc import ConfigurationError, LostLeaseError, RelayBusError
from ..router import Handler
from ..stores.base import Delivery, Store
from ..tables import Tables

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine


class TransactionEndedError(RelayBusError):
    """A transactional handler committed or rolled back the transaction it was given."""

    def __init__(self, handler: str) -> None:
        self.handler = handler
        super().__init__(
            f"handler {handler!r} ended the transaction that its delivery completes in; leave "
            "commit and rollback to the worker, and use begin_nested() for a part that may fail"
        )


#: A statement that ends a transaction, other than ``ROLLBACK TO`` a savepoint.
_ENDING = re.compile(
    r"(?:\s|--[^\n]*\n|/\*.*?\*/)*"
    r"(?:commit|end|abort|prepare\s+transaction"
    r"|rollback(?!\s+(?:(?:work|transaction)\s+)?to\b))\b",
    re.IGNORECASE | re.DOTALL,
)
#: Where a semicolon ends no statement: literals, quoted names, comments, the bodies of functions.
_QUOTED = re.compile(
    r"\be'(?:[^'\\]|\\.)*'|'[^']*'|\"[^\"]*\"|\$(\w*)\$.*?\$\1\$|--[^\n]*|/\*.*?\*/"
    r"|\bbegin\s+atomic\b.*?\bend\b",
    re.IGNORECASE | re.DOTALL,
)


def _ends_transaction(text: str) -> bool:
    """Whether one of the statements in *text* ends the transaction."""
    if ";" not in text:
        return _ENDING.match(text) is not None
    return any(map(_ENDING.match, _QUOTED.sub(" ", text).split(";")))


class _KeepOpen:
    """Refuses a handler's own commit before it happens, also where the handler hides the error.

    However it is meant to end: by the session, by the connection below it, or by a statement.
    """

    def __init__(self, handler: str, store: Store) -> None:
        self._handler = handler
        self._store = store
        self._watching = False
        self._ended = False
        #: those that were in a transaction after a statement
        self._used: set[Connection] = set()

    @contextmanager
    def watch(self, target: Session | Connection) -> Iterator[None]:
        """For the length of the block *target* cannot be committed; savepoints can."""
        self._watching = True
        if isinstance(target, Connection):
            self._guard(target)
        else:
            event.listen(target, "before_commit", self._before_commit)
            event.listen(target, "after_begin", self._after_begin)
        try:
            yield
        finally:
            self._watching = False  # the listeners of a connection end with it
            if isinstance(target, Session):
                event.remove(target, "before_commit", self._before_commit)
                event.remove(target, "after_begin", self._after_begin)

    def check(self, still_open: bool) -> None:
        """Raise if the transaction was ended, or was to be."""
        if self._ended or not still_open:
            raise TransactionEndedError(self._handler)
        # ended behind the back of SQLAlchemy, as by the driver's connection
        if not all(map(self._store.in_transaction, self._used)):
            raise TransactionEndedError(self._handler)

    def _refuse(self) -> NoReturn:
        self._ended = True
        raise TransactionEndedError(self._handler)

    def _before_commit(self, session: Session) -> None:
        if not session.in_nested_transaction():
            self._refuse()

    def _after_begin(self, session: Session, transaction: object, connection: Connection) -> None:
        self._guard(connection)

    def _guard(self, connection: Connection) -> None:
        event.listen(connection, "commit", self._commit)
        event.listen(connection, "before_cursor_execute", self._before_cursor_execute)
        event.listen(connection, "after_cursor_execute", self._after_cursor_execute)

    def _commit(self, connection: Connection) -> None:
        if self._watching:
            # an error from here makes SQLAlchemy take it for ended and roll back no more
            connection.dialect.do_rollback(connection.connection)
            self._refuse()

    def _before_cursor_execute(
        self, connection: Connection, cursor: object, statement: str, *rest: object
    ) -> None:
        if self._watching:
            # with this one the driver would begin another transaction
            ended = connection in self._used and not self._store.in_transaction(connection)
            if ended or _ends_transaction(statement):
                self._refuse()

    def _after_cursor_execute(self, connection: Connection, *rest: object) -> None:
        if self._watching and self._store.in_transaction(connection):
            self._used.add(connection)


class Transactions:
    """The transactions that deliveries complete in.

    *session_factory* and *async_session_factory* make the sessions of handlers that name none of
    their own; without one, theirs are on *engine* and *async_engine*. At most *size* coroutines
    have a transaction at a time; for plain functions their threads see to that.
    """

    def __init__(
        self,
        engine: Engine,
        async_engine: AsyncEngine | None,
        store: Store,
        tables: Tables,
        holder: UUID,
        session_factory: Callable[..., Any] | None,
        size: int,
    ) -> None:
        self._engine = engine
        self._async_engine = async_engine
        self._store = store
        self._tables = tables
        self._holder = holder
        is_async = makes_async_sessions(session_factory)
        self._session_factory = None if is_async else session_factory
        self._async_session_factory = session_factory if is_async else None
        self._size = size
        self._room: asyncio.Semaphore | None = None
        self._used: set[Engine] = set()

    def run(self, handler: Handler, delivery: Delivery, context: Context) -> None:
        """Call *handler* and commit; raises what it raises, having rolled back."""
        keep = _KeepOpen(handler.name, self._store)
        if handler.injection.session_kind == "connection":
            with self._engine.connect() as connection, connection.begin() as begun:
                _refuse_autocommit(handler, connection)
                with keep.watch(connection):
                    check_result(handler, self._invoke(handler, delivery, context, connection))
                    keep.check(connection.get_transaction() is begun and begun.is_active)
                self._complete(connection, delivery)
            return
        factory = handler.session_factory or self._session_factory
        if factory is not None:
            session = factory()
        else:
            session = (handler.injection.session_class or Session)(self._engine)
        with session, session.begin() as transaction:
            self._refuse_autocommit_engine(handler, session)
            with keep.watch(session):
                check_result(handler, self._invoke(handler, delivery, context, session))
                keep.check(session.get_transaction() is transaction and transaction.is_active)
                session.flush()
            self._finish(handler, keep, session, delivery)

    async def run_async(self, handler: Handler, delivery: Delivery, context: Context) -> None:
        """:meth:`run` for a coroutine function, which takes an ``AsyncSession``."""
        if self._room is None:
            self._room = asyncio.Semaphore(self._size)
        keep = _KeepOpen(handler.name, self._store)
        factory = handler.session_factory or self._async_session_factory
        async with self._room:
            if factory is not None:
                session = factory()
            else:
                assert handler.injection.session_class is not None
                session = handler.injection.session_class(self._async_engine)
            async with session, session.begin() as transaction:
                inner = session.sync_session
                self._used.add(self._refuse_autocommit_engine(handler, inner).engine)
                with keep.watch(inner):
                    await self._invoke(handler, delivery, context, session)
                    begun = transaction.sync_transaction
                    keep.check(inner.get_transaction() is begun and begun.is_active)
                    await session.flush()
                await session.run_sync(lambda sync: self._finish(handler, keep, sync, delivery))

    async def close(self) -> None:
        """Close the pooled connections of async engines: they are of no use to another loop."""
        if self._used:
            from sqlalchemy.ext.asyncio import AsyncEngine

            for engine in self._used:
                await AsyncEngine(engine).dispose()

    def _refuse_autocommit_engine(self, handler: Handler, session: Session) -> Engine | Connection:
        bind = session.get_bind(clause=self._tables.deliveries)
        if isinstance(bind, Engine) and _autocommits(bind):
            raise _no_transaction(handler)
        return bind

    def _finish(
        self, handler: Handler, keep: _KeepOpen, session: Session, delivery: Delivery
    ) -> None:
        connection = session.connection(bind_arguments={"clause": self._tables.deliveries})
        # false where the handler ended the transaction of the connection below the session
        keep.check(connection.in_transaction())
        _refuse_autocommit(handler, connection)
        self._complete(connection, delivery)

    def _invoke(self, handler: Handler, delivery: Delivery, context: Context, session: Any) -> Any:
        assert delivery.event is not None
        return handler.injection.invoke(handler.function, delivery.event, context, session)

    def _complete(self, connection: Any, delivery: Delivery) -> None:
        # Last in the transaction: the lane is locked against a takeover until the commit.
        if not self._store.complete(connection, self._holder, delivery):
            raise LostLeaseError(delivery.lane, delivery.id)

    def conflicted(self, error: BaseException) -> bool:
        """Whether *error* says that the transaction met another one, and may succeed after it.

        So do REPEATABLE READ and SERIALIZABLE, in any statement and in the commit. Whether there
        was a takeover does not show in it; what is written about the delivery next is fenced.
        """
        return isinstance(error, DBAPIError) and self._store.conflicted(error)


def makes_async_sessions(factory: object) -> bool:
    """Whether *factory* is one for ``AsyncSession``."""
    module = sys.modules.get("sqlalchemy.ext.asyncio")
    return module is not None and isinstance(
        factory, module.async_sessionmaker | module.async_scoped_session
    )


def _autocommits(engine: Engine) -> bool:
    """Whether the engine's connections are made for AUTOCOMMIT, as far as it tells."""
    level = engine.get_execution_options().get("isolation_level")
    return (level or getattr(engine.dialect, "_on_connect_isolation_level", None)) == "AUTOCOMMIT"


def _refuse_autocommit(handler: Handler, connection: Connection) -> None:
    driver_connection = connection.connection.dbapi_connection
    if driver_connection is not None and connection.dialect.detect_autocommit_setting(
        driver_connection
    ):
        raise _no_transaction(handler)


def _no_transaction(handler: Handler) -> ConfigurationError:
    return ConfigurationError(
        f"handler {handler.name!r} is transactional, but its connection is in AUTOCOMMIT mode, "
        "where a rollback would keep what it wrote; give it an engine with transactions"
    )


def check_result(handler: Handler, result: object) -> None:
    """Refuse what a plain function cannot mean to return: nobody would run it."""
    if isinstance(result, CoroutineType | GeneratorType | AsyncGeneratorType):
        if isinstance(result, CoroutineType):
            result.close()  # or it would be reported as never awaited, far from here
        raise TypeError(
            f"handler {handler.name!r} returned a {type(result).__name__}, which nobody runs; "
            "register the coroutine function itself"
        )
