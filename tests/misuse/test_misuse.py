"""Every case of misuse is answered with its error and its words, and the page says the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import Engine, update

from sqlalchemy_relaybus import RelayBusError
from sqlalchemy_relaybus.tables import tables_for

from .__main__ import SECTIONS, page
from .case import Case, stable

PAGE = Path(__file__).parents[2] / "docs" / "misuse.md"
CASES = [
    pytest.param(case, id=f"{section}: {case.what}")
    for section, cases in SECTIONS.items()
    for case in cases
]


@pytest.mark.parametrize("case", CASES)
def test_it_is_told(case: Case, request: pytest.FixtureRequest) -> None:
    engine: Engine | None = None
    if case.database != "none":
        engine = request.getfixturevalue("empty_engine" if case.database == "empty" else "engine")
    if engine is not None and case.database == "newer":
        version = tables_for().schema_version
        with engine.begin() as connection:
            connection.execute(update(version).values(version=version.c.version + 1))
    with pytest.raises(case.error) as told:
        case.commit(engine)
    assert type(told.value) is case.error
    assert stable(str(told.value)) == case.message
    # ours, but for targets of a type that no such call takes, and a second run
    assert issubclass(case.error, RelayBusError | TypeError | RuntimeError)
    assert "`" not in case.message + case.code  # the page quotes them


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.misuse > docs/misuse.md"
