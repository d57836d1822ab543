from __future__ import annotations

import functools
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Optional
from uuid import UUID

import pytest
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from sqlalchemy_relaybus.event import Context, Event
from sqlalchemy_relaybus.exc import HandlerSignatureError
from sqlalchemy_relaybus.inject import Injection, resolve

if TYPE_CHECKING:
    from decimal import Decimal

EVENT = Event(UUID("018f3f5e-7b1a-7c3d-9e2f-001122334455"), "order.placed", "{}")
CONTEXT = Context(EVENT.id, "mail.confirm", attempt=2, fence=9)
SESSION = object()
NAMES = {id(EVENT): "event", id(CONTEXT): "context", id(SESSION): "session"}


class OwnSession(Session):
    pass


class OwnAsyncSession(AsyncSession):
    pass


def called(function: Callable[..., Any], mode: str = "transactional") -> Any:
    """What *function*, which returns its arguments, was given, by name."""
    got = resolve("h", function, mode).invoke(function, EVENT, CONTEXT, SESSION)
    if isinstance(got, dict):
        return {key: NAMES.get(id(value), value) for key, value in got.items()}
    return [NAMES.get(id(value), value) for value in got]


# Which parameter gets what


def nothing() -> Any:
    return ()


def bare(e) -> Any:  # type: ignore[no-untyped-def]
    return (e,)


def anything(e: Any) -> Any:
    return (e,)


def event_(e: Event) -> Any:
    return (e,)


def context(c: Context) -> Any:
    return (c,)


def session(s: Session) -> Any:
    return (s,)


def event_context(e: Event, c: Context) -> Any:
    return e, c


def context_event(c: Context, e: Event) -> Any:
    return c, e


def bare_context(e, c: Context) -> Any:  # type: ignore[no-untyped-def]
    return e, c


def event_session(e: Event, s: Session) -> Any:
    return e, s


def session_event(s: Session, e: Event) -> Any:
    return s, e


def all_three(e: Event, c: Context, s: Session) -> Any:
    return e, c, s


def all_three_turned(e: Event, s: Session, c: Context) -> Any:
    return e, s, c


def all_three_backwards(s: Session, c: Context, e: Event) -> Any:
    return s, c, e


def wrapped_types(
    e: Annotated[Event, "x"],
    c: Context | None,
    s: Optional[Annotated[Session, "y"]],  # noqa: UP045 - the old form must work too
) -> Any:
    return e, c, s


def twice_quoted(e: "Event", c: "Context | None" = None) -> Any:  # noqa: UP037
    return e, c


def keyword_only(*, e: Event, s: Session) -> Any:
    return e, s


def positional_only(e: Event, c: Context, /) -> Any:
    return e, c


def left_alone(e: Event, limit: int = 3, c: Context | None = None, *, flag=True) -> Any:  # type: ignore[no-untyped-def]
    return e, limit, c, flag


def undefined_but_optional(e: Event, d: Decimal | None = None, c: Context | None = None) -> Any:
    return e, d, c


def stars(e: Event, *args: Session, **kwargs: Context) -> Any:
    return e, args, kwargs


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (nothing, []),
        (bare, ["event"]),
        (lambda e: (e,), ["event"]),
        (anything, ["event"]),
        (event_, ["event"]),
        (context, ["context"]),
        (session, ["session"]),
        (event_context, ["event", "context"]),
        (context_event, ["context", "event"]),
        (bare_context, ["event", "context"]),
        (event_session, ["event", "session"]),
        (session_event, ["session", "event"]),
        (all_three, ["event", "context", "session"]),
        (all_three_turned, ["event", "session", "context"]),
        (all_three_backwards, ["session", "context", "event"]),
        (wrapped_types, ["event", "context", "session"]),
        (twice_quoted, ["event", "context"]),
        (keyword_only, ["event", "session"]),
        (positional_only, ["event", "context"]),
        (left_alone, ["event", 3, "context", True]),
        (undefined_but_optional, ["event", None, "context"]),
        (stars, ["event", (), {}]),
    ],
)
def test_arguments(function: Callable[..., Any], expected: list[Any]) -> None:
    assert called(function) == expected


# Kinds of callables


class Shop:
    def method(self, e: Event, s: Session) -> Any:
        return e, s

    @classmethod
    def of_class(cls, e: Event) -> Any:
        return (e,)

    @staticmethod
    def static(e: Event, c: Context) -> Any:
        return e, c

    async def coroutine(self, e: Event) -> Any:
        return (e,)

    def __call__(self, e) -> Any:  # type: ignore[no-untyped-def]
        return (e,)


class AsyncShop:
    async def __call__(self, e: Event, s: AsyncSession) -> Any:
        return e, s


class Decorating:
    """A decorator in the form of an object, as some libraries have it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)

    async def __call__(self, *args: Any) -> Any:
        return await self.__wrapped__(*args)  # type: ignore[attr-defined]


def configured(factor: int, e: Event, s: Session | None = None, *, c: Context) -> Any:
    return factor, e, s, c


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


async def coroutine(e: Event, c: Context) -> Any:
    return e, c


async def coroutine_session(e: Event, s: AsyncSession) -> Any:
    return e, s


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (Shop().method, ["event", "session"]),
        (Shop.of_class, ["event"]),
        (Shop.static, ["event", "context"]),
        (Shop(), ["event"]),
        (functools.partial(configured, 2), [2, "event", "session", "context"]),
        (
            functools.partial(functools.partial(configured, 2), s=None),
            [2, "event", None, "context"],
        ),
        # everything after a parameter bound by name goes by name
        (functools.partial(configured, factor=2), [2, "event", "session", "context"]),
        (functools.partial(Shop().method), ["event", "session"]),
        (functools.partial(Shop()), ["event"]),
        (decorated(event_session), ["event", "session"]),
        (decorated(decorated(left_alone)), ["event", 3, "context", True]),
    ],
)
def test_plain_callables(function: Callable[..., Any], expected: list[Any]) -> None:
    assert not resolve("h", function, "transactional").is_async
    assert called(function) == expected


@pytest.mark.parametrize(
    "function",
    [
        coroutine,
        coroutine_session,
        Shop().coroutine,
        AsyncShop(),
        functools.partial(coroutine),
        functools.partial(AsyncShop()),
        functools.partial(Shop().coroutine),
        Decorating(coroutine),
    ],
)
def test_coroutine_functions(function: Callable[..., Any]) -> None:
    injection = resolve("h", function, "transactional")
    assert injection.is_async
    running = injection.invoke(function, EVENT, CONTEXT, SESSION)
    with pytest.raises(StopIteration) as done:
        running.send(None)
    assert done.value.value[0] is EVENT


# What it tells about the session


def connection(e: Event, s: Connection) -> Any: ...
def own_session(e: Event, s: OwnSession | None = None) -> Any: ...
async def own_async_session(s: OwnAsyncSession) -> Any: ...


@pytest.mark.parametrize("mode", ["transactional"])
@pytest.mark.parametrize(
    ("function", "kind", "cls"),
    [
        (event_, None, None),
        (event_session, "session", Session),
        (own_session, "session", OwnSession),
        (connection, "connection", Connection),
        (coroutine_session, "async_session", AsyncSession),
        (own_async_session, "async_session", OwnAsyncSession),
    ],
)
def test_session_kind_and_class(
    function: Callable[..., Any], kind: str | None, cls: type | None, mode: str
) -> None:
    injection = resolve("h", function, mode)
    assert injection.session_kind == kind
    assert injection.session_class is cls


def test_an_injection_is_a_value() -> None:
    one, two = (resolve("h", left_alone, "at_least_once") for _ in range(2))
    assert one == two
    assert isinstance(one, Injection)
    assert one.positional == ("event",)
    assert one.keywords == (("c", "context"),)


# What is refused


async def blocking_session(e: Event, s: Session) -> None: ...
async def blocking_connection(e: Event, conn: Connection) -> None: ...
async def async_connection(e: Event, conn: AsyncConnection) -> None: ...
def plain_async_session(e: Event, s: AsyncSession) -> None: ...
def optional_async_session(e: Event, s: AsyncSession | None = None) -> None: ...
def number(e: Event, n: int) -> None: ...
def two_bare(a, b) -> None: ...  # type: ignore[no-untyped-def]
def bare_beside_event(e: Event, b) -> None: ...  # type: ignore[no-untyped-def]
def two_events(a: Event, b: Event) -> None: ...
def two_sessions(a: Session, b: Connection) -> None: ...
def either(s: Session | Connection) -> None: ...
def undefined(e: Event, d: Decimal) -> None: ...
def misspelt(e: Evnt) -> None: ...  # type: ignore[name-defined] # noqa: F821
def out_of_reach(limit: int = 3, e: Event | None = None, /) -> None: ...
def generator(e: Event) -> Iterator[int]:
    yield 1


async def async_generator(e: Event) -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("function", "parameter", "fix"),
    [
        (blocking_session, "s", "AsyncSession"),
        (blocking_connection, "conn", "AsyncSession"),
        (async_connection, "conn", "AsyncSession"),
        (plain_async_session, "s", "coroutine function"),
        (optional_async_session, "s", "coroutine function"),
        (number, "n", "int is nothing .* give it a default"),
        (two_bare, "b", "'a', 'b'; annotate it"),
        (bare_beside_event, "b", "'e' gets the event; annotate it"),
        (two_events, "b", "given to 'a' already"),
        (two_sessions, "b", "given to 'a' already"),
        (either, "s", "nothing that a handler is given"),
        (undefined, "d", "TYPE_CHECKING"),
        (misspelt, "e", "Evnt"),
        (out_of_reach, "e", "positional-only"),
        (generator, None, "yield"),
        (async_generator, None, "yield"),
        (decorated(coroutine), None, "async def"),
        (Shop, None, "class"),
        (Shop.method, "self", "annotate"),
        (7, None, "not callable"),
        (max, None, "signature cannot be read"),
    ],
)
def test_refused(function: Any, parameter: str | None, fix: str) -> None:
    with pytest.raises(HandlerSignatureError, match=fix) as caught:
        resolve("stock.reserve", function, "transactional")
    assert caught.value.parameter == parameter
    assert caught.value.handler == "stock.reserve"
    assert "'stock.reserve'" in str(caught.value)


@pytest.mark.parametrize("mode", ["at_least_once", "at_most_once"])
@pytest.mark.parametrize(
    "function", [event_session, connection, own_session, coroutine_session, own_async_session]
)
def test_a_session_needs_a_mode_that_has_one(function: Callable[..., Any], mode: str) -> None:
    with pytest.raises(HandlerSignatureError, match="mode='transactional'") as caught:
        resolve("h", function, mode)
    assert caught.value.parameter == "s"
    assert repr(mode) in str(caught.value)


def test_the_asyncio_extension_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "sqlalchemy.ext.asyncio")
    assert resolve("h", event_session, "transactional").session_kind == "session"
    with pytest.raises(HandlerSignatureError, match="nothing that a handler is given"):
        resolve("h", number, "transactional")
    assert "sqlalchemy.ext.asyncio" not in sys.modules


# The context


def test_context() -> None:
    assert CONTEXT.idempotency_key == "018f3f5e-7b1a-7c3d-9e2f-001122334455:mail.confirm"
    assert (CONTEXT.handler, CONTEXT.attempt, CONTEXT.fence) == ("mail.confirm", 2, 9)
    assert CONTEXT.deadline is None
    assert Context(EVENT.id, "h", 1, 1, 12.5).deadline == 12.5
    with pytest.raises(AttributeError):
        CONTEXT.attempt = 3  # type: ignore[misc]
    with pytest.raises(AttributeError):
        CONTEXT.other = 3  # type: ignore[attr-defined]
