"""``python -m benchmarks``: drain a backlog on a private server, and show what it took."""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from benchmarks.drain import SETTINGS, Figures, drain
from sqlalchemy_relaybus.testing.server import private_postgres

KINDS = ("coroutine", "function", "transactional")


@click.command()
@click.option("--events", default=20_000, show_default=True, help="How many in each run.")
@click.option("--workers", default=1, show_default=True, help="How many processes drain them.")
@click.option("--keys", default=0, show_default=True, help="Ordering keys; 0: none.")
@click.option("--rounds", default=1, show_default=True, help="How often each kind is run, in turn.")
@click.option("--kind", "kinds", multiple=True, type=click.Choice(KINDS), default=KINDS)
@click.option("--json", "path", default="build/benchmarks.json", show_default=True)
def main(
    events: int, workers: int, keys: int, rounds: int, kinds: tuple[str, ...], path: str
) -> None:
    """Measure how fast handlers that do nothing are run, and what that costs the database."""
    console = Console()
    runs: list[Figures] = []
    with private_postgres(SETTINGS) as server, console.status("starting") as status:
        for n in range(rounds):
            for kind in kinds:
                label = f"{kind}, round {n + 1} of {rounds}: "
                runs.append(
                    drain(
                        server,
                        kind=kind,
                        events=events,
                        workers=workers,
                        keys=keys,
                        told=lambda what, label=label: status.update(label + what),  # type: ignore[misc]
                    )
                )
    table = Table(
        "handler",
        "deliveries/s",
        "WAL B published",
        "WAL B drained",
        "transactions",
        "lanes HOT",
        "wrong",
    )
    for run in runs:
        table.add_row(
            run.kind,
            f"{run.rate:,.0f}",
            f"{run.wal_published:.0f}",
            f"{run.wal_drained:.0f}",
            f"{run.transactions:.4f}",
            f"{run.hot:.1%}",
            str(run.wrong),
        )
    console.print(table)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    figures = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "settings": SETTINGS,
        "runs": [{**asdict(run), "rate": run.rate} for run in runs],
    }
    target.write_text(json.dumps(figures, indent=2) + "\n")
    if any(run.wrong for run in runs):
        console.print("a run is invalid: deliveries are missing or were handled twice")
        sys.exit(1)


if __name__ == "__main__":
    main()
