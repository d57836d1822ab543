"""The engine behind a URL, and its errors in words. Nothing is connected to."""

from __future__ import annotations

import pytest
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError

from sqlalchemy_relaybus.engine import CONNECT_TIMEOUT, DRIVERS, describe, open_engine
from sqlalchemy_relaybus.exc import ConfigurationError
from sqlalchemy_relaybus.stores import store_for
from sqlalchemy_relaybus.tables import tables_for


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg"])
def test_a_postgresql_url_means_psycopg_3(scheme: str) -> None:
    engine = open_engine(f"{scheme}://u:p@h/d")
    assert (engine.dialect.name, engine.driver) == ("postgresql", "psycopg")
    _, options = engine.dialect.create_connect_args(engine.url)
    assert options["password"] == "p"


def test_a_connection_is_not_waited_for_endlessly() -> None:
    given: list[object] = []

    def connect(url: str) -> None:
        engine = open_engine(url)

        @event.listens_for(engine, "do_connect")
        def note(dialect: object, record: object, args: object, options: dict[str, object]) -> None:
            given.append(options["connect_timeout"])
            raise RuntimeError("that will do")

        with pytest.raises(RuntimeError, match="that will do"):
            engine.connect()

    connect("postgresql://h/d")
    connect("postgresql://h/d?connect_timeout=3")
    assert given == [CONNECT_TIMEOUT, "3"]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("secret nonsense", "cannot be read"),
        ("postgresql://u:secret@h:port/d", "cannot be read"),
        ("nosuchdb://h/d", "no store for 'nosuchdb' databases; this release works with postgresql"),
        ("mysql://h/d", "no store for 'mysql' databases; this release works with postgresql"),
        (
            "postgresql+psycopg2://h/d",
            r"use psycopg \(3\), with a URL such as postgresql",
        ),
        ("postgresql+asyncpg://h/d", r"'postgresql\+asyncpg' is not supported; use psycopg"),
    ],
)
def test_a_url_that_is_of_no_use(url: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as caught:
        open_engine(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("database", DRIVERS)
def test_there_is_a_store_for_each_database(database: str) -> None:
    assert store_for(database, tables_for())


class DriverError(Exception):
    sqlstate: str | None = None


def test_errors_in_one_line() -> None:
    driver = DriverError("it is\nlong")
    assert describe(DBAPIError(None, None, driver)) == "the database cannot be reached: it is"
    assert describe(DBAPIError("SELECT", None, driver)) == "the database refused: it is"
    driver.sqlstate = "3D000"  # there is no such database
    assert describe(DBAPIError(None, None, driver)) == "the database refused: it is"
    assert describe(ValueError()) == "ValueError"
