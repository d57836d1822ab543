"""The publisher's side of a wake-up: tell workers, after the commit, that there is something new.

A hint and nothing more: whatever goes wrong here costs the time until a worker's next look, never
an event. It is not sent inside the publishing transaction, where every commit would queue for one
server-wide lock until it is flushed (eight publishers lost 59% by it), but from a thread of its
own, one for all that was committed within :data:`WINDOW`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from .stores import store_for
from .tables import Tables

log = logging.getLogger("sqlalchemy_relaybus.notify")

#: Commits within this time share one notification, seconds.
WINDOW = 0.005
#: Without anything to say for this long, the thread gives its connection back and ends, seconds.
IDLE = 1.0


class Waker:
    """Sends the hints of one bus. Holds a thread and a connection only while there is traffic."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._changed = threading.Condition()
        self._pending: set[Engine] = set()
        self._thread: threading.Thread | None = None
        self._tasks: dict[Engine, asyncio.Task[None]] = {}

    def wake(self, engine: Engine) -> None:
        """Something was committed through *engine*. Returns at once."""
        if engine.dialect.is_async:
            self._wake_in_loop(engine)
            return
        with self._changed:
            self._pending.add(engine)
            # after a fork the thread is only the parent's, and counts as ended here
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, name="relaybus-notify", daemon=True
                )
                self._thread.start()
            else:
                self._changed.notify()

    def _wake_in_loop(self, engine: Engine) -> None:
        """Connections of an async engine belong to the event loop that the commit ran in."""
        with contextlib.suppress(RuntimeError):  # no loop runs here: workers find it by polling
            loop = asyncio.get_running_loop()
            if engine not in self._tasks:
                task = loop.create_task(self._notify_in_loop(engine))
                self._tasks[engine] = task
                task.add_done_callback(lambda done: self._forget(engine, done))

    def _forget(self, engine: Engine, task: asyncio.Task[None]) -> None:
        if self._tasks.get(engine) is task:
            del self._tasks[engine]

    async def _notify_in_loop(self, engine: Engine) -> None:
        # the application has imported both
        from sqlalchemy.ext.asyncio import AsyncEngine
        from sqlalchemy.util import greenlet_spawn

        pool = engine.pool
        await asyncio.sleep(WINDOW)
        if engine.pool is not pool:
            return  # disposed of meanwhile: nobody would close what is opened from here on
        # what is committed from here on needs a notification of its own
        self._tasks.pop(engine, None)
        try:
            async with AsyncEngine(engine).connect() as connection:
                await connection.execution_options(isolation_level="AUTOCOMMIT")
                await connection.run_sync(store_for(engine.dialect.name, self._tables).notify)
                if engine.pool is not pool:
                    await connection.invalidate()
        except SQLAlchemyError as error:
            log.debug("no wake-up was sent (%s); workers find the event by polling", error)
        finally:
            if engine.pool is not pool:  # disposed of while the connection was on its way back
                await greenlet_spawn(pool.dispose)

    def _run(self) -> None:
        connections: dict[Engine, Connection] = {}
        try:
            while engines := self._next():
                for engine in engines:
                    self._notify(engine, connections)
        finally:
            for connection in connections.values():
                connection.close()

    def _next(self) -> set[Engine]:
        """Engines with something to say, none once it has been quiet; then the thread is over."""
        with self._changed:
            if not self._pending:
                self._changed.wait(IDLE)
            if not self._pending:
                self._thread = None
                return set()
        time.sleep(WINDOW)
        with self._changed:
            engines, self._pending = self._pending, set()
        return engines

    def _notify(self, engine: Engine, connections: dict[Engine, Connection]) -> None:
        try:
            if engine not in connections:
                connections[engine] = engine.connect().execution_options(
                    isolation_level="AUTOCOMMIT"
                )
                # it is held for long, and no place in the application's pool is ours
                connections[engine].detach()
            store_for(engine.dialect.name, self._tables).notify(connections[engine])
        except SQLAlchemyError as error:
            log.debug("no wake-up was sent (%s); workers find the event by polling", error)
            if (broken := connections.pop(engine, None)) is not None:
                broken.invalidate()
                broken.close()
