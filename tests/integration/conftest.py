"""Fixtures of the tests with a database: a store to step, an application to run."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from tests.support.application import APP
from tests.support.effects import make_effects
from tests.support.stores import Bench


@pytest.fixture
def bench(engine: Engine) -> Iterator[Bench]:
    """The store, and connections to step it with."""
    with Bench(engine) as bench:
        yield bench


@pytest.fixture
def effects(engine: Engine) -> Engine:
    """The engine, with a table for what transactional handlers write."""
    make_effects(engine)
    return engine


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """A directory with the application of ``tests.support.application``."""
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory for a Unix socket, whose path may not be long."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="rb-") as directory:
        yield Path(directory)
