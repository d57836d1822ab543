"""The web application: ``flask --app examples.flask_library.app run``.

``RELAYBUS_URL`` names the database.
"""

from __future__ import annotations

import os
from typing import Any

from flask import Flask, abort, request
from sqlalchemy import create_engine, select

from examples.flask_library.handlers import bus
from examples.flask_library.models import Book, CatalogueCard, Loan, Session, describe

Answer = dict[str, Any] | list[int] | tuple[dict[str, Any], int] | tuple[str, int]


def create_app() -> Flask:
    Session.configure(bind=create_engine(os.environ["RELAYBUS_URL"]))
    return make_views()


def make_views() -> Flask:
    """The application, on whatever ``Session`` is bound to."""
    app = Flask(__name__)

    @app.teardown_appcontext
    def end_session(error: BaseException | None) -> None:
        Session.remove()  # rolls back what was not committed

    @app.post("/books")
    def add_book() -> Answer:
        book = Book(**request.get_json())
        Session.add(book)
        Session.commit()  # the flush publishes book.added
        return describe(book), 201

    @app.delete("/books/<int:id>")
    def remove_book(id: int) -> Answer:
        Session.delete(Session.get(Book, id) or abort(404))
        Session.commit()
        return "", 204

    @app.post("/books/<int:id>/loans")
    def lend(id: int) -> Answer:
        book = Session.get(Book, id, with_for_update=True) or abort(404)
        if book.in_house == 0:
            abort(409, "every copy is lent")
        book.in_house -= 1  # the flush publishes book.changed
        reader = request.get_json()["reader"]
        Session.add(Loan(book_id=id, reader=reader))
        bus.publish(Session, "book.lent", {"title": book.title, "reader": reader}, key=reader)
        Session.commit()  # loan, book and both events, or nothing
        return describe(book), 201

    @app.get("/catalogue")
    def search() -> Answer:
        wanted = request.args.get("q", "").casefold()
        cards = (
            select(CatalogueCard)
            .where(CatalogueCard.text.contains(wanted, autoescape=True))
            .order_by(CatalogueCard.book_id)
        )
        return [card.book_id for card in Session.scalars(cards) if card.available]

    return app
