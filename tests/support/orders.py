"""A shop that publishes: its one table, its bus, and what it has published."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, select
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqlalchemy_relaybus import Event, RelayBus
from sqlalchemy_relaybus.tables import Tables, tables_for

TYPE = "order.placed"


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(default="new")


def make_bus(prefix: str = "relaybus_", wake: bool = False) -> RelayBus:
    """A bus with one handler of :data:`TYPE`."""
    bus = RelayBus(prefix=prefix, wake=wake)

    @bus.handler(TYPE, name="a")
    def handle(event: Event) -> None: ...

    return bus


def published(engine: Engine, tables: Tables | None = None) -> list[Any]:
    """The payloads of the committed events, in the order of their deliveries."""
    tables = tables or tables_for()
    events, deliveries = tables.events, tables.deliveries
    statement = (
        select(events.c.payload)
        .select_from(deliveries.join(events, events.c.id == deliveries.c.event_id))
        .order_by(deliveries.c.id)
    )
    with engine.connect() as connection:
        payloads = [text.strip('"') for text in connection.scalars(statement)]
        assert len(connection.scalars(select(events.c.id)).all()) == len(payloads)
    return payloads
