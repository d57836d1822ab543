"""Wake-ups: publishers' hints that there is new work. Polling works without them."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable

from sqlalchemy import Engine

from ..stores.base import Store

log = logging.getLogger("sqlalchemy_relaybus.worker")

#: Longest wait between tries to listen again, seconds.
MAX_PAUSE = 5.0


class Listener:
    """A thread that turns the store's notifications into hints."""

    def __init__(self, engine: Engine, store: Store, hint: Callable[[], None]) -> None:
        self._engine = engine
        self._store = store
        self._hint = hint
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relaybus-listen", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end; it does within a second."""
        self._stopped.set()

    def _run(self) -> None:
        failures = 0
        while not self._stopped.is_set():
            began = time.monotonic()
            try:
                with self._engine.connect().execution_options(
                    isolation_level="AUTOCOMMIT"
                ) as connection:
                    if not self._store.can_listen(connection):
                        log.warning("this driver cannot listen: new work is found by polling")
                        return
                    try:
                        for _ in self._store.listen(connection, self._stopped.is_set):
                            self._hint()
                    finally:
                        # it goes on listening: no pool is to hand it to anybody else
                        connection.invalidate()
            except Exception as error:  # noqa: BLE001 - the driver's own come through as well
                failures = 1 if time.monotonic() - began > MAX_PAUSE else failures + 1
                pause = min(MAX_PAUSE, 0.1 * 2 ** min(failures, 10)) * random.uniform(0.5, 1)
                log.info("listening failed (%s); again in %.1f s", error, pause)
                self._stopped.wait(pause)
