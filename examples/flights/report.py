"""What the demo shows: progress while it runs, and the table at the end."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from examples.flights.watch import Progress

HANDLERS = ("board.update", "notice.send", "radar.flaky")

#: Seconds between two lines where there is no terminal to draw bars on.
LINE_INTERVAL = 3.0


class ProgressDisplay:
    """A bar for what is published and for each handler; plain lines without a terminal."""

    def __init__(self, console: Console, flights: int) -> None:
        self._console = console
        self._flights = flights
        self._last_line = 0.0
        self._bars = Bars(
            TextColumn("{task.description:<12}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks = {
            name: self._bars.add_task(name, total=flights) for name in ("published", *HANDLERS)
        }

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def show(self, progress: Progress) -> None:
        counts = {"published": progress.published, **progress.delivered}
        for name, task in self._tasks.items():
            self._bars.update(task, completed=counts.get(name, 0))
        now = time.monotonic()
        if not self._console.is_terminal and now - self._last_line >= LINE_INTERVAL:
            self._last_line = now
            self.say(
                "  ".join(f"{name} {counts.get(name, 0):,}" for name in self._tasks)
                + f"  of {self._flights:,}"
            )

    def say(self, line: str) -> None:
        """Print *line* above the bars."""
        self._bars.console.print(line, highlight=False, soft_wrap=True)


def final_table(figures: dict[str, Any]) -> Table:
    """The figures of the run, the ones that must be as they are with a mark."""
    title = f"{figures['expected']:,} flights"
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    table.add_column("")

    def row(name: str, value: object, good: bool | None = None) -> None:
        shown = f"{value:,}" if isinstance(value, int) else str(value)
        mark = "" if good is None else "[green]ok[/]" if good else "[bold red]wrong[/]"
        table.add_row(name, shown, mark)

    expected = figures["expected"]
    row("published", figures["published"], figures["published"] == expected)
    for name in HANDLERS:
        delivered = figures["delivered"].get(name, 0)
        row(f"delivered to {name}", delivered, delivered == expected)
    row("took more than one attempt", figures["retried"])
    row("redelivered after the kill", figures["redelivered"], figures["redelivered"] > 0)
    for name in ("lost", "repeated_effects", "order_violations", "dead_letters"):
        row(name.replace("_", " "), figures[name], figures[name] == 0)
    row("deliveries/s", f"{figures['deliveries_per_second']:,.0f}")
    equal = figures["boards_equal"]
    row("boards equal what the CSV gives", "yes" if equal else "no", equal)
    return table
