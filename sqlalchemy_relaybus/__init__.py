"""A transactional outbox and event bus for applications on SQLAlchemy."""

from .bus import Handler, RelayBus
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
from .retry import Exponential, Fixed, NoRetry, RetryPolicy
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
    "RelayBus",
    "RelayBusError",
    "Retry",
    "RetryPolicy",
    "SchemaError",
    "SchemaMissingError",
    "SchemaVersionError",
    "Snooze",
    "UnroutedEventError",
    "Worker",
]
