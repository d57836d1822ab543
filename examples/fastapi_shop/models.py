"""The shop's own tables. ``python -m examples.fastapi_shop.models`` creates them."""

from __future__ import annotations

import os

from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]
    item: Mapped[str]
    quantity: Mapped[int]
    status: Mapped[str] = mapped_column(default="placed")  # then "reserved" or "refused"


class Stock(Base):
    __tablename__ = "stock"

    item: Mapped[str] = mapped_column(primary_key=True)
    left: Mapped[int]


if __name__ == "__main__":
    Base.metadata.create_all(create_engine(os.environ["RELAYBUS_URL"]))
