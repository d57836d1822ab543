"""The verdict: did every departure arrive, once and in order?

Usage: ``python -m examples.flights.verdict --url URL --ledger FILE --flights N``, and
``--killed-pid PID`` of the worker that was killed. Prints JSON; exits with 1 if anything is wrong.

This process knows three things: the CSV, the tables that the application keeps, and what the
outside service wrote down. It imports neither the library nor the bus and reads none of the bus's
tables, so nothing that the bus says of itself counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import create_engine, text

from examples.flights.flights import Departure, departures

#: The handler whose effects are rows, and those whose effects are calls of the service.
BOARDS = "board.update"
CALLERS = ("notice.send", "radar.flaky")

FLIGHTS_SQL = text("SELECT n, tailnum, origin, dest, delay FROM flights ORDER BY n")
BOARDS_SQL = text(
    "SELECT aircraft, flights, delay_minutes, last_airport, last_n, out_of_turn FROM boards"
)


class Row(NamedTuple):
    """A published flight, as its row in the database has it."""

    n: int
    tailnum: str | None
    origin: str
    dest: str
    delay: int | None


class Board(NamedTuple):
    """What is known of one aircraft."""

    flights: int
    delay_minutes: int
    last_airport: str | None
    last_n: int
    out_of_turn: int


class Call(NamedTuple):
    """A line of the service's ledger, in the order of receipt."""

    handler: str
    n: int
    tailnum: str | None
    sequence: int | None
    attempt: int
    pid: int
    effect: bool


@dataclass
class Verdict:
    """What was found. ``problems`` says in words whatever should not be."""

    expected: int
    published: int = 0
    delivered: dict[str, int] = field(default_factory=dict)
    #: Calls that the service got again, because the killed process had made them and nobody knew:
    #: their deliveries ran again, with the same key, so that the service did nothing twice.
    redelivered: int = 0
    #: Calls that it got again for any other reason: allowed at least once, and unlikely.
    called_again_without_kill: int = 0
    #: Deliveries first called for at a later attempt: the ones before failed, or their worker died.
    retried: int = 0
    lost: int = 0
    repeated_effects: int = 0
    order_violations: int = 0
    boards_equal: bool = False
    problems: list[str] = field(default_factory=list)


def judge(
    flights: Sequence[Departure],
    rows: Iterable[Row],
    boards: Mapping[str, Board],
    calls: Iterable[Call],
    killed_pid: int | None = None,
) -> Verdict:
    """Compare what should have happened to *flights* with what is found."""
    verdict = Verdict(expected=len(flights))
    _judge_rows(verdict, flights, rows)
    _judge_boards(verdict, boards_of(flights), boards)
    _judge_calls(verdict, flights, calls, killed_pid)
    for handler, delivered in verdict.delivered.items():
        if delivered != len(flights):
            verdict.problems.append(f"{handler}: {delivered:,} of {len(flights):,} delivered")
    if verdict.repeated_effects:
        verdict.problems.append(f"{verdict.repeated_effects:,} effects happened more than once")
    if verdict.order_violations:
        verdict.problems.append(f"{verdict.order_violations:,} effects came out of turn")
    return verdict


def boards_of(flights: Iterable[Departure]) -> dict[str, Board]:
    """The boards that *flights* give, each counted once and in order."""
    boards: dict[str, Board] = defaultdict(lambda: Board(0, 0, None, 0, 0))
    for flight in flights:
        aircraft = flight.tailnum or f"unknown {flight.n}"
        board = boards[aircraft]
        boards[aircraft] = Board(
            flights=board.flights + 1,
            delay_minutes=board.delay_minutes + (flight.delay or 0),
            last_airport=board.last_airport if flight.delay is None else flight.dest,
            last_n=flight.n,
            out_of_turn=0,
        )
    return dict(boards)


def _judge_rows(verdict: Verdict, flights: Sequence[Departure], rows: Iterable[Row]) -> None:
    expected = {Row(f.n, f.tailnum, f.origin, f.dest, f.delay) for f in flights}
    found = Counter(rows)
    verdict.published = sum(1 for row in found if row in expected)
    surplus = found.total() - verdict.published
    if verdict.published != len(flights) or surplus:
        verdict.problems.append(
            f"published: {verdict.published:,} of {len(flights):,} flights, and {surplus:,} rows "
            "that are no flight of the CSV"
        )


def _judge_boards(
    verdict: Verdict, expected: Mapping[str, Board], found: Mapping[str, Board]
) -> None:
    nothing = Board(0, 0, None, 0, 0)
    different = []
    delivered = 0
    for aircraft in sorted(expected.keys() | found.keys()):
        should, has = expected.get(aircraft, nothing), found.get(aircraft, nothing)
        delivered += min(should.flights, has.flights)
        verdict.lost += max(0, should.flights - has.flights)
        verdict.repeated_effects += max(0, has.flights - should.flights)
        verdict.order_violations += has.out_of_turn
        if should != has:
            different.append(f"{aircraft} is {tuple(has)}, the CSV gives {tuple(should)}")
    verdict.delivered[BOARDS] = delivered
    verdict.boards_equal = not different
    if different:
        verdict.problems.append(f"{len(different):,} boards differ; {'; '.join(different[:3])}")


def _judge_calls(
    verdict: Verdict,
    flights: Sequence[Departure],
    calls: Iterable[Call],
    killed_pid: int | None,
) -> None:
    by_n = {flight.n: flight for flight in flights}
    sequences = _sequences(flights)
    called: dict[str, set[int]] = {handler: set() for handler in CALLERS}
    done: dict[str, set[int]] = {handler: set() for handler in CALLERS}
    by_killed: set[tuple[str, int]] = set()
    last: dict[tuple[str, str], int] = {}
    strange = misnumbered = 0

    for call in calls:
        flight = by_n.get(call.n)
        if flight is None or flight.tailnum != call.tailnum or call.handler not in called:
            strange += 1
            continue
        misnumbered += call.sequence != sequences.get(call.n)
        delivery = (call.handler, call.n)
        if call.n not in called[call.handler]:
            called[call.handler].add(call.n)
            verdict.retried += call.attempt > 1
        elif killed_pid is None or delivery in by_killed:
            verdict.redelivered += 1
        else:
            verdict.called_again_without_kill += 1
        if call.pid == killed_pid:
            by_killed.add(delivery)
        if not call.effect:
            continue
        if call.n in done[call.handler]:
            verdict.repeated_effects += 1
            continue
        done[call.handler].add(call.n)
        if call.tailnum is not None:
            turn = (call.handler, call.tailnum)
            verdict.order_violations += call.n < last.get(turn, 0)
            last[turn] = max(call.n, last.get(turn, 0))

    for handler in CALLERS:
        verdict.delivered[handler] = len(done[handler])
        verdict.lost += len(flights) - len(done[handler])
    if strange:
        verdict.problems.append(f"{strange:,} calls were for no flight of the CSV")
    if misnumbered:
        verdict.problems.append(f"{misnumbered:,} calls bore a wrong sequence number")


def _sequences(flights: Iterable[Departure]) -> dict[int, int]:
    """The place of each flight among those of its aircraft; none where that is not known."""
    count: Counter[str] = Counter()
    sequences = {}
    for flight in flights:
        if flight.tailnum is not None:
            count[flight.tailnum] += 1
            sequences[flight.n] = count[flight.tailnum]
    return sequences


def read_ledger(path: Path) -> Iterator[Call]:
    """The calls that the service wrote down."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            noted: dict[str, Any] = json.loads(line)
            yield Call(**{name: noted[name] for name in Call._fields})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.flights.verdict")
    parser.add_argument("--url", required=True)
    parser.add_argument("--ledger", type=Path, required=True)
    parser.add_argument("--flights", type=int, required=True)
    parser.add_argument("--killed-pid", type=int)
    options = parser.parse_args()

    engine = create_engine(options.url)
    with engine.connect() as connection:
        rows = [Row(*row) for row in connection.execute(FLIGHTS_SQL)]
        boards = {row[0]: Board(*row[1:]) for row in connection.execute(BOARDS_SQL)}
    engine.dispose()
    verdict = judge(
        departures(options.flights), rows, boards, read_ledger(options.ledger), options.killed_pid
    )
    print(json.dumps(asdict(verdict), indent=2))
    sys.exit(1 if verdict.problems else 0)


if __name__ == "__main__":
    main()
