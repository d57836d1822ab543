"""What docs/guarantees.md names is there: modules, functions and tests."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "guarantees.md").read_text()
#: A module, and what is named in it: `stores/postgresql/lanes.py::take`.
REFERENCE = re.compile(r"`([\w/]+\.py)::([\w.]+)`")
#: By its heading, what is said of each guarantee or the lack of one.
SECTIONS = {
    part.partition("\n")[0]: part.partition("\n")[2]
    for part in re.split(r"^###? ", PAGE, flags=re.MULTILINE)
    if "\n- " in part
}


@cache
def names(path: Path) -> set[str]:
    """The functions and classes of a module, and their methods."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.add(f"{node.name}.{each.name}")
    return found


def test_every_line_of_the_readmes_tables_is_on_the_page() -> None:
    readme = (ROOT / "README.md").read_text()
    guaranteed = re.split("^## ", readme, flags=re.MULTILINE)
    (table,) = [part for part in guaranteed if part.startswith("What is guaranteed")]
    (points,) = [part for part in guaranteed if part.startswith("What is not guaranteed")]
    assert "docs/guarantees.md" in table
    promised, missing = PAGE.split("\n## Not guaranteed")
    rows = table.count("\n| ") - 2  # without its head
    # the page has two more: what a plain handler can rely on, and two services on one bus
    assert promised.count("\n### ") == rows + 2
    assert missing.count("\n### ") == points.count("\n- ")


@pytest.mark.parametrize("heading", SECTIONS)
def test_each_names_what_carries_it_and_what_proves_it(heading: str) -> None:
    carries, _, proves = SECTIONS[heading].partition("\n- ")[2].partition("\n- ")
    assert carries.startswith(("Carried by ", "Because of "))
    assert proves.startswith(("Proved by ", "Shown by "))
    for part, below in ((carries, "sqlalchemy_relaybus"), (proves, "tests/integration")):
        named = REFERENCE.findall(part)
        assert named
        # nothing else is in code quotes: a name that is spelled otherwise would not be checked
        assert len(named) == part.count("`") / 2
        for module, name in named:
            path = ROOT / below / module
            assert path.is_file(), module
            assert name in names(path), f"{module} has no {name}"
            assert (below == "sqlalchemy_relaybus") or name.startswith("test_")


def test_each_module_of_a_guarantee_is_named() -> None:
    tests = ROOT / "tests" / "integration"
    for module in (
        "test_atomic_publish.py",
        "test_never_lose_an_event.py",
        "test_order_per_key.py",
        "test_order_per_key_waiting.py",
        "test_at_least_once.py",
        "test_effectively_once.py",
        "test_effectively_once_handlers.py",
        "test_fencing.py",
        "test_fencing_takeovers.py",
        "test_retries_and_dead_letters.py",
        "test_attempts_and_poison.py",
        "test_one_run_per_event_id.py",
        "test_graceful_shutdown.py",
    ):
        assert (tests / module).is_file()
        assert f"`{module}::" in PAGE
