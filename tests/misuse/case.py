"""A case of misuse, and the names that its code may use."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sqlalchemy_relaybus import Event, RelayBus

#: What the case's engine is connected to: nothing is listening where a case needs no database.
Database = Literal["none", "migrated", "empty", "newer"]

PREAMBLE = """
import functools, math, uuid
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from sqlalchemy import Connection, create_engine
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy_relaybus import *
from sqlalchemy_relaybus import admin
"""


class Base(DeclarativeBase):
    pass


class Order(Base):
    """A mapped class of the application."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)

    def __repr__(self) -> str:
        return f"<Order {self.id}>"


@dataclass(frozen=True)
class Case:
    """Something wrong, as code, and how it is answered."""

    what: str
    code: str
    error: type[Exception]
    message: str
    database: Database = "none"

    def commit(self, engine: Engine | None = None) -> None:
        """Do it. *engine* is one on the kind of database that the case asks for."""
        bus = RelayBus(wake=False)
        bus.handler("order.placed", name="mail.confirm")(_confirm)
        with ExitStack() as stack:
            if engine is None:
                engine = create_engine("postgresql+psycopg:///shop")
            names: dict[str, Any] = {
                "__name__": __name__,
                "bus": bus,
                "engine": engine,
                "async_engine": create_async_engine(engine.url),
                "session": stack.enter_context(Session(engine)),
                "Order": Order,
            }
            exec(PREAMBLE, names)
            stack.callback(_close, names)
            code = compile(
                self.code, "<misuse>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True
            )
            if code.co_flags & inspect.CO_COROUTINE:
                asyncio.run(eval(code, names))
            else:
                exec(code, names)


def _close(names: dict[str, Any]) -> None:
    for name in ("session", "connection"):  # the case may have made others under these names
        if name in names:
            names[name].close()
    bind = getattr(names["session"], "bind", None)
    if isinstance(bind, Engine) and bind is not names["engine"]:
        bind.dispose()  # of the case's own making


def _confirm(event: Event) -> None: ...


def stable(message: str) -> str:
    """*message* without the addresses of objects."""
    return re.sub(r"0x[0-9a-f]+", "0x...", message)
