"""Back-off policies: after which failure a handler is tried again, and when.

A policy is a value without state. The randomness that spreads retries comes from the caller, so
that a policy gives the same answer for the same arguments. Any object that fits
:class:`RetryPolicy` will do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol, runtime_checkable

from sqlalchemy_relaybus.exc import MAX_DELAY as MAX_DELAY
from sqlalchemy_relaybus.exc import ConfigurationError, as_seconds, shown

#: The most attempts a delivery can count: what an SQL integer holds.
MAX_ATTEMPTS = 2**31 - 1


@runtime_checkable
class RetryPolicy(Protocol):
    """What a handler's ``retry=`` must offer."""

    @property
    def max_attempts(self) -> int:
        """How often the handler runs at most for one delivery, the first time included."""

    def delay(self, attempt: int, jitter: float) -> float:
        """Seconds to wait before the next attempt, once attempt number *attempt* has failed.

        *attempt* counts from 1. *jitter* is a number in [0, 1), drawn anew for each call.
        """


def exhausted(policy: RetryPolicy, attempts: int) -> bool:
    """Whether a delivery with *attempts* failed attempts is out of them."""
    return attempts >= policy.max_attempts


@dataclass(frozen=True, slots=True, kw_only=True, init=False)
class Exponential:
    """Wait ``base``, then ``base * factor``, ``base * factor**2``, ... and ``maximum`` at most.

    ``base`` and ``maximum`` are seconds, given as a number or a ``timedelta``. ``jitter`` is the
    share of each delay that is left to chance: with 0.2 a delay of 10 s becomes one between 8 and
    10 s. It only shortens, so ``maximum`` holds, and deliveries that failed together do not come
    back together once they have reached it.
    """

    max_attempts: int
    base: float
    factor: float
    maximum: float
    jitter: float

    def __init__(
        self,
        *,
        max_attempts: int = 8,
        base: timedelta | float = 1.0,
        factor: float = 2.0,
        maximum: timedelta | float = 3600.0,
        jitter: float = 0.2,
    ) -> None:
        policy = "Exponential"
        set_ = object.__setattr__
        set_(self, "max_attempts", _attempts(policy, max_attempts))
        set_(self, "base", _duration(policy, "base", base))
        set_(self, "factor", _number(policy, "factor", factor, 1.0, 1e6))
        set_(self, "maximum", _duration(policy, "maximum", maximum))
        set_(self, "jitter", _number(policy, "jitter", jitter, 0.0, 1.0))
        if self.maximum < self.base:
            raise ConfigurationError(
                f"{policy}: maximum ({self.maximum:g} s) is below base ({self.base:g} s); "
                "raise maximum or lower base"
            )

    def delay(self, attempt: int, jitter: float) -> float:
        """Seconds before the attempt that follows the failed attempt number *attempt*."""
        try:
            delay = min(self.base * self.factor ** (attempt - 1), self.maximum)
        except OverflowError:  # a float power never gives inf, it raises
            delay = self.maximum if self.base else 0.0
        return delay * (1.0 - self.jitter * jitter)


@dataclass(frozen=True, slots=True, kw_only=True, init=False)
class Fixed:
    """Wait ``wait`` (seconds, or a ``timedelta`` when given) before every further attempt."""

    max_attempts: int
    wait: float

    def __init__(self, *, wait: timedelta | float, max_attempts: int = 8) -> None:
        object.__setattr__(self, "max_attempts", _attempts("Fixed", max_attempts))
        object.__setattr__(self, "wait", _duration("Fixed", "wait", wait))

    def delay(self, attempt: int, jitter: float) -> float:
        """Seconds before the next attempt: ``wait``, whatever the arguments."""
        return self.wait


@dataclass(frozen=True, slots=True)
class NoRetry:
    """One attempt: what fails goes to the dead letters at once."""

    max_attempts: int = field(default=1, init=False)

    def delay(self, attempt: int, jitter: float) -> float:
        """Zero. Nobody asks, since the first failure exhausts the policy."""
        return 0.0


def _attempts(policy: str, value: object) -> int:
    if type(value) is not int or not 1 <= value <= MAX_ATTEMPTS:
        raise ConfigurationError(
            f"{policy}: max_attempts must be an int from 1 to {MAX_ATTEMPTS}, not {shown(value)}; "
            "the first run counts as an attempt"
        )
    return value


def _duration(policy: str, name: str, value: timedelta | float) -> float:
    try:
        return as_seconds(value)
    except ValueError as error:
        raise ConfigurationError(f"{policy}: {name} {error}") from None


def _number(policy: str, name: str, value: object, low: float, high: float) -> float:
    if (
        not isinstance(value, (int, float))
        or isinstance(value, bool)
        or not low <= value <= high  # false for NaN too
    ):
        raise ConfigurationError(
            f"{policy}: {name} must be a number from {low:g} to {high:g}, not {shown(value)}"
        )
    return float(value)
