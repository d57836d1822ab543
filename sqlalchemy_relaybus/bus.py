"""The bus: a registry of what handles what, and the way in for events. No I/O of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Literal, TypeVar
from uuid import UUID

from sqlalchemy import Connection
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from . import codec
from .event import Event
from .exc import (
    ConfigurationError,
    DuplicateHandlerError,
    HandlerSignatureError,
    InvalidEventError,
    UnroutedEventError,
    as_seconds,
)
from .inject import Injection, resolve
from .notify import Waker
from .retry import MAX_DELAY, Exponential, RetryPolicy
from .session import SessionHook, publish_on_connection
from .stores.base import NewEvent
from .tables import DEFAULT_PREFIX, Tables, tables_for

F = TypeVar("F", bound=Callable[..., Any])
Mode = Literal["at_least_once", "transactional"]
MODES = ("at_least_once", "transactional")


@dataclass(frozen=True, slots=True)
class Handler:
    """A registered handler."""

    name: str
    types: tuple[str, ...]
    function: Callable[..., Any]
    mode: Mode
    retry: RetryPolicy
    #: seconds a run may take; ``None``: no limit
    timeout: float | None
    session_factory: Callable[..., Session] | None
    injection: Injection


class RelayBus:
    """Takes events in the application's transactions and names the handlers that they go to.

    One instance describes one set of tables: *schema* (``None``: the search path's) and *prefix*
    say where they are. *unrouted* says what becomes of an event that no handler takes: ``"error"``
    refuses it, ``"store"`` keeps it without deliveries. *session_factory* makes the sessions of
    transactional handlers that name none; without one, a plain ``Session`` on the worker's engine.
    *wake*: after a session's commit, hint to idle workers that there is something new, from a
    thread with a connection of its own; without it, and for events that are published on a
    ``Connection``, they notice at their next look.
    """

    def __init__(
        self,
        *,
        schema: str | None = None,
        prefix: str = DEFAULT_PREFIX,
        unrouted: Literal["error", "store"] = "error",
        session_factory: Callable[..., Session] | None = None,
        wake: bool = True,
    ) -> None:
        if unrouted not in ("error", "store"):
            raise ConfigurationError(f"unrouted must be 'error' or 'store', not {unrouted!r}")
        self._tables = tables_for(schema, prefix)
        self._unrouted = unrouted
        self._session_factory = session_factory
        self._handlers: dict[str, Handler] = {}
        self._routes: dict[str, tuple[str, ...]] = {}
        self._hook = SessionHook(self._tables, Waker(self._tables) if wake else None)

    @property
    def tables(self) -> Tables:
        """The tables that this bus writes."""
        return self._tables

    @property
    def session_factory(self) -> Callable[..., Session] | None:
        """What makes the sessions of transactional handlers that name none."""
        return self._session_factory

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The registered handlers by name; a read-only view."""
        return MappingProxyType(self._handlers)

    # -- handlers ------------------------------------------------------------------------------

    def handler(
        self,
        *types: str,
        name: str,
        mode: Mode = "at_least_once",
        retry: RetryPolicy | None = None,
        timeout: timedelta | float | None = None,
        session_factory: Callable[..., Session] | None = None,
    ) -> Callable[[F], F]:
        """Register the decorated function for events of the given *types*.

        *name* identifies the handler in stored deliveries: keep it when the function is renamed or
        moved. *retry* says how often and how soon a failed delivery is tried again (default:
        ``Exponential()``); *timeout* (seconds) ends an attempt that takes longer. In the mode
        ``"transactional"`` the function takes a ``Session`` or ``Connection``, and what it writes
        there commits together with the delivery's completion.

        Raises :class:`DuplicateHandlerError` for a name that is taken and
        :class:`HandlerSignatureError` for parameters that cannot be filled.
        """
        codec.check_handler_name(name)
        if not types:
            raise ConfigurationError(f"handler {name!r}: name at least one event type")
        for type_ in types:
            if callable(type_):
                raise ConfigurationError('use it as @bus.handler("event.type", name="...")')
        types = tuple(codec.check_type(type_) for type_ in types)
        if mode not in MODES:
            raise ConfigurationError(
                f"handler {name!r}: the mode must be one of {', '.join(MODES)}, not {mode!r}"
            )
        if session_factory is not None and mode != "transactional":
            raise ConfigurationError(
                f"handler {name!r}: a session_factory serves the mode 'transactional' only"
            )
        limit = None if timeout is None else as_seconds(timeout)
        if limit == 0:
            raise ConfigurationError(f"handler {name!r}: the timeout must be more than 0 s")

        def register(function: F) -> F:
            if name in self._handlers:
                raise DuplicateHandlerError(name)
            injection = resolve(name, function, mode)
            if mode == "transactional" and injection.is_async:
                raise HandlerSignatureError(
                    name,
                    None,
                    "a transactional handler is a plain function with a Session for now; make it "
                    "'def' instead of 'async def'",
                )
            self._handlers[name] = Handler(
                name,
                types,
                function,
                mode,
                retry if retry is not None else Exponential(),
                limit,
                session_factory,
                injection,
            )
            for type_ in dict.fromkeys(types):
                self._routes[type_] = (*self._routes.get(type_, ()), name)
            return function

        return register

    # -- events --------------------------------------------------------------------------------

    def attach(
        self,
        target: type[Session] | Session | sessionmaker[Any] | scoped_session[Any],
    ) -> None:
        """Let sessions of *target* insert this bus's events when they flush. Idempotent.

        A session that is not attached is given the hook by its first ``publish()``; attaching
        saves that.
        """
        self._hook.attach(target)

    def detach(
        self,
        target: type[Session] | Session | sessionmaker[Any] | scoped_session[Any],
    ) -> None:
        """Undo :meth:`attach`."""
        self._hook.detach(target)

    def publish(
        self,
        target: Session | scoped_session[Any] | Connection,
        type: str,
        payload: Any,
        *,
        key: str | None = None,
        id: UUID | str | None = None,
        headers: Mapping[str, str] | None = None,
        delay: timedelta | float | None = None,
    ) -> Event:
        """Publish an event in the transaction of *target*; it is stored if that commits.

        On a session it is written with the next flush, at the latest by the commit; on a
        connection at once. Events with the same *key* (any text of up to 1,024 bytes) are handled
        in the order in which their transactions committed, one at a time for each handler.

        *payload* is plain JSON data and is copied now. *id* makes publishing again harmless: a
        handler that the event has had a delivery for gets no other one. A text that is no UUID is
        mapped to one. *delay* (seconds) is added to the database's clock.

        Raises a :class:`PublishError`, with nothing queued or written, for anything that cannot be
        stored, and :class:`UnroutedEventError` where no handler takes *type*.
        """
        new = self._new(type, payload, key, id, headers, delay)
        if isinstance(target, Session):
            self._hook.publish(target, new)
        elif isinstance(target, scoped_session):
            self._hook.publish(target(), new)
        elif isinstance(target, Connection):
            publish_on_connection(self._tables, target, [new])
        else:
            raise TypeError(
                f"cannot publish on {target!r}: give a Session, a scoped_session or a Connection"
            )
        return new.event

    def _new(
        self,
        type: str,
        payload: Any,
        key: str | None,
        id: UUID | str | None,
        headers: Mapping[str, str] | None,
        delay: timedelta | float | None,
    ) -> NewEvent:
        type = codec.check_type(type)
        key = codec.check_key(key)
        handlers: Sequence[str] = self._routes.get(type, ())
        if not handlers and self._unrouted == "error":
            raise UnroutedEventError(type)
        if id is None:
            event_id, original = codec.new_event_id(), None
        else:
            event_id, original = codec.event_id(id)
        if original is not None:
            headers = {**(headers or {}), codec.ORIGINAL_ID_HEADER: original}
        wait = None
        if delay is not None:
            try:
                wait = as_seconds(delay)
            except (TypeError, ValueError) as error:
                raise InvalidEventError("delay", str(error)) from None
            if wait > MAX_DELAY:
                raise InvalidEventError("delay", "at most 100 years can be stored")
        event = Event(
            event_id, type, codec.encode_payload(payload), key, codec.encode_headers(headers)
        )
        return NewEvent(event, handlers, wait, id is not None)
