"""What a run shows: a line while it goes on, a table at its end."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table

from tests.chaos.run import Progress
from tests.chaos.verdict import Verdict


class Display:
    """The line; a context manager."""

    def __init__(self, console: Console, duration: float) -> None:
        columns = (BarColumn(20), TextColumn("{task.description}"))
        self._bar = Bar(*columns, console=console, refresh_per_second=4)
        self._task = self._bar.add_task("starting", total=duration)

    def show(self, progress: Progress) -> None:
        self._bar.update(
            self._task,
            completed=progress.elapsed,
            description=f"{progress.phase} {progress.elapsed:.0f} s: "
            f"{progress.committed:,} committed, backlog {progress.backlog:,}; {progress.faults}",
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()


def tell(console: Console, verdict: Verdict) -> None:
    """The figures as a table, and each problem."""
    table = Table("figure", "value", title="chaos")
    for name, value in verdict.figures.items():
        table.add_row(name.replace("_", " "), _worded(value))
    console.print(table)
    for problem in verdict.told():
        console.print(f"[bold red]wrong:[/] {escape(problem)}", highlight=False)
    if not verdict.problems:
        console.print("[bold green]nothing was lost, repeated in its effects or out of order[/]")


def _worded(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {count:,}" for name, count in value.items()) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)
