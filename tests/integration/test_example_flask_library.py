"""The Flask example: inside a transaction that is rolled back, and with a real worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient
from sqlalchemy import Connection, Engine, func, select

from examples.flask_library.app import create_app, make_views
from examples.flask_library.handlers import keep_catalogue
from examples.flask_library.models import Base, Book, CatalogueCard, Loan, Session, bus
from sqlalchemy_relaybus import Event
from tests.support.workers import terminated, worker_process

events = bus.tables.events
TEA = {"title": "The Book of Tea", "author": "Okakura", "in_house": 1}


@pytest.fixture
def library(engine: Engine) -> Iterator[Engine]:
    """A database with the library's tables."""
    Base.metadata.create_all(engine)
    yield engine
    Session.remove()
    bind = Session.session_factory.kw["bind"]  # the application's own, where it has made one
    if bind is not None and isinstance(bind, Engine):
        bind.dispose()
    Session.configure(bind=None, join_transaction_mode="conditional_savepoint")


# -- rolled back -----------------------------------------------------------------------------------


@pytest.fixture
def connection(library: Engine) -> Iterator[Connection]:
    """A connection with a transaction that the application's sessions join; none of it stays."""
    with library.connect() as connection:
        outer = connection.begin()
        Session.configure(bind=connection, join_transaction_mode="create_savepoint")
        yield connection
        Session.remove()
        outer.rollback()
    tables = Book.__table__, Loan.__table__, CatalogueCard.__table__, events, bus.tables.deliveries
    with library.connect() as after:
        for table in tables:
            assert after.scalar(select(func.count()).select_from(table)) == 0


@pytest.fixture
def client(connection: Connection) -> FlaskClient:
    return make_views().test_client()


def published(connection: Connection) -> list[Event]:
    """The events that are in the transaction of *connection*, oldest first."""
    rows = connection.execute(
        select(events.c.id, events.c.type, events.c.payload, events.c.key).order_by(events.c.id)
    )
    return [Event(*row) for row in rows]


def handle(event: Event) -> None:
    with Session.begin():
        keep_catalogue(event, Session())
    Session.remove()


def found(client: FlaskClient, wanted: str) -> Any:
    return client.get("/catalogue", query_string={"q": wanted}).json


def test_a_new_book_is_published_and_gets_a_card(
    client: FlaskClient, connection: Connection
) -> None:
    book = client.post("/books", json=TEA).json
    assert book is not None
    (event,) = published(connection)
    assert (event.type, event.key, event.payload) == ("book.added", f"book-{book['id']}", book)
    assert found(client, "TEA") == []
    handle(event)
    assert found(client, "TEA") == [book["id"]]
    assert found(client, "coffee") == []


def test_a_loan_publishes_the_change_and_itself(
    client: FlaskClient, connection: Connection
) -> None:
    book = client.post("/books", json=TEA).json
    assert book is not None
    lent = client.post(f"/books/{book['id']}/loans", json={"reader": "ann"})
    assert lent.json == {**book, "in_house": 0}
    added, *others = published(connection)
    by_type = {event.type: event for event in others}
    assert by_type["book.lent"].payload == {"title": TEA["title"], "reader": "ann"}
    assert by_type["book.changed"].payload == lent.json
    handle(added)
    handle(by_type["book.changed"])
    assert found(client, "tea") == []  # the only copy is lent

    assert client.post(f"/books/{book['id']}/loans", json={"reader": "bob"}).status_code == 409
    assert len(published(connection)) == 3


def test_a_book_that_is_gone_loses_its_card(client: FlaskClient, connection: Connection) -> None:
    book = client.post("/books", json=TEA).json
    assert book is not None
    handle(published(connection)[0])
    assert client.delete(f"/books/{book['id']}").status_code == 204
    assert client.delete(f"/books/{book['id']}").status_code == 404
    removed = published(connection)[-1]
    assert (removed.type, removed.payload) == ("book.removed", book)
    handle(removed)
    handle(removed)  # it may come to a card that is gone
    assert found(client, "tea") == []


# -- with a worker ---------------------------------------------------------------------------------


def test_a_worker_keeps_the_catalogue(
    library: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELAYBUS_URL", library.url.render_as_string(hide_password=False))
    client = create_app().test_client()
    with worker_process(tmp_path, app="examples.flask_library.handlers:bus") as worker:
        first = client.post("/books", json=TEA).json
        second = client.post("/books", json={**TEA, "title": "Tea Life", "in_house": 2}).json
        assert first is not None
        assert second is not None
        worker.until(lambda: found(client, "tea") == [first["id"], second["id"]])
        for book in (first, second):
            lent = client.post(f"/books/{book['id']}/loans", json={"reader": "ann"})
            assert lent.status_code == 201
        worker.until(lambda: "letter to ann: enjoy Tea Life" in worker.output)
        worker.until(lambda: found(client, "tea") == [second["id"]])
        client.delete(f"/books/{second['id']}")
        worker.until(lambda: found(client, "tea") == [])
        assert terminated(worker) == 0
    with library.connect() as connection:
        assert connection.scalars(select(CatalogueCard.book_id)).all() == [first["id"]]
