"""The load: one publisher process, which notes what it has committed.

Usage: ``python -m tests.chaos.load --url URL --seed N --number N --rate N``; SIGTERM ends it.
"""

from __future__ import annotations

import itertools
import random
import signal
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any
from uuid import UUID, uuid5

import click
from sqlalchemy import create_engine
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from tests.chaos.app import ORDER, RELAY, bus
from tests.chaos.ledger import Ledger, orphaned, own_ledger
from tests.chaos.tables import orders

HOT_KEYS, COLD_KEYS = 4, 300
#: Publishers publish one event each so often under the same id, seconds.
TWINS = 1.0
_TWIN_NAMESPACE = UUID("6f0d6c83-3b53-4b0c-9d5e-6f3f6d4b1c55")


@dataclass(frozen=True)
class Draft:
    """An event that is to be published; *id* where the publisher chooses it."""

    type: str
    key: str | None
    payload: dict[str, Any]
    id: UUID | None = None


class Publisher:
    """Publishes in transactions of all kinds: some roll back, some publish what is published."""

    def __init__(self, url: str, seed: int, number: int, rate: float, ledger: Ledger) -> None:
        self._engine = create_engine(url, pool_size=2, max_overflow=0, pool_pre_ping=True)
        self._seed = seed
        self._number = number
        self._interval = 1 / rate
        self._ledger = ledger
        self._random = random.Random(f"{seed} {number}")
        self._transactions = itertools.count()
        self._committed: list[Draft] = []
        #: what a commit of unknown outcome was to publish, and is published again
        self._owed: list[Draft] = []
        self._twin = 0
        self.stopped = False

    def run(self) -> None:
        turn = time.monotonic()
        kinds = (self._commit, self._again, self._roll_back, self._fail, self._savepoint)
        while not self.stopped and not orphaned():
            [kind] = self._random.choices(kinds, (80, 8, 4, 4, 4))
            try:
                if self._owed:
                    self._pay()
                elif (twin := int(time.time() / TWINS)) != self._twin:
                    self._twin = twin
                    self._publish([self._twin_draft(twin)])
                else:
                    kind()
            except DBAPIError:
                time.sleep(0.2)  # the database is away, or was
            turn = max(turn + self._interval, time.monotonic() - 1)
            time.sleep(max(0.0, turn - time.monotonic()))

    # -- kinds of transactions -----------------------------------------------------------------

    def _commit(self) -> None:
        self._publish(self._drafts())

    def _again(self) -> None:
        """Some new, and some that were published before."""
        known = self._random.choices(self._committed, k=3) if self._committed else []
        self._publish(self._drafts() + known)

    def _pay(self) -> None:
        """What may have been committed, or not, under the same ids."""
        owed, self._owed = self._owed, []
        try:
            self._publish(owed)
        except DBAPIError:
            self._owed = self._owed or owed
            raise

    def _roll_back(self) -> None:
        with Session(self._engine) as session:
            ids = self._write(session, self._drafts())
            session.flush()
            session.rollback()
        self._ledger.note("dropped", events=ids)

    def _fail(self) -> None:
        ids: list[str] = []
        try:
            with Session(self._engine) as session, session.begin():
                ids = self._write(session, self._drafts())
                if self._random.random() < 0.5:
                    session.flush()
                raise LookupError
        except LookupError:
            self._ledger.note("dropped", events=ids)

    def _savepoint(self) -> None:
        """What is published in a savepoint that is rolled back goes, the rest stays."""
        self._publish(self._drafts(), dropped=[Draft(ORDER, None, self._payload())])

    def _publish(self, drafts: list[Draft], dropped: list[Draft] | None = None) -> None:
        """Commit *drafts*, and note before and after what is known of it."""
        transaction = next(self._transactions)
        with Session(self._engine) as session:
            if dropped is not None:
                nested = session.begin_nested()
                ids = self._write(session, dropped)
                session.flush()
                nested.rollback()
                self._ledger.note("dropped", events=ids)
            ids = self._write(session, drafts)
            session.flush()
            drafts = [
                Draft(draft.type, draft.key, draft.payload, UUID(id))
                for draft, id in zip(drafts, ids, strict=True)
            ]
            events = [
                [str(draft.id), draft.key, draft.type, draft.payload["bury"]] for draft in drafts
            ]
            self._ledger.note("committing", transaction=transaction, events=events)
            try:
                session.commit()
            except DBAPIError:
                self._ledger.note("unknown", transaction=transaction)
                if self._random.random() < 0.5:
                    self._owed = drafts
                raise
            self._ledger.note("committed", transaction=transaction)
        self._committed += drafts

    def _write(self, session: Session, drafts: list[Draft]) -> list[str]:
        """Publish in the session's transaction, beside rows of the application's own."""
        events = [
            bus.publish(session, draft.type, draft.payload, key=draft.key, id=draft.id)
            for draft in drafts
        ]
        # by id: two publishers of the same events never wait for each other in opposite order
        rows = [{"event_id": id} for id in sorted({event.id for event in events})]
        session.execute(insert(orders).on_conflict_do_nothing(), rows)
        return [str(event.id) for event in events]

    # -- what is published ---------------------------------------------------------------------

    def _drafts(self) -> list[Draft]:
        return [
            Draft(RELAY if self._random.random() < 0.2 else ORDER, self._key(), self._payload())
            for _ in range(self._random.choice((1, 1, 2, 3)))
        ]

    def _key(self) -> str | None:
        kind = self._random.random()
        if kind < 0.25:
            return None
        if kind < 0.65:
            return f"hot {self._random.randrange(HOT_KEYS)}"
        return f"cold {self._random.randrange(COLD_KEYS)}"

    def _payload(self) -> dict[str, Any]:
        long = self._random.random() < 0.03
        return {
            "seconds": self._random.uniform(0.3, 0.8) if long else self._random.uniform(0, 0.05),
            "fails": self._random.choice((1, 2, 3)) if self._random.random() < 0.05 else 0,
            "bury": self._random.random() < 0.01,
        }

    def _twin_draft(self, twin: int) -> Draft:
        """The event that every publisher publishes at this moment."""
        same = random.Random(f"{self._seed} {twin}")
        key = same.choice((None, f"hot {same.randrange(HOT_KEYS)}"))
        payload = {"seconds": same.uniform(0, 0.02), "fails": 0, "bury": False}
        return Draft(ORDER, key, payload, uuid5(_TWIN_NAMESPACE, f"{self._seed} {twin}"))


@click.command()
@click.option("--url", required=True)
@click.option("--seed", type=int, required=True)
@click.option("--number", type=int, required=True)
@click.option("--rate", type=float, required=True, help="Transactions a second.")
def main(url: str, seed: int, number: int, rate: float) -> None:
    """Publish until SIGTERM."""
    publisher = Publisher(url, seed, number, rate, own_ledger())

    def stop(signum: int, frame: FrameType | None) -> None:
        publisher.stopped = True

    signal.signal(signal.SIGTERM, stop)
    publisher.run()


if __name__ == "__main__":
    main()
