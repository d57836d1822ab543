"""The faults: what is done to the processes, the network and the server, and when."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import DBAPIError

from sqlalchemy_relaybus.testing.server import PrivatePostgres
from tests.chaos.fleet import LEASE, Fleet, Member
from tests.chaos.ledger import Ledger
from tests.chaos.proxy import Failure, TcpProxy

#: What is in the deck that faults are drawn from; it is shuffled anew whenever it is empty.
DECK = ("kill",) * 4 + ("cut",) * 2 + ("crash", "stop", "terminate", "restart", "commit")
#: Pause between a fault and the next, seconds.
PAUSE = (1.5, 4.0)
#: For how long a worker with work in flight is looked for, seconds.
SEARCH = 3.0
#: Everybody, as the name of a victim.
EVERYBODY = "*"

# What the worker had started and has not completed, and how far it is under suspicion.
_IN_FLIGHT = text("""
    SELECT count(*), coalesce(max(suspects.crashes), 0)
    FROM relaybus_workers workers
    JOIN relaybus_lanes lanes USING (holder)
    CROSS JOIN unnest(lanes.started) AS started (id)
    JOIN relaybus_deliveries deliveries
        ON deliveries.lane = lanes.lane AND deliveries.id = started.id
    LEFT JOIN relaybus_suspects suspects
        ON suspects.lane = lanes.lane AND suspects.id = started.id
    WHERE workers.owner = :name
""")
_TALKING = text(
    "SELECT count(*) FROM pg_stat_activity WHERE application_name = :name AND state = 'active'"
)
_TERMINATE = text("""
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE application_name = :name ORDER BY random() LIMIT 1
""")


@dataclass(frozen=True)
class _Lasting:
    """A fault that goes on while others happen."""

    kind: str
    victim: str
    began: float
    ends: float
    end: Callable[[], None]


class Faults:
    """Causes one fault after another, and notes for each whom it hit, and from when to when.

    *network* is that of the worker in the last place, *uplink* that of the first publisher.
    """

    def __init__(
        self,
        seed: int,
        server: PrivatePostgres,
        url: str,
        fleet: Fleet,
        network: TcpProxy,
        uplink: TcpProxy,
        ledger: Ledger,
    ) -> None:
        self._random = random.Random(seed)
        self._server = server
        self._engine: Engine = create_engine(url, isolation_level="AUTOCOMMIT", pool_pre_ping=True)
        self._fleet = fleet
        self._network = network
        self._uplink = uplink
        self._ledger = ledger
        self._deck = self._draw()
        self._lasting: list[_Lasting] = []
        self._next_at = time.monotonic() + self._random.uniform(*PAUSE)
        #: the fault that somebody is looked for, and for how long
        self._kind: str | None = None
        self._give_up_at = 0.0
        #: how many of each kind there were, and of the kills those with work in flight
        self.counts: Counter[str] = Counter()
        #: workers that were not hit: a third crash beside nothing else proves a culprit
        self.spared = 0

    def tend(self) -> None:
        """End the faults that have lasted, and cause one if it is time."""
        now = time.monotonic()
        for fault in [each for each in self._lasting if each.ends <= now]:
            self._finish(fault)
        if now < self._next_at:
            return
        if self._kind is None:
            self._kind, self._give_up_at = next(self._deck), now + SEARCH
        if not self._cause(self._kind):
            if now < self._give_up_at:
                return  # nobody fits at the moment
            self.counts[f"{self._kind} given up"] += 1
        self._kind = None
        self._next_at = time.monotonic() + self._random.uniform(*PAUSE)

    def _cause(self, kind: str) -> bool:
        """Cause a fault; false where nobody is in the state that it needs."""
        match kind:
            case "kill":
                return any(map(self._kill, self._candidates()))
            case "stop":
                return any(map(self._stop, self._candidates()))
            case "restart":
                return any(map(self._restart, self._candidates()))
            case "cut":
                return self._cut()
            case "terminate":
                return self._terminate()
            case "commit":
                return self._lose_commit()
            case _:
                return self._crash()

    def cease(self) -> None:
        """End whatever lasts; nothing more happens."""
        for fault in list(self._lasting):
            self._finish(fault)
        self._engine.dispose()

    def _draw(self) -> Iterator[str]:
        while True:
            yield from self._random.sample(DECK, len(DECK))

    def _note(self, kind: str, victim: str, began: float, **more: object) -> None:
        self.counts[kind] += 1
        self._ledger.note("fault", kind=kind, victim=victim, began=began, **more)

    def _finish(self, fault: _Lasting) -> None:
        self._lasting.remove(fault)
        fault.end()
        self._note(fault.kind, fault.victim, fault.began)

    def _candidates(self) -> list[Member]:
        """The workers that something may be done to, in random order."""
        able = [worker for worker in self._fleet.workers if worker.works and not worker.busy]
        return self._random.sample(able, len(able))

    # -- processes -----------------------------------------------------------------------------

    def _kill(self, worker: Member) -> bool:
        """SIGKILL, where the server lists deliveries as started that are not completed."""
        with self._paused_with_work(worker) as in_flight:
            if not in_flight:
                return False
            began = time.monotonic()
            worker.process.kill()
        worker.process.wait()
        self._note("kill", worker.name, began, in_flight=in_flight)
        return True

    def _stop(self, worker: Member) -> bool:
        """SIGSTOP until its leases have run out and others have its lanes, then SIGCONT."""
        began = time.monotonic()
        with self._paused_with_work(worker) as in_flight:
            if not in_flight:
                return False
        lasts = LEASE + self._random.uniform(0.5, 2.5)
        self._last("stop", worker, worker.name, began, lasts, worker.resume)
        return True

    def _restart(self, worker: Member) -> bool:
        """SIGTERM: what a deployment does. Nothing may run twice for it."""
        worker.busy = True
        worker.process.send_signal(signal.SIGTERM)
        self.counts["restart"] += 1
        return True

    def _last(
        self,
        kind: str,
        worker: Member,
        victim: str,
        began: float,
        lasts: float,
        finish: Callable[[], None],
    ) -> None:
        worker.busy = True

        def end() -> None:
            worker.busy = False
            finish()

        self._lasting.append(_Lasting(kind, victim, began, began + lasts, end))

    @contextlib.contextmanager
    def _paused_with_work(self, worker: Member) -> Iterator[int]:
        """Stop *worker* and say how much it has in flight; it goes on where that is nothing.

        Nothing, too, where a delivery is about to be proven a culprit: to be the only one that
        runs in the third crash is what it is buried for, whoever caused them.
        """
        worker.pause()
        in_flight = 0
        try:
            with contextlib.suppress(DBAPIError), self._engine.connect() as connection:
                until = time.monotonic() + LEASE / 8
                while (
                    connection.scalar(_TALKING, {"name": worker.name}) and time.monotonic() < until
                ):
                    time.sleep(0.005)
                in_flight, crashes = connection.execute(_IN_FLIGHT, {"name": worker.name}).one()
                if in_flight == 1 and crashes >= 2:
                    self.spared += 1
                    in_flight = 0
            yield in_flight
        finally:
            if not in_flight:
                worker.resume()

    # -- network and server --------------------------------------------------------------------

    def _cut(self) -> bool:
        """The network of one worker fails, for less than a lease or for more."""
        worker = self._fleet.workers[-1]
        if worker not in self._candidates():
            return False
        failures: tuple[Failure, ...] = ("refuse", "reset", "delay", "drop", "request", "reply")
        failure = self._random.choice(failures)
        lasts = self._random.choice((0.5, LEASE + 1, LEASE + 2.5))
        began = time.monotonic()
        self._network.fail(failure)
        place = worker.name.partition(".")[0]
        # whoever comes after it in the same place has the same network
        self._last(f"cut: {failure}", worker, f"{place}.*", began, lasts, self._network.recover)
        return True

    def _lose_commit(self) -> bool:
        """The next commit of a publisher is lost, or only the word that it has happened."""
        failures: tuple[Failure, ...] = ("request", "reply")
        failure = self._random.choice(failures)
        began = time.monotonic()
        self._uplink.fail(failure, b"COMMIT")
        self._note(f"commit: {failure}", self._fleet.publishers[0].name, began)
        return True

    def _terminate(self) -> bool:
        """One connection of a worker or publisher, whichever it is, is ended by the server."""
        members = [*self._candidates(), *self._fleet.publishers]
        name = self._random.choice(members).name
        began = time.monotonic()
        with contextlib.suppress(DBAPIError), self._engine.connect() as connection:
            if connection.scalar(_TERMINATE, {"name": name}):
                self._note("terminate", name, began)
                return True
        return False

    def _crash(self) -> bool:
        """The server crashes, and recovers from its log: at once, or after the leases' end."""
        away = self._random.choice((0.0, 0.5, LEASE + 0.5))
        began = time.monotonic()
        self._server.stop("immediate")
        time.sleep(away)
        self._server.start()
        self._note("crash", EVERYBODY, began)
        return True
