"""The publisher: each flight a row and an event, committed together.

Usage: ``python -m examples.flights.publish --url URL --flights N``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from itertools import islice

from sqlalchemy import create_engine
from sqlalchemy.orm import Session, sessionmaker

from examples.flights.bus import DEPARTED, bus
from examples.flights.flights import KEPT_ROWS, Departure, departures
from examples.flights.models import Flight


def publish(session: Session, departure: Departure) -> None:
    """Add *departure* and its event to the transaction of *session*.

    The tail number is the ordering key: what concerns one aircraft is delivered in this order.
    """
    session.add(Flight(**departure._asdict()))
    bus.publish(
        session,
        DEPARTED,
        {
            "n": departure.n,
            "flight": f"{departure.carrier}{departure.number}",
            "scheduled": departure.scheduled.isoformat(),
            "origin": departure.origin,
            "dest": departure.dest,
            "delay": departure.delay,
        },
        key=departure.tailnum,
    )


def publish_all(sessions: sessionmaker[Session], flights: Iterable[Departure], size: int) -> None:
    """Publish *flights*, *size* of them a transaction."""
    for chunk in _chunks(flights, size):
        with sessions.begin() as session:
            for departure in chunk:
                publish(session, departure)


def _chunks(flights: Iterable[Departure], size: int) -> Iterator[list[Departure]]:
    remaining = iter(flights)
    while chunk := list(islice(remaining, size)):
        yield chunk


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.flights.publish")
    parser.add_argument("--url", required=True)
    parser.add_argument("--flights", type=int, default=KEPT_ROWS)
    parser.add_argument("--chunk", type=int, default=100, help="flights a transaction")
    options = parser.parse_args()

    engine = create_engine(options.url)
    sessions = sessionmaker(engine)
    bus.attach(sessions)
    publish_all(sessions, departures(options.flights), options.chunk)
    engine.dispose()


if __name__ == "__main__":
    main()
