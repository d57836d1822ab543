"""One worker: its threads, its connections, its start and its stop."""

from __future__ import annotations

import logging
import threading
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from sqlalchemy import Engine
from sqlalchemy.pool import Pool, QueuePool

from ..bus import RelayBus
from ..exc import ConfigurationError, as_seconds
from ..schema import check_schema
from ..settings import Settings
from ..stores import store_for
from .pump import Pump
from .transaction import Transactions, makes_async_sessions
from .wake import Listener

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

log = logging.getLogger("sqlalchemy_relaybus.worker")


class Worker:
    """Runs a bus's handlers for the events in a database.

    *engine* is a synchronous engine on the bus's database. Its pool serves the transactional
    handlers, one connection for each that runs; the worker itself opens up to three more, in a
    pool of its own that is made as the engine's was. *async_engine*, on the same database, serves
    transactional coroutines that have no session factory; it may be the application's, since the
    worker takes its own connections as that one would. (Coroutines run in an event loop of the
    worker's. A *session factory* of the application's makes sessions on connections that belong to
    the loop of whoever uses them first: give an embedded worker one of its own.) *settings* are
    those of :class:`~sqlalchemy_relaybus.settings.Settings`, by name.
    """

    def __init__(
        self,
        bus: RelayBus,
        engine: Engine,
        settings: Settings | None = None,
        *,
        async_engine: AsyncEngine | None = None,
        **overrides: Any,
    ) -> None:
        if not bus.handlers:
            raise ConfigurationError(
                "the bus has no handlers, so a worker has nothing to do; import the modules that "
                "register them before"
            )
        if not isinstance(engine, Engine):
            raise TypeError(
                f"a worker needs a synchronous Engine, not {engine!r}; an AsyncEngine is given "
                "beside it, as async_engine="
            )
        if async_engine is None:
            _refuse_missing_engine(bus)
        if settings is not None and overrides:
            raise ConfigurationError("give either settings or single ones by name, not both")
        self._bus = bus
        self._ran = False
        self._engine = engine
        self._settings = settings if settings is not None else Settings.from_env({}, **overrides)
        self._store = store_for(engine.dialect.name, bus.tables)
        #: tells this worker's leases from those of any other, also of one with the same owner name
        self._holder = uuid4()
        # Connections of its own: handlers that use up the pool must not cost the worker its lanes,
        # and what the pump sets on its connections must not meet the application's statements.
        self._own = Engine(_pool_like(engine.pool), engine.dialect, engine.url)
        if async_engine is not None:
            async_engine = _engine_like(async_engine)
        #: reentrant, as a signal handler needs it
        self._stops: SimpleQueue[float | None] = SimpleQueue()
        transactions = Transactions(
            engine,
            async_engine,
            self._store,
            bus.tables,
            self._holder,
            bus.session_factory,
            self._settings.pool_size,
        )
        self._pump = Pump(
            self._own,
            self._store,
            self._holder,
            bus.handlers,
            self._settings,
            transactions,
            lambda connection: check_schema(connection, bus.tables),
        )

    def run(self) -> bool:
        """Work until :meth:`stop`; whether everything that had started has ended by then.

        Raises a :class:`SchemaError` if the database's tables do not fit, at the start or later.
        """
        if self._ran:
            raise RuntimeError("a worker runs once; make another one")
        self._ran = True
        with self._engine.connect() as connection:
            check_schema(connection, self._bus.tables)
        listener = Listener(self._own, self._store, self._pump.hint)
        threading.Thread(target=self._await_stop, name="relaybus-stop", daemon=True).start()
        if self._settings.listen:
            listener.start()
        log.info("worker %s runs %s", self._settings.owner, ", ".join(sorted(self._bus.handlers)))
        try:
            return self._pump.run()
        finally:
            listener.stop()
            self._stops.put(None)
            self._pump.close()
            self._own.dispose()

    def stop(self, grace: timedelta | float | None = None) -> None:
        """Ask :meth:`run` to end; from any thread, or a signal handler. Does not wait.

        Nothing more is claimed or started. What runs gets *grace* seconds (default: the setting),
        then coroutines are cancelled; whatever has not ended is given back and delivered again.

        Raises :class:`ConfigurationError`, stopping nothing, for a *grace* that is none.
        """
        if grace is not None:
            try:
                grace = as_seconds(grace)
            except ValueError as error:
                raise ConfigurationError(f"stop(): grace {error}") from None
        # A signal handler must neither wait for locks nor start threads: it may have interrupted
        # whoever holds them.
        self._stops.put(self._settings.grace if grace is None else grace)

    def _await_stop(self) -> None:
        grace = self._stops.get()
        if grace is not None:
            self._pump.stop(grace)


def needs_async_engine(bus: RelayBus) -> str | None:
    """The name of a transactional coroutine that has no session factory, if there is one."""
    if makes_async_sessions(bus.session_factory):
        return None
    for handler in bus.handlers.values():
        if handler.injection.session_kind == "async_session" and handler.session_factory is None:
            return handler.name
    return None


def _refuse_missing_engine(bus: RelayBus) -> None:
    if name := needs_async_engine(bus):
        raise ConfigurationError(
            f"handler {name!r} takes an AsyncSession: give Worker(async_engine=...), or the "
            "handler or the bus session_factory=async_sessionmaker(...)"
        )


def _engine_like(engine: AsyncEngine) -> AsyncEngine:
    """An engine that connects as *engine* does, for another event loop."""
    sync = engine.sync_engine
    own = Engine(sync.pool.recreate(), sync.dialect, sync.url)
    return type(engine)(own.execution_options(**sync.get_execution_options()))


def _pool_like(pool: Pool) -> Pool:
    """A pool that connects as *pool* does, with room for the worker's connections."""
    own = pool.recreate()
    if isinstance(own, QueuePool):
        own._max_overflow = -1  # the application may have chosen a size below what is needed here
    return own
