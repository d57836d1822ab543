"""The short form of ``make chaos``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.chaos.run import Plan, run


@pytest.mark.timeout(300)
def test_a_little_chaos(tmp_path: Path) -> None:
    verdict = run(Plan(seed=5, duration=20, directory=tmp_path), lambda progress: None)
    assert not verdict.problems, "\n".join(verdict.told())
    print(json.dumps(verdict.figures, indent=2))
