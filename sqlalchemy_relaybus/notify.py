"""The publisher's side of a wake-up: tell workers, after the commit, that there is something new.

A hint and nothing more: whatever goes wrong here costs the time until a worker's next look, never
an event. It is not sent inside the publishing transaction, where every commit would queue for one
server-wide lock until it is flushed (eight publishers lost 59% by it), but from a thread of its
own, one for all that was committed within :data:`WINDOW`.
"""

from __future__ import annotations

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

    def wake(self, engine: Engine) -> None:
        """Something was committed through *engine*. Returns at once."""
        if engine.dialect.is_async:
            return  # its connections belong to an event loop; workers find the event by polling
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
            store_for(engine.dialect.name, self._tables).notify(connections[engine])
        except SQLAlchemyError as error:
            log.debug("no wake-up was sent (%s); workers find the event by polling", error)
            if (broken := connections.pop(engine, None)) is not None:
                broken.invalidate()
                broken.close()
