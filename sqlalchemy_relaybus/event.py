"""The values that travel: an event, a delivery of it to one handler, the context of one run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any
from uuid import UUID


class Event:
    """Something that happened, as published. Immutable.

    ``payload`` is decoded from its JSON text on first access and is this event's own copy.
    ``sequence`` numbers the events of one ``key`` from 1 without gaps among committed events; it
    and ``created_at`` (the database's clock) are known once the event has been read back, so both
    are ``None`` on the event that ``publish()`` returns.
    """

    __slots__ = ("_headers", "_payload", "_text", "created_at", "id", "key", "sequence", "type")

    id: UUID
    type: str
    key: str | None
    sequence: int | None
    created_at: datetime | None

    def __init__(
        self,
        id: UUID,
        type: str,
        text: str,
        key: str | None = None,
        headers: str | None = None,
        sequence: int | None = None,
        created_at: datetime | None = None,
    ) -> None:
        set_ = object.__setattr__
        set_(self, "id", id)
        set_(self, "type", type)
        set_(self, "_text", text)
        set_(self, "key", key)
        set_(self, "_headers", headers)
        set_(self, "sequence", sequence)
        set_(self, "created_at", created_at)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"an Event is immutable; {name!r} cannot be set")

    @property
    def payload(self) -> Any:
        """The payload, as ``json.loads`` gives it."""
        try:
            return self._payload
        except AttributeError:
            object.__setattr__(self, "_payload", json.loads(self._text))
            return self._payload

    @property
    def payload_text(self) -> str:
        """The payload's JSON text, as stored."""
        return self._text  # type: ignore[no-any-return]

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers; empty where none were given."""
        return json.loads(self._headers) if self._headers else {}

    def __repr__(self) -> str:
        key = f" key={self.key!r}" if self.key is not None else ""
        return f"<Event {self.type!r} {self.id}{key}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Event) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)
