"""The PostgreSQL store."""

from .store import PostgreSQLStore

__all__ = ["PostgreSQLStore"]
