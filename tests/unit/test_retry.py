from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlalchemy_relaybus.exc import ConfigurationError
from sqlalchemy_relaybus.retry import Exponential, Fixed, NoRetry, RetryPolicy, exhausted

attempts = st.integers(1, 2**31 - 1)
jitters = st.floats(0, 1, exclude_max=True)


def test_exponential_doubles_up_to_the_maximum() -> None:
    policy = Exponential(maximum=10)
    assert [policy.delay(n, 0.0) for n in range(1, 7)] == [1, 2, 4, 8, 10, 10]


def test_the_defaults() -> None:
    policy = Exponential()
    assert (policy.max_attempts, policy.base, policy.factor) == (8, 1.0, 2.0)
    assert (policy.maximum, policy.jitter) == (3600.0, 0.2)


def test_jitter_takes_up_to_its_share_away() -> None:
    policy = Exponential(base=10, jitter=0.2)
    assert policy.delay(1, 0.0) == 10
    assert policy.delay(1, 0.5) == pytest.approx(9)
    assert policy.delay(1, 0.999999) == pytest.approx(8, abs=1e-4)
    assert Exponential(base=10, jitter=0).delay(1, 0.9) == 10


@given(
    attempt=attempts,
    jitter=jitters,
    base=st.floats(0, 1e6),
    factor=st.floats(1, 1e6),
    share=st.floats(0, 1),
)
def test_exponential_stays_within_its_bounds(
    attempt: int, jitter: float, base: float, factor: float, share: float
) -> None:
    policy = Exponential(base=base, factor=factor, maximum=1e6, jitter=share)
    delay = policy.delay(attempt, jitter)
    # a share of 1 may leave nothing
    assert base * (1 - share) <= delay * (1 + 1e-9) + 1e-9
    assert 0 <= delay <= 1e6
    assert delay <= policy.delay(attempt + 1, jitter)
    assert delay == policy.delay(attempt, jitter)


def test_huge_attempts_do_not_overflow() -> None:
    assert Exponential(maximum=60).delay(10**9, 0.0) == 60
    assert Exponential(base=0).delay(10**9, 0.0) == 0


def test_fixed_and_none() -> None:
    assert [Fixed(wait=5).delay(n, 0.7) for n in (1, 2, 10**9)] == [5, 5, 5]
    assert Fixed(wait=5).max_attempts == 8
    assert NoRetry().max_attempts == 1


def test_durations_may_be_timedeltas() -> None:
    policy = Exponential(base=timedelta(milliseconds=500), maximum=timedelta(minutes=1))
    assert policy == Exponential(base=0.5, maximum=60)
    assert Fixed(wait=timedelta(hours=1)).wait == 3600


def test_exhausted() -> None:
    assert [exhausted(Fixed(wait=1, max_attempts=3), n) for n in (0, 2, 3, 4)] == [
        False,
        False,
        True,
        True,
    ]
    assert exhausted(NoRetry(), 1)


def test_all_are_policies_and_values() -> None:
    policies: list[RetryPolicy] = [Exponential(), Fixed(wait=1), NoRetry()]
    for policy in policies:
        assert isinstance(policy, RetryPolicy)
        assert hash(policy) == hash(policy)
        with pytest.raises(FrozenInstanceError):
            policy.max_attempts = 2  # type: ignore[misc]
    assert not isinstance(object(), RetryPolicy)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Exponential(max_attempts=0), "max_attempts"),
        (lambda: Exponential(max_attempts=True), "max_attempts"),
        (lambda: Exponential(max_attempts=2.0), "max_attempts"),  # type: ignore[arg-type]
        (lambda: Exponential(max_attempts=2**31), "max_attempts"),
        (lambda: Exponential(base=-1), "base"),
        (lambda: Exponential(base="1"), "base"),  # type: ignore[arg-type]
        (lambda: Exponential(base=timedelta(seconds=-1)), "base"),
        (lambda: Exponential(factor=0.5), "factor"),
        (lambda: Exponential(factor=float("inf")), "factor"),
        (lambda: Exponential(maximum=float("inf")), "maximum"),
        (lambda: Exponential(maximum=10**400), "maximum"),
        (lambda: Exponential(maximum=timedelta.max), "maximum"),
        (lambda: Exponential(base=10, maximum=5), "maximum"),
        (lambda: Exponential(jitter=1.5), "jitter"),
        (lambda: Exponential(jitter=float("nan")), "jitter"),
        (lambda: Fixed(wait=float("nan")), "wait"),
        (lambda: Fixed(wait=True), "wait"),
        (lambda: Fixed(wait=1, max_attempts=-1), "max_attempts"),
    ],
)
def test_wrong_arguments_are_refused_at_once(make: Callable[[], Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        make()
