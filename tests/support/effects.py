"""What transactional handlers write in tests."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, text

#: One effect: a number and a word.
INSERT = text("INSERT INTO effects VALUES (:n, :what)")


def make_effects(engine: Engine) -> None:
    """Make the table for them."""
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE effects (n int, what text)"))


def written(engine: Engine) -> list[tuple[Any, ...]]:
    """The effects that are committed, in order."""
    with engine.connect() as connection:
        query = text("SELECT n, what FROM effects ORDER BY n, what")
        return [tuple(row) for row in connection.execute(query)]
