"""A transactional outbox and event bus for applications on SQLAlchemy."""

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
