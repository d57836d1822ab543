"""The stores: one contract (:mod:`.base`), one package a database."""

from __future__ import annotations

from functools import lru_cache

from ..exc import ConfigurationError
from ..tables import Tables
from .base import Store


@lru_cache(maxsize=32)
def store_for(dialect: str, tables: Tables) -> Store:
    """The store for databases of SQLAlchemy's *dialect* name.

    A :class:`ConfigurationError` names the ones there are.
    """
    if dialect == "postgresql":
        from .postgresql import PostgreSQLStore

        return PostgreSQLStore(tables)
    raise ConfigurationError(
        f"there is no store for {dialect!r} databases; this release works with postgresql"
    )
