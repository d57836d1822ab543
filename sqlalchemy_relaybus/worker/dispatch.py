"""Running handlers: which delivery may start, in which order, and what its end means.

Deliveries of one handler and key form a *run*: they are executed one after another in the order in
which they were claimed. When one of them does not complete, the rest of the run is given back and
the pair of handler and key stays blocked until the pump has recorded the failure, from when on
the store itself holds the followers back.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from ..event import Context
from ..exc import Bury, LostLeaseError, Retry, Snooze, first_line
from ..retry import MAX_DELAY, exhausted
from ..router import Handler
from ..settings import Settings
from ..stores.base import Delivery, Park
from .load import Executor, executor_of
from .loop import LoopExecutor
from .threads import ThreadExecutor
from .transaction import Transactions, check_result

log = logging.getLogger("sqlalchemy_relaybus.worker")

MAX_ERROR_LENGTH = 2_000
#: Wait before the next attempt where the handler's retry policy itself fails, seconds.
_FALLBACK_DELAY = 60.0
#: Wait before a transaction that could not be serialized is tried again, seconds.
_CONFLICT_DELAYS = 0.1, 1.0

#: done: to be deleted; gone: deleted already, in the handler's transaction; released: did not run
#: or was aborted, to be given back uncharged; refused: likewise, because something before it blocks
#: its key; lost: not this worker's any more
Kind = Literal["done", "gone", "released", "refused", "lost"]
Pair: TypeAlias = tuple[str, str]


class Outcome(NamedTuple):
    """How a delivery ended: in one of the kinds, or to be parked."""

    delivery: Delivery
    end: Kind | Park


class Job:
    """What an executor runs at a time: one delivery, or the deliveries of one run in turn."""

    __slots__ = ("abandoned", "deliveries", "handler", "pair")

    def __init__(self, handler: Handler, pair: Pair | None, first: Delivery) -> None:
        self.handler = handler
        self.pair = pair
        self.deliveries = deque((first,))
        #: its time limit passed and its thread did not return: nobody waits for it any more
        self.abandoned = False


class Dispatcher:
    """Hands deliveries to the executors and reports how each of them ended, exactly once."""

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        settings: Settings,
        transactions: Transactions,
        report: Callable[[Sequence[Outcome]], None],
    ) -> None:
        self._handlers = handlers
        self._report = report
        self._transactions = transactions
        self._lock = threading.Lock()
        self._runs: dict[Pair, Job] = {}
        self._blocked: set[Pair] = set()
        self._stopping = False
        self._loop = LoopExecutor(self, settings.concurrency)
        self._plain = ThreadExecutor(self, "handler", settings.threads)
        self._transactional = ThreadExecutor(self, "transaction", settings.pool_size)
        self._executors: tuple[tuple[frozenset[Executor], LoopExecutor | ThreadExecutor], ...] = (
            (frozenset({"loop", "loop transactions"}), self._loop),
            (frozenset({"threads"}), self._plain),
            (frozenset({"transactions"}), self._transactional),
        )

    # -- from the pump -------------------------------------------------------------------------

    def submit(self, deliveries: Iterable[Delivery]) -> None:
        """Run *deliveries*, which the store has recorded as started."""
        jobs: list[Job] = []
        refused: list[Delivery] = []
        with self._lock:
            for delivery in deliveries:
                pair = None
                if delivery.key is not None:
                    pair = (delivery.handler, delivery.key)
                    if pair in self._blocked:
                        refused.append(delivery)
                        continue
                    run = self._runs.get(pair)
                    if run is not None:
                        run.deliveries.append(delivery)
                        continue
                job = Job(self._handlers[delivery.handler], pair, delivery)
                if pair is not None:
                    self._runs[pair] = job
                jobs.append(job)
        if refused:
            self._report([Outcome(delivery, "refused") for delivery in refused])
        for names, executor in self._executors:
            mine = [job for job in jobs if executor_of(job.handler) in names]
            if mine:
                executor.submit(mine)

    def unblock(self, pairs: Iterable[Pair]) -> None:
        """The failures of *pairs* are recorded: their followers may be submitted again."""
        with self._lock:
            self._blocked.difference_update(pairs)

    def expire(self, now: float) -> bool:
        """Give up on plain functions that run past their time limit; false: too many did."""
        for executor in (self._plain, self._transactional):
            for job, delivery in executor.expire(now):
                error = TimeoutError(f"the handler ran longer than {job.handler.timeout:g} s")
                _say(log.warning, "%r: %s; its thread is left behind", delivery, error)
                self.conclude(job, delivery, error)
        return not (self._plain.stuck or self._transactional.stuck)

    @property
    def left_behind(self) -> int:
        """How many threads are at handlers that ran past their time limit."""
        return self._plain.left_behind + self._transactional.left_behind

    def stop(self) -> None:
        """Start nothing more; what runs goes on."""
        self._stopping = True
        for _, executor in self._executors:
            for job in executor.drain():
                self._end_job(job, [])

    def abort(self) -> None:
        """Cancel the coroutines that still run. A thread cannot be cancelled."""
        self._loop.abort()

    def close(self) -> None:
        """End the executors' threads that have nothing to do."""
        self._loop.close()
        self._plain.close()
        self._transactional.close()

    # -- from the executors --------------------------------------------------------------------

    def following(self, job: Job) -> Delivery | None:
        """The next delivery of *job* to run, or ``None`` at its end."""
        with self._lock:
            if not job.deliveries:
                if job.pair is not None and self._runs.get(job.pair) is job:
                    del self._runs[job.pair]
                return None
            delivery = job.deliveries.popleft()
        # The lease counts from the moment that its last renewal was sent; after its end the lane
        # may be somebody else's. One that is to be handed over waits for what runs, and not for
        # all that was claimed of a key.
        hold = delivery.hold
        if self._stopping or hold.draining or not hold.live(time.monotonic()):
            self.release(job, delivery)
            return None
        return delivery

    def context(self, job: Job, delivery: Delivery) -> Context:
        limit = job.handler.timeout
        assert delivery.event is not None
        return Context(
            delivery.event.id,
            delivery.handler,
            delivery.attempts + 1,
            delivery.epoch,
            None if limit is None else time.monotonic() + limit,
        )

    def call(self, job: Job, delivery: Delivery, context: Context) -> Awaitable[Any]:
        """Call a coroutine function; what it returned is to be awaited."""
        handler = job.handler
        if handler.transactional:
            return self._transactions.run_async(handler, delivery, context)
        assert delivery.event is not None
        called: Awaitable[Any] = handler.injection.invoke(
            handler.function, delivery.event, context, None
        )
        return called

    async def close_transactions(self) -> None:
        """Close what transactions in the loop have opened."""
        await self._transactions.close()

    def run(self, job: Job, delivery: Delivery) -> None:
        """Call a plain function; raises what it raises."""
        assert delivery.event is not None
        handler, context = job.handler, self.context(job, delivery)
        if handler.transactional:
            self._transactions.run(handler, delivery, context)
        else:
            check_result(
                handler, handler.injection.invoke(handler.function, delivery.event, context, None)
            )

    def conclude(self, job: Job, delivery: Delivery, error: BaseException | None) -> bool:
        """Report how *delivery* ended; whether the job may go on with the next one."""
        if error is None:
            end: Kind = "gone" if job.handler.transactional else "done"
            self._report((Outcome(delivery, end),))
            return True
        if isinstance(error, LostLeaseError) and job.handler.transactional:
            _say(log.warning, "%s", error)
            self._end_job(job, [Outcome(delivery, "lost")])
        else:
            conflicted = job.handler.transactional and self._transactions.conflicted(error)
            park = (_again if conflicted else _park)(job.handler, delivery, error)
            _log_failure(delivery, park, error)
            self._end_job(job, [Outcome(delivery, park)])
        return False

    def release(self, job: Job, delivery: Delivery) -> None:
        """*delivery* did not run, or was aborted: give it and the rest of its run back."""
        self._end_job(job, [Outcome(delivery, "released")])

    def _end_job(self, job: Job, outcomes: list[Outcome]) -> None:
        """Report *outcomes* and give back what is left of *job*, all at once.

        From here on nothing of the same handler and key starts: the pump unblocks the pair when
        it has taken note of all of them.
        """
        with self._lock:
            outcomes += [Outcome(delivery, "released") for delivery in job.deliveries]
            job.deliveries.clear()
            if job.pair is not None:
                self._blocked.add(job.pair)
                if self._runs.get(job.pair) is job:
                    del self._runs[job.pair]
        self._report(outcomes)


def _again(handler: Handler, delivery: Delivery, error: BaseException) -> Park:
    """After a serialization failure, which is none of the handler's: uncharged, before long.

    Two that failed by each other do not come back at the same moment.
    """
    text = f"the transaction could not be serialized with another one: {first_line(error)}"
    return Park(delivery, "retrying", random.uniform(*_CONFLICT_DELAYS), 0, text, True)


def _park(handler: Handler, delivery: Delivery, error: BaseException) -> Park:
    """Where a delivery goes that did not complete."""
    text = describe(error)
    if isinstance(error, Snooze):
        blocks = handler.on_delayed == "block"
        return Park(delivery, "snoozed", _storable(error.after), 0, None, blocks)
    attempts = delivery.attempts + 1
    try:
        if isinstance(error, Bury) or exhausted(handler.retry, attempts):
            return bury(delivery, text, charge=1, blocks=handler.on_dead != "skip")
        if isinstance(error, Retry):
            delay = error.after
        else:
            delay = float(handler.retry.delay(attempts, random.random()))
    except Exception:  # noqa: BLE001 - a policy of the application's own; recorded all the same
        _say(log.exception, "the retry policy of handler %r failed", handler.name)
        delay = _FALLBACK_DELAY
    return Park(delivery, "retrying", _storable(delay), 1, text, True)


def is_exhausted(handler: Handler, attempts: int) -> bool:
    """Whether *handler* gives up after *attempts*; not where its retry policy itself fails."""
    try:
        return exhausted(handler.retry, attempts)
    except Exception:  # noqa: BLE001 - likewise
        _say(log.exception, "the retry policy of handler %r failed", handler.name)
        return False


def _storable(delay: float) -> float:
    """*delay* within what a store can add to the present."""
    return min(delay, MAX_DELAY) if delay > 0 else 0.0  # NaN: at once


def bury(delivery: Delivery, reason: str, *, charge: int, blocks: bool) -> Park:
    """To the dead letters. *blocks*: later deliveries of its handler and key wait for it."""
    return Park(delivery, "dead", None, charge, reason, blocks)


def describe(error: BaseException) -> str:
    """*error* in one storable text; also where its own text cannot be made."""
    try:
        text = str(error.reason) if isinstance(error, Bury) else f"{type(error).__name__}: {error}"
    except BaseException as broken:  # noqa: BLE001 - whatever it is, the failure must be recorded
        text = f"{type(error).__name__} (its text raised {type(broken).__name__})"
    text = text.replace("\x00", "\\x00").encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= MAX_ERROR_LENGTH else text[: MAX_ERROR_LENGTH - 1] + "…"


def _say(log: Callable[..., None], *words: object, **options: object) -> None:
    """Log it. What ended is reported also where a filter of the application raises."""
    with contextlib.suppress(Exception):
        log(*words, **options)


def _log_failure(delivery: Delivery, park: Park, error: BaseException) -> None:
    attempt = delivery.attempts + 1
    debug = error if log.isEnabledFor(logging.DEBUG) else None
    if park.status == "dead":
        words = "%r is dead, at attempt %d: %s"
        # a handler that raises Bury has decided so, and its reason says why
        trace = debug if isinstance(error, Bury) else error
        _say(log.error, words, delivery, attempt, park.error, exc_info=trace)
    elif park.status == "retrying":
        _say(
            log.warning,
            "%r failed at attempt %d: %s; next try in %.3g s",
            delivery,
            attempt,
            park.error,
            park.delay,
            exc_info=debug,
        )
