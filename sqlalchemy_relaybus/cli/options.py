"""Options that the commands share, and the connection that they make."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import click
from sqlalchemy import Connection, Engine

from sqlalchemy_relaybus.engine import open_engine
from sqlalchemy_relaybus.exc import ConfigurationError
from sqlalchemy_relaybus.stores import store_for
from sqlalchemy_relaybus.tables import DEFAULT_PREFIX, Tables, tables_for


@dataclass(frozen=True)
class Database:
    """Where the tables are."""

    url: str | None
    schema: str | None
    prefix: str

    @property
    def tables(self) -> Tables:
        """Their metadata."""
        return tables_for(self.schema, self.prefix)

    @property
    def where(self) -> dict[str, Any]:
        """Schema and prefix, as keyword arguments."""
        return {"schema": self.schema, "prefix": self.prefix}

    @contextmanager
    def engine(self) -> Iterator[Engine]:
        """An engine for the length of the block."""
        if self.url is None:
            raise click.UsageError(
                "no database given: use --url or set RELAYBUS_URL, for example "
                "postgresql+psycopg://user@host/database",
                click.get_current_context(),
            )
        engine = open_engine(self.url)
        # before anything is connected to: SQLite makes a file of whatever it is given
        store_for(engine.dialect.name, self.tables)
        try:
            yield engine
        finally:
            engine.dispose()

    @contextmanager
    def connect(self) -> Iterator[Connection]:
        """A connection for the length of the block. Nothing is committed at its end."""
        with self.engine() as engine, engine.connect() as connection:
            yield connection


def where_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--schema`` and ``--prefix``; the command gets a ``database``."""

    @click.option(
        "--schema",
        envvar="RELAYBUS_SCHEMA",
        show_envvar=True,
        help="Schema of the tables.  [default: the search path's]",
    )
    @click.option(
        "--prefix",
        envvar="RELAYBUS_PREFIX",
        show_envvar=True,
        default=DEFAULT_PREFIX,
        show_default=True,
        help="What the names of the tables begin with.",
    )
    @wraps(command)
    def wrapped(*args: Any, schema: str | None, prefix: str, **options: Any) -> Any:
        database = Database(options.pop("url", None), schema, prefix)
        try:
            database.tables  # noqa: B018 - refuses names that cannot be
        except ConfigurationError as error:
            raise click.UsageError(str(error)) from error
        return command(*args, database=database, **options)

    return wrapped


def database_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--url``, ``--schema`` and ``--prefix``; the command gets a ``database``."""
    with_url: Callable[..., Any] = click.option(
        "--url",
        envvar="RELAYBUS_URL",
        show_envvar=True,
        help="The database, as 'postgresql+psycopg://user@host/database'.",
    )(where_options(command))
    return with_url


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
