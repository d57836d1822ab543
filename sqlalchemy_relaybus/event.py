"""The values that travel: an event, a delivery of it to one handler, the context of one run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any
from uuid import UUID


class Event:
    """Something that happened, as published. Its attributes cannot be set.

    ``payload`` is decoded from its JSON text on first access. It is this event's own copy: what a
    handler changes in it, nobody else sees.
    ``sequence`` numbers the events of one ``key`` in the order in which they were committed; no
    number is used twice, but some may be left out. It and ``created_at`` (the database's clock)
    are known once the event has been read back, so both are ``None`` on the event that
    ``publish()`` returns.
    """

    __slots__ = ("_headers", "_payload", "_text", "created_at", "id", "key", "sequence", "type")

    id: UUID
    type: str
    key: str | None
    sequence: int | None
    created_at: datetime | None
    _text: str
    _headers: str | None
    _payload: Any

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
        return self._text

    @property
    def headers_text(self) -> str | None:
        """The headers' JSON text, as stored; ``None`` where there are none."""
        return self._headers

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


class Context:
    """One run of a handler for one event. Read-only.

    Made once a delivery, so nothing is computed before it is asked for.
    """

    __slots__ = ("_attempt", "_deadline", "_event_id", "_fence", "_handler")

    def __init__(
        self,
        event_id: UUID,
        handler: str,
        attempt: int,
        fence: int,
        deadline: float | None = None,
    ) -> None:
        self._event_id = event_id
        self._handler = handler
        self._attempt = attempt
        self._fence = fence
        self._deadline = deadline

    @property
    def handler(self) -> str:
        """The name under which the handler is registered."""
        return self._handler

    @property
    def attempt(self) -> int:
        """Which attempt this is, from 1. A snooze counts none."""
        return self._attempt

    @property
    def idempotency_key(self) -> str:
        """``"{event id}:{handler}"``: the same for every run of this handler for this event.

        Hand it to a service that can tell a repeated request by a key.
        """
        return f"{self._event_id}:{self._handler}"

    @property
    def fence(self) -> int:
        """A number that only grows for a lane, and so for a key: one with each new holder.

        Store it beside what the handler writes outside the bus's database and refuse a lower one,
        so that a worker that was taken for dead cannot overwrite its successor's work.
        """
        return self._fence

    @property
    def deadline(self) -> float | None:
        """When the handler's time is up, as a ``time.monotonic()`` value; ``None``: no limit."""
        return self._deadline

    def __repr__(self) -> str:
        return f"<Context {self.idempotency_key} attempt={self._attempt} fence={self._fence}>"
