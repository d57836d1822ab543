"""A handler's signature, resolved once when it is registered.

Annotations decide what a parameter gets: the event, the context, or a session. What cannot be
given is a :class:`HandlerSignatureError` at registration, never at the first delivery.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias, Union

from sqlalchemy import Connection
from sqlalchemy.orm import Session

from sqlalchemy_relaybus.event import Context, Event
from sqlalchemy_relaybus.exc import HandlerSignatureError

#: The modes in which a handler works in a database transaction of the worker's making.
SESSION_MODES = ("transactional",)

Slot: TypeAlias = Literal["event", "context", "session"]
SessionKind: TypeAlias = Literal["session", "connection", "async_session"]
#: Calls ``(function, event, context, session)`` and returns what the function returns: a coroutine
#: where it is one.
Invoke: TypeAlias = Callable[[Callable[..., Any], Event, Context, Any], Any]


@dataclass(frozen=True, slots=True)
class Injection:
    """How to call a handler.

    ``positional`` and ``keywords`` (parameter, slot) tell what it is given; ``invoke`` calls it
    so. ``session_kind`` is ``None`` where it takes no session; otherwise ``session_class`` is the
    class in the annotation, which may be a subclass of SQLAlchemy's.
    """

    is_async: bool
    positional: tuple[Slot, ...]
    keywords: tuple[tuple[str, Slot], ...]
    session_kind: SessionKind | None
    session_class: type[Any] | None
    invoke: Invoke = field(repr=False, compare=False)


def resolve(name: str, function: Callable[..., Any], mode: str) -> Injection:
    """The injection for the handler *function*, named *name*, in *mode*.

    *function* is a plain or a coroutine function, a bound method, a callable object, or a
    ``functools.partial`` of one. Raises :class:`HandlerSignatureError` with the parameter at
    fault and the remedy.

    A parameter gets what its annotation says: ``Event``, ``Context``, and in the modes of
    :data:`SESSION_MODES` ``Session``, ``Connection`` or ``AsyncSession`` or a subclass of these;
    ``Annotated`` and ``X | None`` count as ``X``. The only parameter without annotation and
    default is the event. A parameter with a default that stands for none of these keeps it, as
    does one that a partial has bound; ``*args`` and ``**kwargs`` get nothing.
    """
    return _Resolver(name, function, mode).resolve()


class _Resolver:
    def __init__(self, name: str, function: Callable[..., Any], mode: str) -> None:
        self.name = name
        self.function = function
        self.mode = mode
        #: slot -> the parameter that gets it
        self.taken: dict[Slot, str] = {}
        self.session_kind: SessionKind | None = None
        self.session_class: type[Any] | None = None

    def resolve(self) -> Injection:
        self.is_async = self._is_async()
        signature, self.globals = self._signature()
        bound = self._bound_by_partial()
        parameters = [
            p
            for p in signature.parameters.values()
            if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in bound
        ]
        slots = self._slots(parameters)

        positional: list[Slot] = []
        keywords: list[tuple[str, Slot]] = []
        in_row = True  # no parameter was left out so far, so the next can go by position
        for parameter in signature.parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            slot = slots.get(parameter.name)
            if slot is None:
                in_row = False
            elif parameter.kind is parameter.KEYWORD_ONLY:
                keywords.append((parameter.name, slot))
            elif in_row:
                positional.append(slot)
            elif parameter.kind is parameter.POSITIONAL_ONLY:
                raise self._error(
                    parameter.name,
                    "is positional-only and follows a parameter that keeps its default, so it "
                    "cannot be given; move it before that one",
                )
            else:
                keywords.append((parameter.name, slot))
        return Injection(
            is_async=self.is_async,
            positional=tuple(positional),
            keywords=tuple(keywords),
            session_kind=self.session_kind,
            session_class=self.session_class,
            invoke=_invoke(tuple(positional), tuple(keywords)),
        )

    # What kind of function it is

    def _is_async(self) -> bool:
        function = self.function
        if not callable(function):
            raise self._error(None, f"{function!r} is not callable; register a function")
        if isinstance(function, type):
            raise self._error(
                None,
                f"{function.__qualname__} is a class, and calling it only makes an instance; "
                "register a function, or an instance with __call__",
            )
        target = _code_of(function)
        if any(map(inspect.iscoroutinefunction, (function, target, type(target).__call__))):
            return True
        inner = inspect.unwrap(target)
        if inspect.iscoroutinefunction(inner):
            # It may return a coroutine that nobody would await, and the event would be lost.
            raise self._error(
                None,
                "is a plain function around the coroutine function "
                f"{getattr(inner, '__qualname__', inner)}; make the decorator's inner function "
                "'async def' and await the handler in it",
            )
        if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
            raise self._error(
                None, "is a generator function, whose body would never run; use no 'yield' in it"
            )
        return False

    def _signature(self) -> tuple[inspect.Signature, dict[str, Any]]:
        try:
            if sys.version_info >= (3, 14):
                import annotationlib

                # annotations are evaluated one at a time below, so that one that is not defined
                # at run time harms its own parameter only
                signature = inspect.signature(
                    self.function, annotation_format=annotationlib.Format.FORWARDREF
                )
            else:
                signature = inspect.signature(self.function)
        except (ValueError, TypeError):
            raise self._error(
                None, "its signature cannot be read; wrap it in a function: def handle(event): ..."
            ) from None
        # strings in annotations belong to the module of the innermost function, whose signature
        # this is
        target = inspect.unwrap(_code_of(self.function), stop=lambda f: hasattr(f, "__signature__"))
        return signature, getattr(_code_of(target), "__globals__", {})

    def _bound_by_partial(self) -> frozenset[str]:
        function: Any = self.function
        names: set[str] = set()
        while isinstance(function, functools.partial):
            names.update(function.keywords)
            function = function.func
        return frozenset(names)

    # What each parameter gets

    def _slots(self, parameters: list[inspect.Parameter]) -> dict[str, Slot]:
        slots: dict[str, Slot] = {}
        bare: list[inspect.Parameter] = []
        for parameter in parameters:
            optional = parameter.default is not parameter.empty
            if parameter.annotation is parameter.empty:
                if not optional:
                    bare.append(parameter)
                continue
            try:
                annotation = _unwrap(self._evaluate(parameter))
            except Exception as error:  # an annotation may raise anything
                if optional:
                    continue
                raise self._error(
                    parameter.name,
                    f"its annotation {parameter.annotation!r} cannot be evaluated ({error}); "
                    "define the name at the level of the module and import it outside "
                    "'if TYPE_CHECKING:'",
                ) from error
            if annotation is Any and not optional:
                bare.append(parameter)
                continue
            slot = self._slot(parameter.name, annotation)
            if slot is None:
                if optional:
                    continue
                raise self._error(
                    parameter.name,
                    f"{_show(annotation)} is nothing that a handler is given; annotate it with "
                    "Event, Context or (in the mode transactional) Session, "
                    "AsyncSession or Connection, or give it a default",
                )
            self._take(parameter.name, slot)
            slots[parameter.name] = slot
        if len(bare) == 1 and "event" not in self.taken:
            self._take(bare[0].name, "event")
            slots[bare[0].name] = "event"
        elif bare:
            names = ", ".join(repr(p.name) for p in bare)
            why = (
                f"{self.taken['event']!r} gets the event"
                if "event" in self.taken
                else f"only a single one would be taken for the event, and there are {names}"
            )
            raise self._error(
                bare[-1].name,
                f"has no annotation to tell what it gets, and {why}; annotate it with Event, "
                "Context or Session, or give it a default",
            )
        return slots

    def _evaluate(self, parameter: inspect.Parameter) -> Any:
        def probe() -> None: ...

        # get_type_hints on a function with this annotation alone: others may fail
        probe.__annotations__ = {"it": parameter.annotation}
        return typing.get_type_hints(probe, globalns=self.globals, include_extras=True)["it"]

    def _slot(self, parameter: str, annotation: Any) -> Slot | None:
        if annotation is Event:
            return "event"
        if annotation is Context:
            return "context"
        cls = annotation if isinstance(annotation, type) else typing.get_origin(annotation)
        if not isinstance(cls, type):
            return None
        # Whoever has an AsyncSession to annotate with has imported its module.
        asyncio = sys.modules.get("sqlalchemy.ext.asyncio")
        if issubclass(cls, Session):
            self._check_session(parameter, cls, "session")
        elif issubclass(cls, Connection):
            self._check_session(parameter, cls, "connection")
        elif asyncio is None:
            return None
        elif issubclass(cls, asyncio.AsyncSession):
            self._check_session(parameter, cls, "async_session")
        elif issubclass(cls, asyncio.AsyncConnection):
            raise self._error(
                parameter,
                "an AsyncConnection is not given to handlers; annotate it with AsyncSession and "
                "use its connection()",
            )
        else:
            return None
        return "session"

    def _check_session(self, parameter: str, cls: type[Any], kind: SessionKind) -> None:
        if self.mode not in SESSION_MODES:
            raise self._error(
                parameter,
                f"the mode {self.mode!r} gives no {cls.__name__}; register the handler with "
                f"mode={SESSION_MODES[0]!r}, or open one in the handler",
            )
        if self.is_async and kind != "async_session":
            raise self._error(
                parameter,
                f"a coroutine function gets no {cls.__name__}, which would block the event loop; "
                "annotate it with AsyncSession, or make the handler a plain function",
            )
        if not self.is_async and kind == "async_session":
            raise self._error(
                parameter,
                f"a plain function gets no {cls.__name__}, which it could not await; annotate it "
                "with Session, or make the handler a coroutine function",
            )
        self.session_kind = kind
        self.session_class = cls

    def _take(self, parameter: str, slot: Slot) -> None:
        if slot in self.taken:
            raise self._error(
                parameter,
                f"the {slot} is given to {self.taken[slot]!r} already; remove one of them",
            )
        self.taken[slot] = parameter

    def _error(self, parameter: str | None, problem: str) -> HandlerSignatureError:
        return HandlerSignatureError(self.name, parameter, problem)


def _code_of(function: Any) -> Any:
    """The function behind partials, bound methods and callable objects."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif inspect.ismethod(function):
            function = function.__func__
        elif inspect.isroutine(function) or hasattr(function, "__wrapped__"):
            return function
        elif isinstance(call := type(function).__call__, types.FunctionType):
            return call
        else:
            return function


def _unwrap(annotation: Any) -> Any:
    """*annotation* without ``Annotated``, ``| None`` and ``type`` aliases."""
    while True:
        origin = typing.get_origin(annotation)
        if origin is Annotated:
            annotation = typing.get_args(annotation)[0]
        elif origin is Union or origin is types.UnionType:
            members = [m for m in typing.get_args(annotation) if m is not type(None)]
            if len(members) != 1:
                return annotation
            annotation = members[0]
        elif type(annotation).__name__ == "TypeAliasType":  # typing has it from 3.12 on
            annotation = annotation.__value__
        else:
            return annotation


def _show(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


# Calling


def _invoke(positional: tuple[Slot, ...], keywords: tuple[tuple[str, Slot], ...]) -> Invoke:
    if not keywords and positional in _DIRECT:
        return _DIRECT[positional]
    order: tuple[Slot, ...] = ("event", "context", "session")
    places = tuple(order.index(slot) for slot in positional)
    named = tuple((name, order.index(slot)) for name, slot in keywords)

    def invoke(function: Callable[..., Any], event: Event, context: Context, session: Any) -> Any:
        given = (event, context, session)
        return function(
            *[given[place] for place in places], **{name: given[place] for name, place in named}
        )

    return invoke


#: The usual signatures, called without building a tuple or dict.
_DIRECT: dict[tuple[Slot, ...], Invoke] = {
    (): lambda f, event, context, session: f(),
    ("event",): lambda f, event, context, session: f(event),
    ("context",): lambda f, event, context, session: f(context),
    ("session",): lambda f, event, context, session: f(session),
    ("event", "context"): lambda f, event, context, session: f(event, context),
    ("event", "session"): lambda f, event, context, session: f(event, session),
    ("session", "event"): lambda f, event, context, session: f(session, event),
    ("event", "context", "session"): lambda f, event, context, session: f(event, context, session),
    ("event", "session", "context"): lambda f, event, context, session: f(event, session, context),
}
