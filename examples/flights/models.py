"""The application's own tables. Nothing in them knows of the bus."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    pass


class Flight(Base):
    """A departure, as the publisher records it."""

    __tablename__ = "flights"

    n: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)  # publishing order
    scheduled: Mapped[datetime]
    carrier: Mapped[str]
    number: Mapped[int]
    tailnum: Mapped[str | None]
    origin: Mapped[str]
    dest: Mapped[str]
    delay: Mapped[int | None]


class Board(Base):
    """What is known of one aircraft, kept by the handler ``board.update``."""

    __tablename__ = "boards"

    aircraft: Mapped[str] = mapped_column(primary_key=True)
    flights: Mapped[int]
    delay_minutes: Mapped[int]
    last_airport: Mapped[str | None]
    # The two that give away a flight counted twice or out of turn: with ``flights`` right and
    # ``out_of_turn`` zero, exactly the aircraft's flights were counted, each once and in order.
    last_n: Mapped[int]
    out_of_turn: Mapped[int]
