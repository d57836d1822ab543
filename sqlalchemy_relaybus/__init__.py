"""A transactional outbox and event bus for applications on SQLAlchemy."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .bus import RelayBus
    from .event import Context, Event
    from .exc import (
        Bury,
        ConfigurationError,
        DuplicateHandlerError,
        HandlerSignatureError,
        InvalidEventError,
        LostLeaseError,
        PayloadError,
        PublishError,
        RelayBusError,
        Retry,
        SchemaError,
        SchemaMissingError,
        SchemaVersionError,
        Snooze,
        UnroutedEventError,
    )
    from .retention import PurgeResult, purge
    from .retry import Exponential, Fixed, NoRetry, RetryPolicy
    from .router import Handler, Router
    from .worker import Worker

__all__ = [
    "Bury",
    "ConfigurationError",
    "Context",
    "DuplicateHandlerError",
    "Event",
    "Exponential",
    "Fixed",
    "Handler",
    "HandlerSignatureError",
    "InvalidEventError",
    "LostLeaseError",
    "NoRetry",
    "PayloadError",
    "PublishError",
    "PurgeResult",
    "RelayBus",
    "RelayBusError",
    "Retry",
    "RetryPolicy",
    "Router",
    "SchemaError",
    "SchemaMissingError",
    "SchemaVersionError",
    "Snooze",
    "UnroutedEventError",
    "Worker",
    "purge",
]

#: Where each name is. It is imported when it is asked for, so that a worker process has its signal
#: handlers before it imports anything that takes time.
_HOMES = {
    "Bury": "exc",
    "ConfigurationError": "exc",
    "Context": "event",
    "DuplicateHandlerError": "exc",
    "Event": "event",
    "Exponential": "retry",
    "Fixed": "retry",
    "Handler": "router",
    "HandlerSignatureError": "exc",
    "InvalidEventError": "exc",
    "LostLeaseError": "exc",
    "NoRetry": "retry",
    "PayloadError": "exc",
    "PublishError": "exc",
    "PurgeResult": "retention",
    "RelayBus": "bus",
    "RelayBusError": "exc",
    "Retry": "exc",
    "RetryPolicy": "retry",
    "Router": "router",
    "SchemaError": "exc",
    "SchemaMissingError": "exc",
    "SchemaVersionError": "exc",
    "Snooze": "exc",
    "UnroutedEventError": "exc",
    "Worker": "worker",
    "purge": "retention",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
