"""``python -m sqlalchemy_relaybus.worker``: one worker process.

==== ============================================================================
code meaning
==== ============================================================================
0    stopped by a signal; every handler that had started has ended
1    failed: the database, its URL, the schema or the application
2    used wrongly: an unknown option, a value of the wrong form, a missing one
3    stopped by a signal, but handlers did not end within the grace
128+ ended at once by a second signal, or by one before the worker ran: 128 + its number
==== ============================================================================
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import threading
import time
from queue import SimpleQueue
from types import FrameType
from typing import Any

import click
from sqlalchemy.engine import make_url

from ..bus import RelayBus
from ..cli.errors import ErrorCommand
from ..engine import open_engine
from ..exc import ConfigurationError
from ..settings import Settings, click_options
from . import Worker, needs_async_engine

EXIT_LEFT_BEHIND = 3
#: Seconds beyond the grace after which a worker that hangs is ended.
_LATE = 1.0


class Signals:
    """The first SIGTERM or SIGINT stops the worker in order, the second ends the process."""

    def __init__(self) -> None:
        self.worker: Worker | None = None
        self._received = False
        #: reentrant, as a signal handler needs it
        self._stops: SimpleQueue[None] = SimpleQueue()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._received or self.worker is None:
            os._exit(128 + number)
        self._received = True
        self._stops.put(None)
        self.worker.stop()

    def serve(self, worker: Worker, grace: float) -> None:
        """From now on signals are for *worker*, which gets *grace* seconds to stop."""
        threading.Thread(target=self._end_late, args=(grace,), daemon=True).start()
        self.worker = worker

    def _end_late(self, grace: float) -> None:
        # A statement or a connection attempt may hang in a dead network for longer than that.
        self._stops.get()
        time.sleep(grace + _LATE)
        os.write(2, b"the worker does not end within its grace: leases run out by themselves\n")
        os._exit(EXIT_LEFT_BEHIND)


def load(app: str) -> RelayBus:
    """The bus that *app* (``module:attribute``) names."""
    module_name, colon, attribute = app.partition(":")
    if not colon or not all(
        part.isidentifier() for part in (*module_name.split("."), *attribute.split("."))
    ):
        raise ConfigurationError(
            f"--app is {app!r}; it names a module and a bus in it, as in 'shop.bus:bus'"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name == missing or module_name.startswith(missing + "."):
            raise ConfigurationError(
                f"--app: there is no module {missing!r} in {os.getcwd()} or on the import path"
            ) from error
        raise
    for name in attribute.split("."):
        try:
            target = getattr(target, name)
        except AttributeError:
            raise ConfigurationError(
                f"--app: the module {module_name!r} has no {attribute!r}"
            ) from None
    if not isinstance(target, RelayBus):
        raise ConfigurationError(
            f"--app: {app!r} is of type {type(target).__name__}, not a RelayBus"
        )
    return target


def _migrate(url: str, bus: RelayBus) -> None:
    from alembic_relaybus import migrate  # Alembic is needed for this only

    engine = open_engine(url)
    try:
        migrate(engine, schema=bus.tables.schema, prefix=bus.tables.prefix)
    finally:
        engine.dispose()


@click.command(cls=ErrorCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--app", envvar="RELAYBUS_APP", required=True, help="The bus, as 'shop.bus:bus'.")
@click.option(
    "--url",
    envvar="RELAYBUS_URL",
    required=True,
    help="The database, as 'postgresql+psycopg://user@host/database'.",
)
@click.option(
    "--log-level",
    envvar="RELAYBUS_LOG_LEVEL",
    type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
    default="info",
    show_default=True,
    help="What to log.",
)
@click_options()
def main(app: str, url: str, log_level: str, **values: Any) -> None:
    """Run the handlers of a bus for the events in a database, until a signal comes."""
    signals = Signals()
    logging.basicConfig(
        level=log_level.upper(),
        format="%(asctime)s %(levelname)-7s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    settings = Settings.from_env({}, **values)
    make_url(url)  # before the application is imported
    bus = load(app)
    if settings.setup:
        _migrate(url, bus)
    # as many again for transactions whose handlers ran out of time and have not returned
    engine = open_engine(
        url, pool_size=settings.pool_size, max_overflow=settings.pool_size, pool_pre_ping=True
    )
    async_engine = None
    if needs_async_engine(bus):
        from sqlalchemy.ext.asyncio import create_async_engine  # for these handlers only

        async_engine = create_async_engine(
            engine.url, pool_size=settings.pool_size, pool_pre_ping=True
        )
    worker = Worker(bus, engine, settings, async_engine=async_engine)
    signals.serve(worker, settings.grace)
    try:
        code = 0 if worker.run() else EXIT_LEFT_BEHIND
    except BaseException:
        engine.dispose()
        raise
    logging.getLogger("sqlalchemy_relaybus.worker").info("worker %s stopped", settings.owner)
    logging.shutdown()
    if threading.active_count() > 1:
        # threads of handlers that never return, or that a handler left, must not keep it alive
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    engine.dispose()
    sys.exit(code)


if __name__ == "__main__":
    main()
