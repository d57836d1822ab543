"""Events from mapped objects: one at a time, or for every change of a class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import event
from sqlalchemy.orm import Session, object_session
from sqlalchemy.orm.exc import UnmappedInstanceError

from .codec import check_type
from .exc import ConfigurationError, shown
from .session import SessionHook, lacks_key
from .stores.base import NewEvent

C = TypeVar("C", bound=type[Any])
#: Makes a :class:`NewEvent` of ``(type, payload, key)``.
Make = Callable[[str, Any, "str | None"], NewEvent]


def record(
    hook: SessionHook,
    make: Callable[[Any, str | None], NewEvent],
    instance: object,
    payload: Any,
    key: Any,
) -> None:
    """Queue an event about *instance* on its session; callables are called once it has its key."""
    try:
        session = object_session(instance)
    except UnmappedInstanceError:
        raise ConfigurationError(
            f"{shown(instance)} is no object of a mapped class; publish on a session instead: "
            "bus.publish(session, ...)"
        ) from None
    if session is None:
        raise ConfigurationError(
            f"{shown(instance)} is in no session; add it to one before recording an event about it"
        )

    def new() -> NewEvent:
        if lacks_key(instance):
            raise ConfigurationError(
                f"{shown(instance)} has no primary key, and the event about it waits for that: it "
                "was taken out of its session before a flush; publish on the session instead"
            )
        return make(
            payload(instance) if callable(payload) else payload,
            key(instance) if callable(key) else key,
        )

    if callable(payload) or callable(key):
        hook.publish(session, new, after=instance)
    else:
        made = make(payload, key)  # so that what is wrong with it is told here
        hook.publish(session, lambda: made, after=instance)


@dataclass(frozen=True, slots=True)
class Changes:
    """Publishes an event for every change of a mapped class's objects that a flush writes."""

    hook: SessionHook
    make: Make
    #: mapper event to event type
    types: Mapping[str, str]
    payload: Callable[[Any], Any]
    key: Callable[[Any], str | None] | None

    @classmethod
    def of(
        cls,
        hook: SessionHook,
        make: Make,
        types: Mapping[str, str | None],
        payload: Callable[[Any], Any],
        key: Callable[[Any], str | None] | None,
    ) -> Changes:
        chosen = {name: check_type(type) for name, type in types.items() if type is not None}
        if not chosen:
            raise ConfigurationError(
                "record_changes() publishes nothing so; name an event type for insert, update or "
                "delete"
            )
        if not callable(payload) or (key is not None and not callable(key)):
            raise ConfigurationError(
                "payload and key of record_changes() are functions of the changed object, such as "
                'lambda order: {"id": order.id}'
            )
        return cls(hook, make, chosen, payload, key)

    def __call__(self, class_: C) -> C:
        """Listen on *class_* and its subclasses."""
        if not isinstance(class_, type):
            raise ConfigurationError(
                f"record_changes() decorates a mapped class, not {shown(class_)}"
            )
        for name in self.types:
            event.listen(class_, name, getattr(self, name), propagate=True)
        return class_

    # SQLAlchemy calls these during the flush, with the object's primary key set.

    def after_insert(self, mapper: object, connection: object, instance: Any) -> None:
        self._defer(instance, self.types["after_insert"])

    def after_update(self, mapper: object, connection: object, instance: Any) -> None:
        session = object_session(instance)
        # it is called for every dirty object, with or without anything to update
        if session is not None and session.is_modified(instance, include_collections=False):
            self._defer(instance, self.types["after_update"])

    def before_delete(self, mapper: object, connection: object, instance: Any) -> None:
        # its attributes can be loaded now, and not any more when it is gone
        made = self._new(instance, self.types["before_delete"])
        self._session(instance, lambda: made)

    def _defer(self, instance: Any, type: str) -> None:
        self._session(instance, lambda: self._new(instance, type))

    def _new(self, instance: Any, type: str) -> NewEvent:
        key = None if self.key is None else self.key(instance)
        return self.make(type, self.payload(instance), key)

    def _session(self, instance: Any, new: Callable[[], NewEvent]) -> None:
        session: Session | None = object_session(instance)
        assert session is not None  # it is being flushed
        self.hook.defer(session, new)
