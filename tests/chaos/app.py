"""The application under test: a bus whose handlers note in a ledger when they begin and end.

A worker runs it (``--app tests.chaos.app:bus``), publishers publish through it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from uuid import UUID, uuid5

from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from sqlalchemy_relaybus import Bury, Context, Event, Fixed, RelayBus, Retry, Snooze
from tests.chaos.ledger import NAME_VARIABLE, Ledger, orphaned, own_ledger
from tests.chaos.tables import effects

ORDER, RELAY, ECHO = "order", "relay", "echo"
#: The handlers of each type, and those of them that are transactional.
HANDLERS = {
    ORDER: ("coroutine", "function", "tx.function", "tx.coroutine", "flaky"),
    RELAY: ("tx.relay", "relay"),
    ECHO: ("echo", "tx.echo"),
}
TRANSACTIONAL = frozenset({"tx.function", "tx.coroutine", "tx.relay", "tx.echo"})

URL_VARIABLE = "CHAOS_URL"
#: Set for workers: note when the process stood still.
BEAT_VARIABLE = "CHAOS_BEAT"
#: How often a worker looks whether it stands still, and what counts as that, seconds.
BEAT = 0.1
STALL = 0.75
#: The database goes away more often than a policy for production would bear.
PATIENT = Fixed(wait=0.2, max_attempts=100)

bus = RelayBus()
_runs = itertools.count()


@cache
def ledger() -> Ledger:
    return own_ledger()


@contextmanager
def noted(event: Event, context: Context) -> Iterator[None]:
    """Note the begin of a run and its end, and how it ended."""
    run = next(_runs)
    ledger().note(
        "begin",
        run=run,
        event=str(event.id),
        key=event.key,
        sequence=event.sequence,
        handler=context.handler,
        attempt=context.attempt,
    )
    outcome = "cancelled"
    try:
        yield
        outcome = "done"
    except Snooze:
        outcome = "snoozed"
        raise
    except Bury:
        outcome = "buried"
        raise
    except Exception:
        outcome = "failed"
        raise
    finally:
        ledger().note("end", run=run, outcome=outcome)


def effect(event: Event, context: Context) -> dict[str, object]:
    """The row of a transactional handler."""
    worker = os.environ[NAME_VARIABLE]
    return {"event_id": event.id, "handler": context.handler, "worker": worker}


def echo_id(event: UUID, handler: str) -> UUID:
    """The id of what *handler* publishes for *event*: the same each time."""
    return uuid5(event, handler)


def echo_key(key: str | None) -> str | None:
    return None if key is None else f"echo of {key}"


# -- the handlers ----------------------------------------------------------------------------------


@bus.handler(ORDER, name="coroutine")
async def coroutine(event: Event, context: Context) -> None:
    with noted(event, context):
        await asyncio.sleep(event.payload["seconds"])


@bus.handler(ORDER, name="function")
def function(event: Event, context: Context) -> None:
    with noted(event, context):
        time.sleep(event.payload["seconds"])


@bus.handler(ORDER, name="tx.function", mode="transactional", retry=PATIENT)
def tx_function(event: Event, context: Context, session: Session) -> None:
    with noted(event, context):
        session.execute(effects.insert(), effect(event, context))
        time.sleep(event.payload["seconds"])


@bus.handler(ORDER, name="tx.coroutine", mode="transactional", retry=PATIENT)
async def tx_coroutine(event: Event, context: Context, session: AsyncSession) -> None:
    with noted(event, context):
        await session.execute(effects.insert(), effect(event, context))
        await asyncio.sleep(event.payload["seconds"])


@bus.handler(ORDER, name="flaky", retry=PATIENT)
async def flaky(event: Event, context: Context) -> None:
    """Fails at the attempts that the payload says, or for good; snoozes now and then."""
    with noted(event, context):
        await asyncio.sleep(event.payload["seconds"])
        if event.payload["bury"]:
            raise Bury("this one is not wanted")
        if context.attempt <= event.payload["fails"]:
            if context.attempt % 2:
                raise Retry(0.1)
            raise ConnectionError("the other side is busy")
        if random.random() < 0.01:
            raise Snooze(0.1)


@bus.handler(RELAY, name="tx.relay", mode="transactional", retry=PATIENT)
def tx_relay(event: Event, context: Context, session: Session) -> None:
    """Publishes in the transaction that its delivery completes in."""
    with noted(event, context):
        session.execute(effects.insert(), effect(event, context))
        _publish_echo(session, event, context)


@bus.handler(RELAY, name="relay", retry=PATIENT)
def relay(event: Event, context: Context) -> None:
    """Publishes in a transaction of its own: again, under the same id, when it runs again."""
    with noted(event, context):
        with Session(_own_engine()) as session, session.begin():
            _publish_echo(session, event, context)


@bus.handler(ECHO, name="echo")
async def echo(event: Event, context: Context) -> None:
    with noted(event, context):
        await asyncio.sleep(0)


@bus.handler(ECHO, name="tx.echo", mode="transactional", retry=PATIENT)
def tx_echo(event: Event, context: Context, session: Session) -> None:
    with noted(event, context):
        session.execute(effects.insert(), effect(event, context))


def _publish_echo(session: Session, event: Event, context: Context) -> None:
    bus.publish(
        session,
        ECHO,
        {"of": str(event.id)},
        key=echo_key(event.key),
        id=echo_id(event.id, context.handler),
    )


@cache
def _own_engine() -> Engine:
    return create_engine(os.environ[URL_VARIABLE], pool_pre_ping=True)


# -- the process -----------------------------------------------------------------------------------


def _beat() -> None:
    """Note when this process stood still, for whatever reason; end with whoever started it."""
    last = time.monotonic()
    while not orphaned():
        time.sleep(BEAT)
        now = time.monotonic()
        if now - last > STALL:
            ledger().note("stalled", since=last)
        last = now
    os._exit(1)


if BEAT_VARIABLE in os.environ:
    threading.Thread(target=_beat, name="beat", daemon=True).start()
