"""Retention: what is kept of events that are done, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Engine

from .bus import RelayBus
from .exc import ConfigurationError, as_seconds
from .retry import MAX_DELAY
from .schema import check_schema
from .stores import store_for
from .stores.base import Place, PurgedRows
from .tables import Tables

#: The largest page: what is locked at once, and sent as one parameter.
MAX_BATCH = 10_000


@dataclass(frozen=True, slots=True)
class PurgeResult:
    """What a purge has removed, and what it has left although it was old enough."""

    #: events removed
    events: int = 0
    #: dead letters removed
    dead: int = 0
    #: records of completed deliveries removed
    completed: int = 0
    #: old events left because a delivery of theirs is ready, running, waiting or dead
    undone: int = 0
    #: old events left because somebody else had them locked; the next purge gets them
    locked: int = 0
    #: the id at which the walk over the events goes on; ``None``: it is at its end
    next: UUID | None = None


def purge(
    engine: Engine,
    bus: RelayBus | Tables,
    *,
    events_older_than: timedelta | float | None = None,
    dead_older_than: timedelta | float | None = None,
    completed_older_than: timedelta | float | None = None,
    batch: int = 1000,
    start: UUID | None = None,
    progress: Callable[[PurgeResult], object] | None = None,
) -> PurgeResult:
    """Remove what is done and older than asked; what is not named is kept for ever.

    Ages are timedeltas or seconds, up to 100 years, and are measured by the database's clock.
    *events_older_than*: events, from the moment they were published, that have no delivery left.
    An event with one that is ready, running, delayed, retrying, unhandled or dead is never
    removed, however old. *dead_older_than*: dead letters, from the moment they died; their events
    may then go, too. *completed_older_than*: the records of completed deliveries that a 0.1
    database has.

    The id of a removed event is as good as new: published again, it runs its handlers again. So
    *events_older_than* has to be longer than anybody may take to publish an id again.

    Works through pages of *batch* rows (1 to 10,000), each in a transaction of its own on one
    connection of *engine*. It waits for nobody; whoever publishes an event of the page again waits
    for the page to end. *progress* is called after each commit with the result so far. A purge may
    be killed at any time, several may run at once, and workers go on. Started over it begins
    anew, or, with :attr:`PurgeResult.next` as *start*, where it was.

    Raises :class:`ConfigurationError` for arguments that cannot be used, :class:`SchemaError` if
    the database's tables do not fit; errors of the database end it, with the pages before kept.
    """
    if not isinstance(engine, Engine):
        raise ConfigurationError(
            f"purge() takes a synchronous Engine, not {engine!r}; make one for the same URL with "
            "create_engine()"
        )
    if not isinstance(bus, RelayBus | Tables):
        raise ConfigurationError(f"purge() takes a RelayBus or its tables, not {bus!r}")
    if isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= MAX_BATCH:
        raise ConfigurationError(f"batch must be a number from 1 to {MAX_BATCH}, not {batch!r}")
    if start is not None and not isinstance(start, UUID):
        raise ConfigurationError(f"start must be a UUID, not {start!r}")
    events_age = _age("events_older_than", events_older_than)
    dead_age = _age("dead_older_than", dead_older_than)
    completed_age = _age("completed_older_than", completed_older_than)
    if events_age is None and dead_age is None and completed_age is None:
        raise ConfigurationError(
            "nothing to purge: give events_older_than, dead_older_than or completed_older_than"
        )

    tables = bus if isinstance(bus, Tables) else bus.tables
    store = store_for(engine.dialect.name, tables)
    following = (start or UUID(int=0)) if events_age is not None else None
    result = PurgeResult(next=following)
    # The guarantees rest on it: each statement sees what was committed before it.
    with engine.connect().execution_options(isolation_level="READ COMMITTED") as connection:
        with connection.begin():
            check_schema(connection, tables)

        def done(**changes: Any) -> None:
            nonlocal result
            result = replace(result, **changes)
            if progress is not None:
                progress(result)

        # dead letters first: they keep their events
        if dead_age is not None:
            purge_dead = partial(store.purge_dead, age=dead_age, limit=batch)
            _by_age(connection, purge_dead, lambda n: done(dead=result.dead + n))
        if completed_age is not None:
            purge_completed = partial(store.purge_completed, age=completed_age, limit=batch)
            _by_age(connection, purge_completed, lambda n: done(completed=result.completed + n))
        while following is not None:
            assert events_age is not None
            with connection.begin():
                page = store.purge_events(connection, following, events_age, batch)
            following = page.following
            done(
                events=result.events + page.removed,
                undone=result.undone + page.undone,
                locked=result.locked + page.locked,
                next=following,
            )
    return result


def _by_age(
    connection: Connection,
    purge_page: Callable[[Connection, Place | None], PurgedRows],
    done: Callable[[int], None],
) -> None:
    """Purge page after page, each in a transaction of its own."""
    last: Place | None = None
    while True:
        with connection.begin():
            removed, last = purge_page(connection, last)
        done(removed)
        if last is None:
            return


def _age(name: str, value: object) -> float | None:
    """*value* in seconds, or the error that says why it is no age."""
    if value is None:
        return None
    # a bool is a slip, and a text or a date would be taken for something that it is not
    if isinstance(value, timedelta | int | float) and not isinstance(value, bool):
        try:
            seconds = as_seconds(value)
        except (ValueError, OverflowError):
            pass
        else:
            if seconds <= MAX_DELAY:
                return seconds
    raise ConfigurationError(
        f"{name} must be a timedelta or a number of seconds from 0 to {MAX_DELAY:.0f}, "
        f"not {value!r}"
    )
