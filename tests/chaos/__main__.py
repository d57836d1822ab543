"""``python -m tests.chaos``: a run of a chosen length, with its figures in a file.

Exits with 1 if anything is wrong, or if too little happened in a long run for it to mean anything.
Ledgers and logs stay in the directory beside the file.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path
from types import FrameType

import click
from rich.console import Console

from tests.chaos.report import Display, tell
from tests.chaos.run import Plan, run


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # so that every block is left in order


@click.command()
@click.option("--seed", type=int, default=1, show_default=True, help="What the faults depend on.")
@click.option(
    "--duration",
    type=click.FloatRange(5, 86_400),
    default=300.0,
    show_default=True,
    help="Seconds of chaos.",
)
@click.option(
    "--json",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("build/chaos.json"),
    show_default=True,
    help="Where the figures go.",
)
def main(seed: int, duration: float, file: Path) -> None:
    """Publish and handle under kills, crashes and cuts, and judge what came of it."""
    signal.signal(signal.SIGTERM, _exit_on_signal)
    directory = file.resolve().with_suffix("")
    file.unlink(missing_ok=True)  # the figures of another run say nothing of this one
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    console = Console()
    with Display(console, duration) as display:
        verdict = run(Plan(seed, duration, directory), display.show)
    figures = {**verdict.figures, "problems": dict(verdict.problems)}
    file.write_text(json.dumps(figures, indent=2) + "\n")
    tell(console, verdict)
    sys.exit(1 if verdict.problems else 0)


if __name__ == "__main__":
    main()
