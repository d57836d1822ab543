"""The engine behind a URL that a user gave, and its errors in words.

Shared by the commands, the worker process and the migrations.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import URL, Engine, create_engine, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from .exc import ConfigurationError

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
