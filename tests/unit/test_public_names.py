"""What the package offers, which it imports when it is asked for."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import sqlalchemy_relaybus as package

SOURCE = ast.parse(Path(package.__file__).read_text())


def test_each_name_is_where_type_checkers_find_it() -> None:
    (block,) = (node for node in SOURCE.body if isinstance(node, ast.If))
    typed = {
        name.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    assert typed == package._HOMES
    assert sorted(typed) == package.__all__
    for name in package.__all__:
        assert getattr(package, name).__name__ == name
    assert set(package.__all__) <= set(dir(package))
    assert not hasattr(package, "nothing")


def test_importing_the_package_imports_neither_sqlalchemy_nor_a_driver() -> None:
    loaded = subprocess.run(
        [sys.executable, "-c", "import sqlalchemy_relaybus, sys; print(*sys.modules)"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert not {"sqlalchemy", "psycopg", "alembic", "click"} & set(loaded)
