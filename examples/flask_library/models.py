"""The library's tables and sessions; every change of a book is an event.

``python -m examples.flask_library.models`` creates the tables.
"""

from __future__ import annotations

import os
from typing import Any

from sqlalchemy import ForeignKey, create_engine
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    mapped_column,
    scoped_session,
    sessionmaker,
)

from sqlalchemy_relaybus import RelayBus

#: One session a thread. The application binds it: ``Session.configure(bind=engine)``.
Session = scoped_session(sessionmaker())

bus = RelayBus()
bus.attach(Session)


class Base(DeclarativeBase):
    pass


def describe(book: Book) -> dict[str, Any]:
    """What the events about a book say."""
    return {"id": book.id, "title": book.title, "author": book.author, "in_house": book.in_house}


@bus.record_changes(
    insert="book.added",
    update="book.changed",
    delete="book.removed",
    payload=describe,
    key=lambda book: f"book-{book.id}",
)
class Book(Base):
    __tablename__ = "books"

    id: Mapped[int] = mapped_column(primary_key=True)
    title: Mapped[str]
    author: Mapped[str]
    in_house: Mapped[int] = mapped_column(default=1)  # copies that nobody has borrowed


class Loan(Base):
    __tablename__ = "loans"

    id: Mapped[int] = mapped_column(primary_key=True)
    book_id: Mapped[int] = mapped_column(ForeignKey("books.id", ondelete="CASCADE"))
    reader: Mapped[str]


class CatalogueCard(Base):
    """What readers search, kept by the handler ``catalogue.keep``."""

    __tablename__ = "catalogue"

    book_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    text: Mapped[str]
    available: Mapped[bool]


if __name__ == "__main__":
    Base.metadata.create_all(create_engine(os.environ["RELAYBUS_URL"]))
