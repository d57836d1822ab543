"""The command of one worker process, ``python -m sqlalchemy_relaybus.worker``.

==== ==========================================================================================
code meaning
==== ==========================================================================================
0    stopped by a signal; every handler that had started has ended
1    failed: the database cannot be reached or refuses, its tables do not fit this release, or
     importing the application raises
2    used wrongly: an option or variable that is unknown, missing or cannot be used as it is, such
     as a URL or an application; starting it again is of no use until it is changed
3    stopped with handlers that did not end: within the grace after a signal, or so many past
     their time limits that no threads were left for others
128+ ended at once by a second signal, or by one before the worker ran: 128 + its number
==== ==========================================================================================
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import sysconfig
import threading
import time
import traceback
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any

import click
from sqlalchemy import Engine

from ..bus import RelayBus
from ..cli.errors import ErrorCommand
from ..engine import open_engine
from ..exc import ConfigurationError
from ..settings import Settings, click_options
from .worker import Worker, needs_async_engine

log = logging.getLogger("sqlalchemy_relaybus.worker")

EXIT_LEFT_BEHIND = 3
#: Seconds beyond the grace after which a worker that hangs is ended.
_LATE = 1.0
_LIBRARY = str(Path(__file__).parents[1]) + os.sep


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
        os.write(2, b"the worker does not end within its grace and is ended\n")
        os._exit(EXIT_LEFT_BEHIND)


def _app(context: click.Context, parameter: click.Parameter, value: str) -> str:
    module, colon, attribute = value.partition(":")
    if not colon or not all(
        part.isidentifier() for part in (*module.split("."), *attribute.split("."))
    ):
        raise click.BadParameter(
            f"{value!r} does not name a module and a bus in it, as 'shop.bus:bus' does"
        )
    return value


def load(app: str) -> RelayBus:
    """The bus that *app* (``module:attribute``) names.

    :class:`ConfigurationError` where there is none. What the application raises is a failure, not
    wrong usage, and one line too, with the place that it comes from; its traceback is logged for
    debugging.
    """
    module_name, _, attribute = app.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        target: Any = importlib.import_module(module_name)
    except Exception as error:
        missing = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
        if missing and (module_name + ".").startswith(missing + "."):
            raise ConfigurationError(
                f"--app: there is no module {missing!r} in {os.getcwd()} or on the import path"
            ) from error
        log.debug("importing %r failed", module_name, exc_info=True)
        raise click.ClickException(
            f"--app: importing {module_name!r} failed: {type(error).__name__}: "
            f"{' '.join(str(error).split())} ({_origin(error)})"
        ) from error
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


def _origin(error: Exception) -> str:
    """The file and line that *error* comes from: of the application, if its code is involved."""
    if isinstance(error, SyntaxError) and error.filename and error.filename[0] != "<":
        return f"{error.filename}:{error.lineno}"
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith("<")  # of the import system
    ]
    others = (*{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}, _LIBRARY)
    own = [each for each in frames if not each[0].startswith(others)]
    file, line = (own or frames)[-1]
    return f"{file}:{line}"


def _set_up(engine: Engine, bus: RelayBus) -> None:
    from alembic_relaybus import head, migrate  # Alembic is needed for this only

    steps: list[str] = []
    migrate(
        engine,
        schema=bus.tables.schema,
        prefix=bus.tables.prefix,
        report=lambda _, revision: steps.append(revision),
    )
    if steps:
        log.info("setup: the tables were brought to %s", steps[-1])
    else:
        log.info("setup: the tables are at %s already", head())


@click.command(cls=ErrorCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--app",
    envvar="RELAYBUS_APP",
    show_envvar=True,
    required=True,
    callback=_app,
    help="The bus, as 'shop.bus:bus'.",
)
@click.option(
    "--url",
    envvar="RELAYBUS_URL",
    show_envvar=True,
    required=True,
    help="The database, as 'postgresql+psycopg://user@host/database'.",
)
@click.option(
    "--log-level",
    envvar="RELAYBUS_LOG_LEVEL",
    show_envvar=True,
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
    if not log.isEnabledFor(logging.DEBUG):
        logging.getLogger("alembic").setLevel(logging.WARNING)  # it tells every step of its own
    try:
        settings = Settings.from_env({}, **values)
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from error
    # as many again for transactions whose handlers ran out of time and have not returned
    engine = open_engine(
        url, pool_size=settings.pool_size, max_overflow=settings.pool_size, pool_pre_ping=True
    )
    try:
        bus = load(app)
        if settings.setup:
            _set_up(engine, bus)
        async_engine = None
        if needs_async_engine(bus):
            from sqlalchemy.ext.asyncio import create_async_engine  # for these handlers only

            async_engine = create_async_engine(
                engine.url, pool_size=settings.pool_size, pool_pre_ping=True
            )
        worker = Worker(bus, engine, settings, async_engine=async_engine)
        signals.serve(worker, settings.grace)
        code = 0 if worker.run() else EXIT_LEFT_BEHIND
    except BaseException:
        engine.dispose()
        raise
    log.info("worker %s stopped", settings.owner)
    logging.shutdown()
    if threading.active_count() > 1:
        # threads of handlers that never return, or that a handler left, must not keep it alive
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    engine.dispose()
    sys.exit(code)
