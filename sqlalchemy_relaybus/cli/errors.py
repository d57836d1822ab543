"""One line for every error that a user of the command line can meet, and its exit code.

==== ============================================================================
code meaning
==== ============================================================================
0    done
1    failed: the database, its URL, the schema, the application or the work itself
2    used wrongly: an unknown command or option, a value of the wrong form, a missing one
130  interrupted
==== ============================================================================

The line goes to the standard error and begins ``relaybus:``. There is no traceback.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

import click
from sqlalchemy import URL, Engine, create_engine, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    NoSuchModuleError,
    SQLAlchemyError,
)

from sqlalchemy_relaybus.exc import ConfigurationError, RelayBusError

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

CONNECT_TIMEOUT = 10
"""Seconds that a command waits for a connection to the database."""

_EXAMPLE = "postgresql+psycopg://user@host/database"


def open_engine(url: str | URL, **options: Any) -> Engine:
    """An engine for *url*; nothing is connected to.

    A URL that begins ``postgresql://`` means psycopg 3, whatever SQLAlchemy's default for it is.
    Raises ``ConfigurationError`` for a URL that cannot be read, an unknown database and a driver
    that is not installed or works with asyncio only.
    """
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        # the URL itself may hold a password
        raise ConfigurationError(
            f"the database URL cannot be read; it has the form {_EXAMPLE}"
        ) from error
    if parsed.drivername in ("postgresql", "postgres"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.get_backend_name() == "postgresql":
        options.setdefault("isolation_level", "READ COMMITTED")
        if "connect_timeout" not in parsed.query:
            options.setdefault("connect_args", {"connect_timeout": CONNECT_TIMEOUT})
    try:
        if parsed.get_dialect().is_async and parsed.get_driver_name() != "psycopg":
            raise ConfigurationError(
                f"the driver of {parsed.drivername!r} works with asyncio only; use a URL such as "
                f"{_EXAMPLE}"
            )
        return create_engine(parsed, **options)
    except NoSuchModuleError as error:
        raise ConfigurationError(
            f"{parsed.drivername!r} is no database that SQLAlchemy knows; use a URL such as "
            f"{_EXAMPLE}"
        ) from error
    except ModuleNotFoundError as error:
        remedy = (
            "pip install 'sqlalchemy-relaybus[postgresql]'"
            if error.name == "psycopg"
            else "install it"
        )
        raise ConfigurationError(
            f"the URL {parsed.drivername!r} needs the driver {error.name!r}: {remedy}"
        ) from error


def describe(error: BaseException) -> str:
    """*error* in one line: what happened and, where it is known, what to do."""
    if isinstance(error, NoSuchModuleError | ArgumentError):
        return f"the database URL cannot be used: {_first_line(error)}"
    if isinstance(error, DBAPIError) and error.orig is not None:
        if getattr(error.orig, "sqlstate", None) is None and error.statement is None:
            return f"the database cannot be reached: {_first_line(error.orig)}"
        return f"the database refused: {_first_line(error.orig)}"
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


class ErrorCommand(click.Command):
    """A command whose errors end the program with one line and one of the codes above."""

    def main(self, *args: Any, **extra: Any) -> NoReturn:
        """Run the command line and exit."""
        extra["standalone_mode"] = False
        try:
            result = super().main(*args, **extra)
            code = result if isinstance(result, int) else 0
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            code = EXIT_USAGE
        except click.UsageError as error:
            command = error.ctx.command_path if error.ctx is not None else "relaybus"
            code = _fail(f"{error.format_message()} (see '{command} --help')", EXIT_USAGE)
        except click.ClickException as error:
            code = _fail(error.format_message(), error.exit_code)
        except (click.Abort, KeyboardInterrupt):
            code = _fail("interrupted; nothing more was done", EXIT_INTERRUPTED)
        except (RelayBusError, SQLAlchemyError) as error:
            code = _fail(describe(error), EXIT_FAILURE)
        except BrokenPipeError:
            # whoever read the output has had enough; what is left of it goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = EXIT_FAILURE
        sys.exit(code)


class ErrorGroup(ErrorCommand, click.Group):
    """A group of commands with such errors."""


def _fail(message: str, code: int) -> int:
    line = " ".join(message.split())
    click.echo(f"relaybus: {line}", err=True)
    return code
