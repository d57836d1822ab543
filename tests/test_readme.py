"""The README and the pages in docs do what they say."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import make_url

from tests.support.processes import Process

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def blocks(language: str, page: Path = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


#: Every block of Python in docs, by its page and its place there. Each runs on its own.
PROGRAMS = {
    f"{page.stem}-{n}": block
    for page in sorted((ROOT / "docs").glob("*.md"))
    for n, block in enumerate(blocks("python", page))
}


def test_the_quick_start_runs(empty_database_url: str, tmp_path: Path) -> None:
    program, commands = blocks("python")[0], blocks("sh")[0].splitlines()
    assert len(program.splitlines()) < 30
    (tmp_path / "shop.py").write_text(program)
    scripts = str(Path(sys.executable).parent)
    environment = {
        **os.environ,
        "RELAYBUS_URL": empty_database_url,
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
    }
    *before, worker = commands
    for command in before:
        subprocess.run(
            shlex.split(command), cwd=tmp_path, env=environment, check=True, capture_output=True
        )
    with Process(shlex.split(worker), cwd=tmp_path, env=environment) as process:
        process.wait_for_line("confirmed: tea")
        process.terminate()
        assert process.wait() == 0


def test_the_database_that_is_made_is_the_one_that_the_url_names() -> None:
    (made, said) = blocks("")[0].splitlines()
    url = make_url(said.removeprefix("export RELAYBUS_URL="))
    assert made == f"createdb -h {url.host} -U {url.username} {url.database}"
    assert url.drivername == "postgresql+psycopg"


def test_the_handlers_can_be_registered() -> None:
    namespace: dict[str, object] = {"__name__": "readme"}
    exec(compile(blocks("python")[1], "README.md", "exec"), namespace)
    assert set(namespace["bus"].handlers) == {"stock.reserve", "shop.ship"}  # type: ignore[attr-defined]


def test_the_tests_of_an_application_pass(tmp_path: Path) -> None:
    """As they stand there, of an application with the handlers that are there."""
    place_order = (
        "def place_order(session, item):\n"
        "    bus.publish(session, 'order.placed', {'item': item})\n"
    )
    (tmp_path / "shop.py").write_text(blocks("python")[1] + place_order)
    (tmp_path / "test_shop.py").write_text(blocks("python")[2])
    options = ("-q", "-W", "error", "-p", "no:cacheprovider", "--rootdir", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


def test_the_test_command_is_the_one_that_the_build_runs() -> None:
    commands = blocks("sh")[1].split("\n")
    assert "make test" in commands
    for command in ("lint", "test", "compat", "wheel"):
        assert re.search(rf"^make {command}\b", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_programs_in_docs_run(program: str, database_url: str, tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAMS[program]],
        cwd=tmp_path,
        env={**os.environ, "RELAYBUS_URL": database_url},
        check=True,
    )
