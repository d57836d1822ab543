"""One run: load and faults for a while, then quiet until all is handled, then the verdict."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Engine, create_engine, func, select

import alembic_relaybus
from sqlalchemy_relaybus.testing.server import PrivatePostgres, private_postgres
from tests.chaos import tables
from tests.chaos.app import bus
from tests.chaos.evidence import gather
from tests.chaos.faults import Faults
from tests.chaos.fleet import Fleet, fleet
from tests.chaos.ledger import CONDUCTOR, Ledger
from tests.chaos.proxy import tcp_proxy
from tests.chaos.verdict import Required, Verdict, judge

#: One more of each is behind a network that fails.
PUBLISHERS = 2
WORKERS = 3
#: Transactions a second of each publisher.
RATE = 6.0
#: How long the first processes may take to start, before the faults begin, seconds.
STARTING = 30.0
#: How long handling all that is left may take, seconds.
DRAIN = 120.0
#: From which duration on enough must have happened for a run to mean anything.
LONG = 300.0


class Progress(NamedTuple):
    """What a run looks like at the moment."""

    phase: str
    elapsed: float
    committed: int
    backlog: int
    faults: str


@dataclass(frozen=True)
class Plan:
    """What to do, and for how long (seconds)."""

    seed: int
    duration: float
    directory: Path
    rate: float = RATE

    @property
    def required(self) -> Required:
        """A short run on a busy machine may be over before much has happened."""
        times = int(self.duration // LONG)
        return Required(kills=20 * times, crashes=5 * times, takeovers=times, writes_refused=times)


def run(plan: Plan, show: Callable[[Progress], None]) -> Verdict:
    """Do as planned; *show* is called now and then with how it goes."""
    began = time.monotonic()
    # fsync is on: what was committed survives the server's crashes
    with private_postgres({"max_connections": "200"}) as server:
        url = server.create_database("chaos")
        engine = create_engine(url, pool_pre_ping=True)
        alembic_relaybus.migrate(engine)
        tables.metadata.create_all(engine)
        ledger = Ledger(plan.directory, CONDUCTOR)
        with tcp_proxy(url) as network, tcp_proxy(url) as uplink:
            worker_urls = [*[url] * WORKERS, network.url]
            publisher_urls = [uplink.url, *[url] * PUBLISHERS]
            with fleet(plan.directory, ledger, worker_urls, publisher_urls, plan.seed) as members:
                faults = Faults(plan.seed, server, url, members, network, uplink, ledger)
                members.start(plan.rate)
                drained = _Conductor(plan, engine, members, faults, show).conduct()
        verdict = judge(gather(plan.directory, engine), plan.required)
        engine.dispose()
        _check_server(server, verdict)
    if not drained:
        verdict.complain(f"not all was handled within {DRAIN:g} s after the faults", "")
    verdict.figures |= {
        "seed": plan.seed,
        "duration": plan.duration,
        "seconds": round(time.monotonic() - began, 1),
        "spared": faults.spared,
        "given_up": sum(n for kind, n in faults.counts.items() if kind.endswith("given up")),
        "restarts": faults.counts["restart"],
    }
    return verdict


class _Conductor:
    """Has faults happen for as long as planned, and waits for the end of all work."""

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        fleet: Fleet,
        faults: Faults,
        show: Callable[[Progress], None],
    ) -> None:
        self._plan = plan
        self._engine = engine
        self._fleet = fleet
        self._faults = faults
        self._show = show
        self._began = time.monotonic()
        self._shown_at = 0.0
        self._counts = 0, 0

    def conduct(self) -> bool:
        """Whether all was handled in time."""
        limit = self._began + STARTING
        while not self._fleet.complete and time.monotonic() < limit:
            self._tell("starting")
            time.sleep(0.05)
        self._began = time.monotonic()
        end = self._began + self._plan.duration
        while time.monotonic() < end:
            self._fleet.tend()
            self._faults.tend()
            self._tell("chaos")
            time.sleep(0.05)
        self._faults.cease()
        self._fleet.stop_publishers()
        end = time.monotonic() + DRAIN
        while (left := self._left()) and time.monotonic() < end:
            self._fleet.tend()
            self._tell("draining")
            time.sleep(0.05)
        self._fleet.stop_workers()
        return not left

    def _left(self) -> int:
        """How much is to be handled, now or later."""
        deliveries, parked = bus.tables.deliveries, bus.tables.parked
        # in one statement: what is promoted meanwhile must not be missed in both
        query = select(
            select(func.count()).select_from(deliveries).scalar_subquery(),
            select(func.count()).where(parked.c.available_at.is_not(None)).scalar_subquery(),
            select(func.count()).select_from(tables.orders).scalar_subquery(),
        )
        with self._engine.connect() as connection:
            ready, waiting, committed = connection.execute(query).one()
        left = int(ready) + int(waiting)
        self._counts = int(committed), left
        return left

    def _tell(self, phase: str) -> None:
        now = time.monotonic()
        if now - self._shown_at < 0.5:
            return
        self._shown_at = now
        if phase != "draining":
            self._left()
        faults = ", ".join(f"{kind} {n}" for kind, n in sorted(self._faults.counts.items()))
        self._show(Progress(phase, now - self._began, *self._counts, faults))


def _check_server(server: PrivatePostgres, verdict: Verdict) -> None:
    """The server has not failed in any way that was not meant."""
    for line in server.log.read_text(errors="replace").splitlines():
        if "PANIC:" in line or "deadlock detected" in line:
            verdict.complain("the server's log", line)
