"""Each store lives through random histories as the model of the bus says.

The normal run takes some seconds. ``make property`` goes on for long, and prints where it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from .beds import BEDS, Bed
from .history import Statistics
from .machine import BusMachine

COMMON = settings(
    database=None,
    print_blob=True,
    deadline=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
PROFILES = {
    # other histories each time; what is printed for a failure reproduces it
    "fast": settings(COMMON, max_examples=60, stateful_step_count=50),
    # the same histories for each mutant, and the first failure will do
    "mutants": settings(
        COMMON,
        derandomize=True,
        max_examples=60,
        stateful_step_count=50,
        phases=[Phase.generate],
    ),
    "long": settings(COMMON, max_examples=2000, stateful_step_count=100),
}
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "fast")


@pytest.fixture(params=sorted(BEDS))
def bed(request: pytest.FixtureRequest) -> Iterator[Bed]:
    with BEDS[request.param](request) as bed:
        yield bed


# a failure is made smaller for up to five minutes
@pytest.mark.timeout(7200 if PROFILE == "long" else 600)
def test_a_store_is_as_the_model_is(bed: Bed) -> None:
    statistics = Statistics(every=10 if PROFILE == "long" else None)

    class Machine(BusMachine):
        def __init__(self) -> None:
            super().__init__(bed, statistics)

    run_state_machine_as_test(Machine, settings=PROFILES.get(PROFILE, PROFILES["fast"]))
    print(statistics)
