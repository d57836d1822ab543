"""What a store keeps, in terms of the contract. Times are seconds of the test's clock."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import NamedTuple
from uuid import UUID

from sqlalchemy_relaybus.stores.base import Suspect

NOBODY: frozenset[int] = frozenset()


class StoredEvent(NamedTuple):
    """An event."""

    key: str | None
    sequence: int | None
    handlers: frozenset[str]
    created: float


class Row(NamedTuple):
    """A delivery that is ready or running."""

    lane: int
    event: UUID
    handler: str
    key: str | None
    attempts: int
    claims: int


class ParkedRow(NamedTuple):
    """A delivery that is neither."""

    row: Row
    status: str
    #: when it becomes ready; ``None``: not by itself
    due: float | None
    blocks: bool
    since: float


class LaneRow(NamedTuple):
    """A lane that somebody has held."""

    epoch: int = 0
    version: int = 0
    holder: UUID | None = None
    #: the end of the lease
    until: float | None = None
    company: int = 0
    started: frozenset[int] = NOBODY
    prefetched: frozenset[int] = NOBODY


class SuspectRow(NamedTuple):
    """A delivery that was started when its worker died."""

    lane: int
    suspect: Suspect


@dataclass
class Contents:
    """All of it; deliveries, parked ones and suspects by their ids."""

    events: dict[UUID, StoredEvent] = field(default_factory=dict)
    ready: dict[int, Row] = field(default_factory=dict)
    parked: dict[int, ParkedRow] = field(default_factory=dict)
    lanes: dict[int, LaneRow] = field(default_factory=dict)
    suspects: dict[int, SuspectRow] = field(default_factory=dict)

    def differences(self, other: Contents) -> list[str]:
        """What is not equal in *other*, for a message."""
        lines = []
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            lines += [
                f"{each.name}[{key}]\n  store: {theirs.get(key)}\n  model: {mine.get(key)}"
                for key in {**mine, **theirs}
                if mine.get(key) != theirs.get(key)
            ]
        return lines
