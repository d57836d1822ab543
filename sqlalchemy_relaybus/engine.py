"""The engine behind a URL that a user gave, and its errors in words.

Shared by the commands, the worker process and the migrations.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import URL, Engine, create_engine, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from .exc import ConfigurationError

CONNECT_TIMEOUT = 10
"""Seconds that a command waits for a connection to the database."""

DRIVERS = {"postgresql": "psycopg"}
"""The databases that there is a store for, and the driver that commands and workers use."""

_EXAMPLE = "postgresql+psycopg://user@host/database"


def open_engine(url: str | URL, **options: Any) -> Engine:
    """An engine for *url*; nothing is connected to.

    A URL that begins ``postgresql://`` means psycopg 3, whatever SQLAlchemy's default for it is.
    Raises ``ConfigurationError`` for a URL that cannot be read, a database that there is no store
    for, another driver, and one that is not installed.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:  # the latter for a port that is no number
        # the URL itself may hold a password
        raise ConfigurationError(
            f"the database URL cannot be read; it has the form {_EXAMPLE}"
        ) from error
    given, (backend, _, driver) = parsed.drivername, parsed.drivername.partition("+")
    backend = "postgresql" if backend == "postgres" else backend
    if backend not in DRIVERS:
        raise ConfigurationError(
            f"there is no store for {backend!r} databases; this release works with "
            f"{', '.join(DRIVERS)} only, and a URL such as {_EXAMPLE}"
        )
    if driver not in ("", DRIVERS[backend]):
        raise ConfigurationError(
            f"the driver of {given!r} is not supported; use {DRIVERS[backend]} (3), with a URL "
            f"such as {_EXAMPLE}"
        )
    parsed = parsed.set(drivername=f"{backend}+{DRIVERS[backend]}")
    options.setdefault("isolation_level", "READ COMMITTED")
    if "connect_timeout" not in parsed.query:
        options.setdefault("connect_args", {"connect_timeout": CONNECT_TIMEOUT})
    try:
        return create_engine(parsed, **options)
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"the driver {error.name!r} is not installed: pip install "
            f"'sqlalchemy-relaybus[{backend}]'"
        ) from error


def describe(error: BaseException) -> str:
    """*error* in one line: what happened and, where it is known, what to do."""
    if isinstance(error, ArgumentError):
        return f"the database URL cannot be used: {_first_line(error)}"
    if isinstance(error, DBAPIError) and error.orig is not None:
        if getattr(error.orig, "sqlstate", None) is None and error.statement is None:
            return f"the database cannot be reached: {_first_line(error.orig)}"
        return f"the database refused: {_first_line(error.orig)}"
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
