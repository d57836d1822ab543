"""An application for worker processes, whose handlers are slow, stuck or stubborn."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Engine, func, select

from sqlalchemy_relaybus import RelayBus

#: What ``app.py`` says.
APP = """
import asyncio, os, sys, threading, time
from sqlalchemy_relaybus import Context, Event, Fixed, NoRetry, RelayBus

bus = RelayBus()

def note(*what):
    with open("ledger", "a") as file:
        file.write(" ".join(map(str, (*what, os.getpid()))) + "\\n")

@bus.handler("quick", name="quick")
async def quick(event: Event, context: Context):
    note("quick", event.key, event.payload, context.attempt)

@bus.handler("slow", name="slow", retry=Fixed(wait=0, max_attempts=3))
async def slow(event: Event, context: Context):
    note("began", event.payload, context.attempt)
    await asyncio.sleep(event.payload)
    note("ended", event.payload, context.attempt)

@bus.handler("stuck", name="stuck")
def stuck(event: Event, context: Context):
    note("stuck", event.payload, context.attempt)
    time.sleep(600)

@bus.handler("stubborn", name="stubborn")
async def stubborn(event: Event):
    note("stubborn")
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            pass

@bus.handler("thread", name="thread")
def thread(event: Event):
    threading.Thread(target=time.sleep, args=(600,), daemon=False).start()
    note("thread")
"""

#: The types of its events, and the names of their handlers.
TYPES = ("quick", "slow", "stuck", "stubborn", "thread")

#: Options that make a worker quick to look and to notice.
QUICK = (
    *("--poll-interval", "0.01", "--max-poll-interval", "0.1"),
    *("--lease-duration", "2", "--grace", "10"),
)


def application_bus() -> RelayBus:
    """A publisher's bus, which may have handlers of its own as well."""
    bus = RelayBus()
    for name in TYPES:
        bus.route(name, to=[name])
    return bus


def ledger(directory: Path) -> list[list[str]]:
    """What its handlers noted, in order, each with the id of its process."""
    path = directory / "ledger"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def noted(directory: Path, *what: object) -> list[list[str]]:
    """The notes that begin with *what*."""
    wanted = [str(word) for word in what]
    return [row for row in ledger(directory) if row[: len(wanted)] == wanted]


def listed(bus: RelayBus, engine: Engine) -> int:
    """How many workers are on the list of those alive."""
    with engine.connect() as connection:
        return connection.scalar(select(func.count()).select_from(bus.tables.workers)) or 0


def suspects(bus: RelayBus, engine: Engine) -> set[str]:
    """Which deliveries are, each as handler and payload."""
    suspects, deliveries, events = bus.tables.suspects, bus.tables.deliveries, bus.tables.events
    query = select(deliveries.c.handler + ":" + events.c.payload).where(
        deliveries.c.lane == suspects.c.lane,
        deliveries.c.id == suspects.c.id,
        deliveries.c.event_id == events.c.id,
    )
    with engine.connect() as connection:
        return set(connection.scalars(query))
