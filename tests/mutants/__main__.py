"""``python -m tests.mutants``: run the tests against each mutant. Goes on where it was ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table

from tests.mutants.mutate import mutants, same
from tests.mutants.statements import EQUIVALENT, STATEMENTS
from tests.support.databases import server_in_memory

RESULTS = Path("build/mutants.jsonl")
#: A mutant that hangs is noticed, too. Seconds.
LIMIT = 600
#: They wait for the server more than they compute.
JOBS = 2 * (os.cpu_count() or 1)
_FAILED = 1  # pytest: tests were run and some failed


#: The control: every statement written anew without a change, so that what fails is no mutant's.
CONTROL = "(control)"


@dataclass(frozen=True, slots=True)
class Trial:
    """One mutant, and what became of it; or the control."""

    statement: str
    #: its text, so that results of another one are not taken for its own
    sql: str
    mutant: str
    clause: str
    #: killed, survived, equivalent or broken (the tests could not be run)
    outcome: str = ""


def trials(only: tuple[str, ...]) -> Iterator[Trial]:
    """All there are to make, and the control first."""
    chosen = {name: STATEMENTS[name] for name in only or STATEMENTS}
    every = [statement.sql for statement in chosen.values()]
    yield Trial(CONTROL, "\n".join(every), "\n".join(map(same, every)), "")
    for name, statement in chosen.items():
        for mutant in mutants(statement.sql):
            yield Trial(name, statement.sql, mutant.sql, mutant.clause)


def run(trial: Trial, url: str, only: tuple[str, ...]) -> Trial:
    """Find out whether a test of it fails; of the control, one of the statements in *only*."""
    if (trial.statement, trial.clause) in EQUIVALENT:
        return Trial(**{**asdict(trial), "outcome": "equivalent"})
    if trial.statement == CONTROL:
        chosen = [STATEMENTS[name] for name in only or STATEMENTS]
        replaced = {statement.sql: same(statement.sql) for statement in chosen}
        limit = None
        tests = list(dict.fromkeys(test for statement in chosen for test in statement.tests))
    else:
        replaced = {trial.sql: trial.mutant}
        limit = LIMIT
        tests = list(STATEMENTS[trial.statement].tests)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(replaced, file)
        file.flush()
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "tests.mutants.plugin"]
        command += ["-p", "no:cacheprovider", *tests]
        environment = {
            **os.environ,
            "MUTANT": file.name,
            "TEST_DATABASE_URL": url,
            "HYPOTHESIS_PROFILE": "mutants",
        }
        try:
            code = subprocess.run(
                command, env=environment, timeout=limit, capture_output=True
            ).returncode
        except subprocess.TimeoutExpired:
            code = _FAILED
    outcome = {0: "survived", _FAILED: "killed"}.get(code, "broken")
    return Trial(**{**asdict(trial), "outcome": outcome})


def known() -> dict[tuple[str, str], Trial]:
    """What earlier runs have found, by statement and mutant."""
    if not RESULTS.exists():
        return {}
    found = (Trial(**json.loads(line)) for line in RESULTS.read_text().splitlines())
    return {(each.sql, each.mutant): each for each in found}


def report(done: list[Trial], console: Console) -> bool:
    """Show what was found; whether all is well."""
    counts: dict[str, Counter[str]] = {}
    for trial in done:
        if trial.statement != CONTROL:
            counts.setdefault(trial.statement, Counter())[trial.outcome] += 1
    table = Table("statement", "mutants", "killed", "equivalent", "survived")
    for name, count in counts.items():
        row = (sum(count.values()), count["killed"], count["equivalent"], count["survived"])
        table.add_row(name, *map(str, row))
    total: Counter[str] = sum(counts.values(), Counter())
    row = (sum(total.values()), total["killed"], total["equivalent"], total["survived"])
    table.add_row("[bold]all", *map(str, row), style="bold")
    console.print(table)
    wrong = [
        each
        for each in done
        if each.outcome == "broken" or (each.outcome == "survived") != (each.statement == CONTROL)
    ]
    for each in wrong:
        if each.statement == CONTROL:
            console.print(f"the tests fail without a mutant ({each.outcome})")
        else:
            console.print(f"{each.statement}: {each.outcome}: {each.clause}", highlight=False)
    return not wrong


@click.command()
@click.argument("statements", nargs=-1)
@click.option("--jobs", default=JOBS, show_default=True, help="How many at once.")
@click.option("--anew", is_flag=True, help="Forget what earlier runs have found.")
@click.option("--listed", is_flag=True, help="Only list the mutants.")
def main(statements: tuple[str, ...], jobs: int, anew: bool, listed: bool) -> None:
    """Run the tests against each mutant of STATEMENTS (all of them if none is named)."""
    console = Console()
    if unknown := set(statements) - STATEMENTS.keys():
        raise click.UsageError(f"there is no statement {min(unknown)!r}")
    every = list(trials(statements))
    if listed:
        for trial in every:
            if trial.statement != CONTROL:
                console.print(f"{trial.statement}: {trial.clause}", highlight=False)
        return
    RESULTS.parent.mkdir(exist_ok=True)
    if anew:
        RESULTS.unlink(missing_ok=True)
    found = known()
    left = [each for each in every if (each.sql, each.mutant) not in found]
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        server_in_memory() as server,
        ThreadPoolExecutor(jobs) as pool,
        RESULTS.open("a") as results,
        Progress(*columns, console=console) as progress,
    ):
        task = progress.add_task("mutants", total=len(every), completed=len(every) - len(left))
        running = [pool.submit(run, each, server.url(), statements) for each in left]
        for future in as_completed(running):
            trial = future.result()
            found[trial.sql, trial.mutant] = trial
            results.write(json.dumps(asdict(trial)) + "\n")
            results.flush()
            progress.advance(task)
            progress.update(task, description=trial.statement)
    if not report([found[each.sql, each.mutant] for each in every], console):
        sys.exit(1)


if __name__ == "__main__":
    main()
