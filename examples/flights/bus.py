"""The bus: who hears of a departure, and what each of them is promised.

A worker runs these handlers::

    python -m sqlalchemy_relaybus.worker --app examples.flights.bus:bus --url postgresql+psycopg://...
"""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from examples.flights import client
from examples.flights.models import Board
from sqlalchemy_relaybus import Context, Event, Exponential, RelayBus

DEPARTED = "flight.departed"

#: Every 97th flight, the radar misses at first.
RADAR_MISSES = 97

bus = RelayBus()


@bus.handler(DEPARTED, name="board.update", mode="transactional")
def update_board(event: Event, session: Session) -> None:
    """Keep the board of the flight's aircraft.

    The change to the board and the delivery's completion commit together, so a flight counts once
    whatever happens to the worker. Events of one key run one at a time, in the order in which they
    were published: that is why reading the row, adding to it and writing it back is safe here
    without a lock.
    """
    flight = event.payload
    # An event without a key has no order among others. A flight whose aircraft is not known gets
    # a board to itself, so that nobody shares a row.
    aircraft = event.key or f"unknown {flight['n']}"
    board = session.get(Board, aircraft)
    if board is None:
        board = Board(aircraft=aircraft, flights=0, delay_minutes=0, last_n=0, out_of_turn=0)
        session.add(board)
    board.flights += 1
    if flight["delay"] is not None:  # a cancelled flight takes its aircraft nowhere
        board.delay_minutes += flight["delay"]
        board.last_airport = flight["dest"]
    if flight["n"] <= board.last_n:
        board.out_of_turn += 1
    board.last_n = flight["n"]


@bus.handler(DEPARTED, name="notice.send", retry=Exponential(max_attempts=8, base=0.05))
async def send_notice(event: Event, ctx: Context) -> None:
    """Tell the outside service.

    At least once: a worker that dies after the call and before the completion is recorded leaves
    a delivery that runs again. The service turns that into one effect by the idempotency key,
    which is the same on every run.
    """
    await client.send_async(_call("notice.send", event, ctx))


@bus.handler(DEPARTED, name="radar.flaky", retry=Exponential(max_attempts=8, base=0.05))
def track(event: Event, ctx: Context) -> None:
    """Tell the outside service, except that the first attempt fails now and then.

    The delivery waits for its back-off and is tried again. Later flights of the same aircraft
    wait with it, so the service still hears of them in order.
    """
    if ctx.attempt == 1 and event.payload["n"] % RADAR_MISSES == 0:
        raise ConnectionError("no echo; the next attempt finds the aircraft")
    client.send(_call("radar.flaky", event, ctx))


def _call(handler: str, event: Event, ctx: Context) -> dict[str, Any]:
    return {
        "key": ctx.idempotency_key,
        "handler": handler,
        "n": event.payload["n"],
        "tailnum": event.key,
        "sequence": event.sequence,
        "attempt": ctx.attempt,
        "fence": ctx.fence,
    }
