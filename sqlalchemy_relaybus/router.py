"""What handles what: handlers by name, and the names that each type of event goes to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Literal, NoReturn, TypeAlias, TypeVar, get_args, overload

from sqlalchemy.orm import scoped_session, sessionmaker

from . import codec
from .exc import ConfigurationError, DuplicateHandlerError, HandlerSignatureError, as_seconds, shown
from .inject import Injection, resolve
from .retry import Exponential, RetryPolicy

#: Makes a session: a sessionmaker, or an async_sessionmaker for coroutine functions.
SessionFactory: TypeAlias = Callable[..., Any]
#: skip: later events of the key go on. block: they wait until the dead one is requeued, discarded
#: or released. park: likewise, and they are set aside, out of the ready ones.
OnDead = Literal["skip", "block", "park"]
OnDelayed = Literal["block", "skip"]
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
    session_factory: SessionFactory | None
    injection: Injection
    #: what a dead one does to later events of its key, and one that is delayed or snoozed
    on_dead: OnDead = "skip"
    on_delayed: OnDelayed = "block"

    @property
    def transactional(self) -> bool:
        """Whether its delivery is completed in the transaction that it is given."""
        return self.mode == "transactional"


def _is_policy(retry: object) -> bool:
    """Whether *retry* is one, and no class of which one was to be made."""
    return (
        not isinstance(retry, type)
        and isinstance(retry, RetryPolicy)
        and isinstance(retry.max_attempts, int)
        and retry.max_attempts >= 1
    )


def check_session_factory(owner: str, factory: object) -> None:
    """Raise unless sessions can come from *factory*."""
    if not callable(factory):
        raise ConfigurationError(
            f"{owner}: session_factory makes a new session for each delivery, such as "
            f"sessionmaker(engine); {shown(factory)} makes none"
        )


def _check_factory_serves(handler: str, factory: object, injection: Injection) -> None:
    """Raise if what *factory* makes is not what the handler takes, as far as the factory tells."""
    if injection.session_kind == "connection":
        raise HandlerSignatureError(
            handler,
            None,
            "a Connection is the worker's engine's, so its session_factory would serve nothing; "
            "leave it out, or take a Session",
        )
    is_async = injection.session_kind == "async_session"
    # whoever has an async_sessionmaker has imported its module
    asyncio = sys.modules.get("sqlalchemy.ext.asyncio")
    if is_async and isinstance(factory, sessionmaker | scoped_session):
        raise HandlerSignatureError(
            handler,
            None,
            "it takes an AsyncSession, and its session_factory makes none; give it an "
            "async_sessionmaker",
        )
    if (
        not is_async
        and asyncio is not None
        and isinstance(factory, asyncio.async_sessionmaker | asyncio.async_scoped_session)
    ):
        raise HandlerSignatureError(
            handler,
            None,
            "it takes a Session, and its session_factory makes an AsyncSession; give it a "
            "sessionmaker, or make it a coroutine function that takes an AsyncSession",
        )


class Router:
    """A group of handlers, for a bus to include: a module of an application has one of its own."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}
        self._routes: dict[str, tuple[str, ...]] = {}

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The registered handlers by name; a read-only view."""
        return MappingProxyType(self._handlers)

    @overload
    def handler(
        self,
        *types: str,
        name: str,
        mode: Mode = ...,
        retry: RetryPolicy | None = ...,
        timeout: timedelta | float | None = ...,
        session_factory: SessionFactory | None = ...,
        on_dead: OnDead = ...,
        on_delayed: OnDelayed = ...,
    ) -> Callable[[F], F]: ...

    @overload
    def handler(self, function: Callable[..., Any], /) -> NoReturn:
        """Without the parentheses: always an error."""

    def handler(
        self,
        *types: Any,
        name: str | None = None,
        mode: Mode = "at_least_once",
        retry: RetryPolicy | None = None,
        timeout: timedelta | float | None = None,
        session_factory: SessionFactory | None = None,
        on_dead: OnDead = "skip",
        on_delayed: OnDelayed = "block",
    ) -> Callable[[F], F]:
        """Register the decorated function for events of the given *types*.

        *name* identifies the handler in stored deliveries: keep it when the function is renamed or
        moved. *retry* says how often and how soon a failed delivery is tried again (default:
        ``Exponential()``); *timeout* (seconds) ends an attempt that takes longer. In the mode
        ``"transactional"`` the function takes a ``Session`` or ``Connection``, and what it writes
        there commits together with the delivery's completion.

        *on_dead* and *on_delayed* say what becomes of later events of the same key while one is in
        the dead letters, delayed or snoozed: with ``"skip"`` they go on, with ``"block"`` they wait
        for it, with ``on_dead="park"`` they are set aside as well until it is requeued, discarded
        or released (:mod:`~sqlalchemy_relaybus.admin`). While one is to be tried again they always
        wait.

        Raises :class:`DuplicateHandlerError` for a name that is taken and
        :class:`HandlerSignatureError` for parameters that cannot be filled.
        """
        if name is None or any(callable(type_) for type_ in types):
            raise ConfigurationError(
                "a handler is registered with the event types that it takes and a name of its own: "
                '@bus.handler("order.placed", name="mail.confirm")'
            )
        codec.check_handler_name(name)
        if not types:
            raise ConfigurationError(f"handler {name!r}: name at least one event type")
        types = tuple(codec.check_type(type_) for type_ in types)
        if mode not in MODES:
            raise ConfigurationError(
                f"handler {name!r}: the mode must be one of {', '.join(MODES)}, not {shown(mode)}"
            )
        for choice, value, known in (
            ("on_dead", on_dead, get_args(OnDead)),
            ("on_delayed", on_delayed, get_args(OnDelayed)),
        ):
            if value not in known:
                raise ConfigurationError(
                    f"handler {name!r}: {choice} must be one of {', '.join(known)}, "
                    f"not {shown(value)}"
                )
        if session_factory is not None:
            if mode != "transactional":
                raise ConfigurationError(
                    f"handler {name!r}: a session_factory serves the mode 'transactional' only"
                )
            check_session_factory(f"handler {name!r}", session_factory)
        try:
            limit = None if timeout is None else as_seconds(timeout)
        except ValueError as error:
            raise ConfigurationError(f"handler {name!r}: timeout {error}") from None
        if limit == 0:
            raise ConfigurationError(
                f"handler {name!r}: timeout 0 would end every run; leave it out for no limit"
            )
        if retry is not None and not _is_policy(retry):
            raise ConfigurationError(
                f"handler {name!r}: retry must be a policy such as Exponential(max_attempts=5), "
                f"not {shown(retry)}"
            )

        def register(function: F) -> F:
            if name in self._handlers:
                raise DuplicateHandlerError(name)
            injection = resolve(name, function, mode)
            if mode == "transactional" and injection.session_kind is None:
                raise HandlerSignatureError(
                    name,
                    None,
                    "a transactional handler takes the session that its delivery completes in; add "
                    "a parameter such as 'session: Session', or 'session: AsyncSession' to a "
                    "coroutine function",
                )
            if session_factory is not None:
                _check_factory_serves(name, session_factory, injection)
            self._handlers[name] = Handler(
                name,
                types,
                function,
                mode,
                retry if retry is not None else Exponential(),
                limit,
                session_factory,
                injection,
                on_dead,
                on_delayed,
            )
            for type_ in types:
                self._add_routes(type_, [name])
            return function

        return register

    def route(self, type: str, *, to: Iterable[str]) -> None:
        """Let events of *type* go to handlers of other processes too, by their names.

        This process publishes the deliveries; a worker that has a handler of that name runs it.
        """
        type = codec.check_type(type)
        if isinstance(to, str):
            raise ConfigurationError(f"route {type!r}: give a list of names, to=[{to!r}]")
        names = list(to) if isinstance(to, Iterable) else []
        if not names:
            raise ConfigurationError(
                f'route {type!r}: name the handlers that it leads to, as in to=["mail.confirm"], '
                f"not {shown(to)}"
            )
        for name in names:
            codec.check_handler_name(name)
        self._add_routes(type, names)

    def include(self, router: Router) -> None:
        """Add the handlers and routes that *router* has now.

        Raises :class:`DuplicateHandlerError`, adding none, for a name that is taken.
        """
        if not isinstance(router, Router):
            raise ConfigurationError(f"include() takes a Router, not {shown(router)}")
        for name in router._handlers:
            if name in self._handlers:
                raise DuplicateHandlerError(name)
        self._handlers.update(router._handlers)
        for type, names in router._routes.items():
            self._add_routes(type, names)

    def _add_routes(self, type: str, names: Iterable[str]) -> None:
        self._routes[type] = tuple(dict.fromkeys((*self._routes.get(type, ()), *names)))
