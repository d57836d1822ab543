"""Handlers, and where events go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy_relaybus import (
    ConfigurationError,
    DuplicateHandlerError,
    HandlerSignatureError,
    InvalidEventError,
)

from .case import Case

CASES: Mapping[str, Sequence[Case]] = {
    "Registering handlers": [
        Case(
            "the decorator without parentheses",
            ("@bus.handler\ndef confirm(event): ..."),
            ConfigurationError,
            (
                "a handler is registered with the event types that it takes and a name "
                'of its own: @bus.handler("order.placed", name="mail.confirm")'
            ),
        ),
        Case(
            "no name",
            ('@bus.handler("order.placed")\ndef confirm(event): ...'),
            ConfigurationError,
            (
                "a handler is registered with the event types that it takes and a name "
                'of its own: @bus.handler("order.placed", name="mail.confirm")'
            ),
        ),
        Case(
            "no event type",
            ('@bus.handler(name="mail")\ndef confirm(event): ...'),
            ConfigurationError,
            "handler 'mail': name at least one event type",
        ),
        Case(
            "an event type with a blank",
            ('@bus.handler("order placed", name="mail")\ndef confirm(event): ...'),
            InvalidEventError,
            (
                "event type: 'order placed' contains white space, a control character or "
                'a lone surrogate; use a name such as "order.placed"'
            ),
        ),
        Case(
            "an unknown choice for dead ones",
            ('@bus.handler("order.placed", name="mail", on_dead="wait")\ndef confirm(event): ...'),
            ConfigurationError,
            "handler 'mail': on_dead must be one of skip, block, park, not 'wait'",
        ),
        Case(
            "an unknown choice for delayed ones",
            (
                '@bus.handler("order.placed", name="mail", on_delayed="park")\n'
                "def confirm(event): ..."
            ),
            ConfigurationError,
            "handler 'mail': on_delayed must be one of block, skip, not 'park'",
        ),
        Case(
            "a name that is no text",
            ('@bus.handler("order.placed", name=7)\ndef confirm(event): ...'),
            ConfigurationError,
            "a handler's name must be a str, not an int",
        ),
        Case(
            "a name with a blank",
            ('@bus.handler("order.placed", name="confirm by mail")\ndef confirm(event): ...'),
            ConfigurationError,
            (
                "'confirm by mail' cannot name a handler: give 1 to 200 of the "
                'characters A-Z a-z 0-9 _ . : / -, such as "mail.confirm"'
            ),
        ),
        Case(
            "a name that is taken",
            ('@bus.handler("order.placed", name="mail.confirm")\ndef confirm(event): ...'),
            DuplicateHandlerError,
            (
                "a handler named 'mail.confirm' is registered already; names identify "
                "stored deliveries, so give each handler a name of its own"
            ),
        ),
        Case(
            "an unknown mode",
            (
                '@bus.handler("order.placed", name="mail", mode="exactly_once")\n'
                "def confirm(event): ..."
            ),
            ConfigurationError,
            (
                "handler 'mail': the mode must be one of at_least_once, transactional, "
                "not 'exactly_once'"
            ),
        ),
        Case(
            "a policy's class",
            (
                '@bus.handler("order.placed", name="mail", retry=Exponential)\n'
                "def confirm(event): ..."
            ),
            ConfigurationError,
            (
                "handler 'mail': retry must be a policy such as "
                "Exponential(max_attempts=5), not <class "
                "'sqlalchemy_relaybus.retry.Exponential'>"
            ),
        ),
        Case(
            "a number as policy",
            ('@bus.handler("order.placed", name="mail", retry=5)\ndef confirm(event): ...'),
            ConfigurationError,
            ("handler 'mail': retry must be a policy such as Exponential(max_attempts=5), not 5"),
        ),
        Case(
            "a policy without attempts",
            "Exponential(max_attempts=0)",
            ConfigurationError,
            (
                "Exponential: max_attempts must be an int from 1 to 2147483647, not 0; "
                "the first run counts as an attempt"
            ),
        ),
        Case(
            "a policy with a negative wait",
            "Fixed(wait=-1)",
            ConfigurationError,
            (
                "Fixed: wait must be a timedelta or a number of seconds from 0 to "
                "3155760000 (100 years), not -1"
            ),
        ),
        Case(
            "a policy whose maximum is below its base",
            "Exponential(base=10, maximum=5)",
            ConfigurationError,
            ("Exponential: maximum (5 s) is below base (10 s); raise maximum or lower base"),
        ),
        Case(
            "a policy with a factor below 1",
            "Exponential(factor=0.5)",
            ConfigurationError,
            "Exponential: factor must be a number from 1 to 1e+06, not 0.5",
        ),
        Case(
            "a time limit of 0",
            ('@bus.handler("order.placed", name="mail", timeout=0)\ndef confirm(event): ...'),
            ConfigurationError,
            "handler 'mail': timeout 0 would end every run; leave it out for no limit",
        ),
        Case(
            "a time limit as text",
            ('@bus.handler("order.placed", name="mail", timeout="30")\ndef confirm(event): ...'),
            ConfigurationError,
            (
                "handler 'mail': timeout must be a timedelta or a number of seconds from "
                "0 to 3155760000 (100 years), not '30'"
            ),
        ),
        Case(
            "a session_factory outside the mode transactional",
            (
                '@bus.handler("order.placed", name="mail", '
                "session_factory=sessionmaker(engine))\n"
                "def confirm(event): ..."
            ),
            ConfigurationError,
            "handler 'mail': a session_factory serves the mode 'transactional' only",
        ),
        Case(
            "a session as session_factory",
            (
                '@bus.handler("order.placed", name="stock", mode="transactional", '
                "session_factory=session)\n"
                "def reserve(event, session: Session): ..."
            ),
            ConfigurationError,
            (
                "handler 'stock': session_factory makes a new session for each delivery, "
                "such as sessionmaker(engine); <sqlalchemy.orm.session.Session object at "
                "0x...> makes none"
            ),
        ),
        Case(
            "a sessionmaker for an AsyncSession",
            (
                '@bus.handler("order.placed", name="stock", mode="transactional", '
                "session_factory=sessionmaker(engine))\n"
                "async def reserve(event, session: AsyncSession): ..."
            ),
            HandlerSignatureError,
            (
                "handler 'stock': it takes an AsyncSession, and its session_factory makes none; "
                "give it an async_sessionmaker"
            ),
        ),
        Case(
            "an async_sessionmaker for a Session",
            (
                '@bus.handler("order.placed", name="stock", mode="transactional", '
                "session_factory=async_sessionmaker(async_engine))\n"
                "def reserve(event, session: Session): ..."
            ),
            HandlerSignatureError,
            (
                "handler 'stock': it takes a Session, and its session_factory makes an "
                "AsyncSession; give it a sessionmaker, or make it a coroutine function that takes "
                "an AsyncSession"
            ),
        ),
        Case(
            "a session_factory for a Connection",
            (
                '@bus.handler("order.placed", name="stock", mode="transactional", '
                "session_factory=sessionmaker(engine))\n"
                "def reserve(event, connection: Connection): ..."
            ),
            HandlerSignatureError,
            (
                "handler 'stock': a Connection is the worker's engine's, so its "
                "session_factory would serve nothing; leave it out, or take a Session"
            ),
        ),
    ],
    "Handlers' parameters": [
        Case(
            "nothing that can be called",
            'bus.handler("order.placed", name="mail")("confirm")',
            HandlerSignatureError,
            "handler 'mail': 'confirm' is not callable; register a function",
        ),
        Case(
            "a class",
            ('@bus.handler("order.placed", name="mail")\nclass Confirm: ...'),
            HandlerSignatureError,
            (
                "handler 'mail': Confirm is a class, and calling it only makes an "
                "instance; register a function, or an instance with __call__"
            ),
        ),
        Case(
            "a generator",
            ('@bus.handler("order.placed", name="mail")\ndef confirm(event): yield'),
            HandlerSignatureError,
            (
                "handler 'mail': is a generator function, whose body would never run; "
                "use no 'yield' in it"
            ),
        ),
        Case(
            "a plain function around a coroutine function",
            (
                "async def confirm(event): ...\n"
                '@bus.handler("order.placed", name="mail")\n'
                "@functools.wraps(confirm)\n"
                "def wrapped(*args): return confirm(*args)"
            ),
            HandlerSignatureError,
            (
                "handler 'mail': is a plain function around the coroutine function "
                "confirm; make the decorator's inner function 'async def' and await the "
                "handler in it"
            ),
        ),
        Case(
            "two parameters without annotations",
            ('@bus.handler("order.placed", name="mail")\ndef confirm(event, context): ...'),
            HandlerSignatureError,
            (
                "handler 'mail', parameter 'context': has no annotation to tell what it "
                "gets, and only a single one would be taken for the event, and there are "
                "'event', 'context'; annotate it with Event, Context or Session, or give "
                "it a default"
            ),
        ),
        Case(
            "one of another type",
            (
                '@bus.handler("order.placed", name="mail")\n'
                "def confirm(event: Event, attempt: int): ..."
            ),
            HandlerSignatureError,
            (
                "handler 'mail', parameter 'attempt': int is nothing that a handler is "
                "given; annotate it with Event, Context or (in the mode transactional) "
                "Session, AsyncSession or Connection, or give it a default"
            ),
        ),
        Case(
            "an annotation that is not defined",
            ('@bus.handler("order.placed", name="mail")\ndef confirm(event: "Placed"): ...'),
            HandlerSignatureError,
            (
                "handler 'mail', parameter 'event': its annotation 'Placed' cannot be "
                "evaluated (name 'Placed' is not defined); define the name at the level "
                "of the module and import it outside 'if TYPE_CHECKING:'"
            ),
        ),
        Case(
            "the event twice",
            (
                '@bus.handler("order.placed", name="mail")\n'
                "def confirm(event: Event, again: Event): ..."
            ),
            HandlerSignatureError,
            (
                "handler 'mail', parameter 'again': the event is given to 'event' "
                "already; remove one of them"
            ),
        ),
        Case(
            "a session in the default mode",
            (
                '@bus.handler("order.placed", name="mail")\n'
                "def confirm(event: Event, session: Session): ..."
            ),
            HandlerSignatureError,
            (
                "handler 'mail', parameter 'session': the mode 'at_least_once' gives no "
                "Session; register the handler with mode='transactional', or open one in "
                "the handler"
            ),
        ),
        Case(
            "no session in the mode transactional",
            (
                '@bus.handler("order.placed", name="stock", mode="transactional")\n'
                "def reserve(event: Event): ..."
            ),
            HandlerSignatureError,
            (
                "handler 'stock': a transactional handler takes the session that its "
                "delivery completes in; add a parameter such as 'session: Session', or "
                "'session: AsyncSession' to a coroutine function"
            ),
        ),
        Case(
            "a Session in a coroutine",
            (
                '@bus.handler("order.placed", name="stock", mode="transactional")\n'
                "async def reserve(event: Event, session: Session): ..."
            ),
            HandlerSignatureError,
            (
                "handler 'stock', parameter 'session': a coroutine function gets no "
                "Session, which would block the event loop; annotate it with "
                "AsyncSession, or make the handler a plain function"
            ),
        ),
        Case(
            "a Connection in a coroutine",
            (
                '@bus.handler("order.placed", name="stock", mode="transactional")\n'
                "async def reserve(event: Event, connection: Connection): ..."
            ),
            HandlerSignatureError,
            (
                "handler 'stock', parameter 'connection': a coroutine function gets no "
                "Connection, which would block the event loop; annotate it with "
                "AsyncSession, or make the handler a plain function"
            ),
        ),
        Case(
            "an AsyncSession in a plain function",
            (
                '@bus.handler("order.placed", name="stock", mode="transactional")\n'
                "def reserve(event: Event, session: AsyncSession): ..."
            ),
            HandlerSignatureError,
            (
                "handler 'stock', parameter 'session': a plain function gets no "
                "AsyncSession, which it could not await; annotate it with Session, or "
                "make the handler a coroutine function"
            ),
        ),
        Case(
            "an AsyncConnection",
            (
                '@bus.handler("order.placed", name="stock", mode="transactional")\n'
                "async def reserve(event: Event, connection: AsyncConnection): ..."
            ),
            HandlerSignatureError,
            (
                "handler 'stock', parameter 'connection': an AsyncConnection is not "
                "given to handlers; annotate it with AsyncSession and use its connection()"
            ),
        ),
        Case(
            "a session and a connection",
            (
                '@bus.handler("order.placed", name="stock", mode="transactional")\n'
                "def reserve(event: Event, session: Session, connection: Connection): ..."
            ),
            HandlerSignatureError,
            (
                "handler 'stock', parameter 'connection': the session is given to "
                "'session' already; remove one of them"
            ),
        ),
        Case(
            "a positional parameter that cannot be reached",
            (
                '@bus.handler("order.placed", name="mail")\n'
                "def confirm(retries=3, event: Event = None, /): ..."
            ),
            HandlerSignatureError,
            (
                "handler 'mail', parameter 'event': is positional-only and follows a "
                "parameter that keeps its default, so it cannot be given; move it before "
                "that one"
            ),
        ),
    ],
    "The bus, its routes and routers": [
        Case(
            "an unknown way with unrouted events",
            'RelayBus(unrouted="ignore")',
            ConfigurationError,
            "unrouted must be 'error' or 'store', not 'ignore'",
        ),
        Case(
            "a prefix that is no text",
            "RelayBus(prefix=None)",
            ConfigurationError,
            "prefix must be a str, not None",
        ),
        Case(
            "a prefix that no name in a database can have",
            'RelayBus(prefix="shop\\0")',
            ConfigurationError,
            "the prefix 'shop\\x00' has a NUL character in it",
        ),
        Case(
            "an engine as session_factory",
            "RelayBus(session_factory=engine)",
            ConfigurationError,
            (
                "the bus: session_factory makes a new session for each delivery, such as "
                "sessionmaker(engine); Engine(postgresql+psycopg:///shop) makes none"
            ),
        ),
        Case(
            "a route to a name instead of a list",
            'bus.route("order.placed", to="mail.confirm")',
            ConfigurationError,
            "route 'order.placed': give a list of names, to=['mail.confirm']",
        ),
        Case(
            "a route to nobody",
            'bus.route("order.placed", to=[])',
            ConfigurationError,
            (
                "route 'order.placed': name the handlers that it leads to, as in "
                'to=["mail.confirm"], not []'
            ),
        ),
        Case(
            "a route to what cannot be a name",
            'bus.route("order.placed", to=["mail confirm"])',
            ConfigurationError,
            (
                "'mail confirm' cannot name a handler: give 1 to 200 of the characters "
                'A-Z a-z 0-9 _ . : / -, such as "mail.confirm"'
            ),
        ),
        Case(
            "a router whose handler is there already",
            (
                "router = Router()\n"
                'router.handler("order.placed", name="mail.confirm")(lambda event: None)\n'
                "bus.include(router)"
            ),
            DuplicateHandlerError,
            (
                "a handler named 'mail.confirm' is registered already; names identify "
                "stored deliveries, so give each handler a name of its own"
            ),
        ),
        Case(
            "anything but a router",
            "bus.include([lambda event: None])",
            ConfigurationError,
            "include() takes a Router, not [<function <lambda> at 0x...>]",
        ),
    ],
}
