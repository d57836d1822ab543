"""What can be seen from outside while the demo runs: in the database and in the ledger."""

from __future__ import annotations

import json
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Engine, text

PUBLISHED = text("SELECT coalesce(max(n), 0) FROM flights")  # they are numbered from 1
BOARDED = text("SELECT coalesce(sum(flights), 0) FROM boards")
BACKLOG = text(
    """
    SELECT (SELECT count(*) FROM relaybus_deliveries)
         + (SELECT count(*) FROM relaybus_parked WHERE status <> 'dead')
    """
)
BUSY = text(
    """
    SELECT EXISTS (SELECT FROM relaybus_deliveries)
        OR EXISTS (SELECT FROM relaybus_parked WHERE status <> 'dead')
    """
)
DEAD = text("SELECT count(*) FROM relaybus_parked WHERE status = 'dead'")

# Started by whoever holds the lane and not completed: the holder's death means that these run
# again.
STARTED = text(
    """
    SELECT delivery.handler, event.payload
    FROM relaybus_lanes AS lane
    JOIN relaybus_deliveries AS delivery
      ON delivery.lane = lane.lane AND delivery.id = ANY (lane.started)
    JOIN relaybus_events AS event ON event.id = delivery.event_id
    """
)
TALKING = text(
    """
    SELECT EXISTS (
        SELECT FROM pg_stat_activity WHERE application_name = :name AND state = 'active'
    )
    """
)


class Call(NamedTuple):
    """A call of the outside service, as far as watching needs it."""

    pid: int
    handler: str
    n: int


@dataclass(frozen=True)
class Progress:
    """How far it has got."""

    published: int
    delivered: dict[str, int]

    @property
    def deliveries(self) -> int:
        return sum(self.delivered.values())


class LedgerTail:
    """Follows the service's file as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self.effects: Counter[str] = Counter()
        #: The last calls: more than two workers can have unfinished.
        self.recent: deque[Call] = deque(maxlen=20_000)

    def read(self) -> None:
        """Take in what was written since the last time."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._position)
            written, end, _ = file.read().rpartition(b"\n")  # the last line may be half there
        self._position += len(written) + len(end)
        for line in written.splitlines():
            noted = json.loads(line)
            self.effects[noted["handler"]] += noted["effect"]
            self.recent.append(Call(noted["pid"], noted["handler"], noted["n"]))


class Watch:
    """Looks at a PostgreSQL that the bus runs on, and at the ledger.

    *engine* is in autocommit: a transaction left open would keep the servers' dead rows alive.
    """

    def __init__(self, engine: Engine, ledger: LedgerTail) -> None:
        self._engine = engine
        self._ledger = ledger

    def progress(self) -> Progress:
        self._ledger.read()
        with self._engine.connect() as connection:
            published = connection.scalar(PUBLISHED) or 0
            boarded = connection.scalar(BOARDED) or 0
        return Progress(published, {"board.update": int(boarded), **self._ledger.effects})

    def busy(self) -> bool:
        """Whether any delivery is ready, running or waiting for its next attempt."""
        with self._engine.connect() as connection:
            return bool(connection.scalar(BUSY))

    def backlog(self) -> int:
        """How many deliveries are ready, running or waiting for their next attempt."""
        with self._engine.connect() as connection:
            return connection.scalar(BACKLOG) or 0

    def dead_letters(self) -> int:
        with self._engine.connect() as connection:
            return connection.scalar(DEAD) or 0

    def talking(self, application_name: str) -> bool:
        """Whether the server is at work on a statement of the process of that name."""
        with self._engine.connect() as connection:
            return bool(connection.scalar(TALKING, {"name": application_name}))

    def called_and_unfinished(self, pid: int) -> int:
        """The deliveries that *pid* has called the service for and not completed."""
        self._ledger.read()
        called = {(call.handler, call.n) for call in self._ledger.recent if call.pid == pid}
        with self._engine.connect() as connection:
            started = {
                (handler, json.loads(payload)["n"])
                for handler, payload in connection.execute(STARTED)
            }
        return len(called & started)
