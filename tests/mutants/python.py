"""``python -m tests.mutants.python``: mutants of the Python code, by mutmut.

Goes on where it was ended. What the type checker refuses counts as killed: nothing that it refuses
is merged either.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from tests.support.databases import server_in_memory

#: Least share of mutants that must be killed.
GOAL = 0.85
KILLED = ("killed", "timeout", "caught by type check")
#: Longest wait for anything, seconds: a mutant of the worker often does nothing any more.
LIMIT = "15"
_BIN = Path(sys.executable).parent
_SMALL = "sqlalchemy_relaybus.lanes.*"


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return not patterns or any(fnmatch(name, pattern) for pattern in patterns)


def outcomes(environment: dict[str, str]) -> dict[str, str]:
    """What became of each mutant, by its name; they are known once there was a run."""
    told = subprocess.run(
        [_BIN / "mutmut", "results", "--all", "true"],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    lines = (line.strip().rpartition(": ") for line in told.splitlines())
    return {name: outcome for name, _, outcome in lines if name}


def report(found: dict[str, str], console: Console) -> float:
    """Show them by module; the share of those tried that were killed."""
    counts: dict[str, Counter[str]] = {}
    for name, outcome in found.items():
        counts.setdefault(name.split(".x", 1)[0], Counter())[outcome] += 1
    table = Table("module", "mutants", "killed", "survived", "no tests", "not tried", "score")
    total: Counter[str] = sum(counts.values(), Counter())
    share = 0.0
    for name, count in [*sorted(counts.items()), ("all", total)]:
        killed = sum(count[outcome] for outcome in KILLED)
        tried = count.total() - count["not checked"]
        share = killed / tried if tried else 0.0
        columns = (count.total(), killed, count["survived"], count["no tests"])
        table.add_row(name, *map(str, columns), str(count["not checked"]), f"{share:.1%}")
    console.print(table)
    return share


@click.command()
@click.argument("names", nargs=-1)
@click.option("--jobs", default=os.cpu_count() or 1, show_default=True, help="How many at once.")
@click.option("--sample", default=1, show_default=True, help="Try one mutant in so many.")
def main(names: tuple[str, ...], jobs: int, sample: int) -> None:
    """Run the tests against the mutants called NAMES, such as sqlalchemy_relaybus.session.*."""
    with server_in_memory() as server:
        environment = {
            **os.environ,
            "PATH": f"{_BIN}{os.pathsep}{os.environ['PATH']}",
            "TEST_DATABASE_URL": server.url(),
            "TEST_LIMIT": LIMIT,
        }

        def run(*chosen: str) -> None:
            command = [str(_BIN / "mutmut"), "run", "--max-children", str(jobs), *chosen]
            if code := subprocess.run(command, env=environment).returncode:
                sys.exit(code)

        if sample > 1:
            run(_SMALL)  # from then on all names are known
            every = sorted(name for name in outcomes(environment) if _matches(name, names))
            names = tuple(every[::sample])
        run(*names)
        share = report(outcomes(environment), Console())
    if share < GOAL:
        sys.exit(1)


if __name__ == "__main__":
    main()
