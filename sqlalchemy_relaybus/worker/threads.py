"""Plain functions run in threads, which are made as they are needed."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..stores.base import Delivery

if TYPE_CHECKING:
    from .dispatch import Dispatcher, Job


class _Running:
    """What one thread is at."""

    __slots__ = ("deadline", "delivery", "job")

    def __init__(self, job: Job, delivery: Delivery, deadline: float | None) -> None:
        self.job = job
        self.delivery = delivery
        self.deadline = deadline


class ThreadExecutor:
    """At most *size* threads that take jobs from one queue.

    A thread whose handler runs past its time limit cannot be stopped. It is left behind and
    replaced, until more than *size* are left behind at a time: from then on the executor is
    :attr:`stuck`, and only another process helps.
    """

    def __init__(self, dispatcher: Dispatcher, name: str, size: int) -> None:
        self._dispatcher = dispatcher
        self._name = name
        self._size = size
        self._jobs: deque[Job] = deque()
        self._available = threading.Condition()
        self._threads = 0
        self._idle = 0
        #: threads whose handlers ran past their time limit and have not returned
        self.left_behind = 0
        self._closed = False
        self._running: dict[int, _Running] = {}

    @property
    def stuck(self) -> bool:
        """Whether too many threads are left behind to go on."""
        return self.left_behind > self._size

    def submit(self, jobs: Sequence[Job]) -> None:
        with self._available:
            self._jobs.extend(jobs)
            self._available.notify(min(len(jobs), self._idle))
            self._staff()

    def _staff(self) -> None:
        """Start threads for the jobs that no idle one takes. The caller has the lock."""
        room = min(self._size, 2 * self._size - self.left_behind) - self._threads
        for _ in range(min(len(self._jobs) - self._idle, room)):
            self._start()

    def _start(self) -> None:
        self._threads += 1
        # daemons: a handler that never returns must not keep the process alive
        threading.Thread(
            target=self._work, name=f"relaybus-{self._name}-{self._threads}", daemon=True
        ).start()

    def _work(self) -> None:
        while True:
            with self._available:
                self._idle += 1
                while not self._jobs and not self._closed:
                    self._available.wait()
                self._idle -= 1
                if not self._jobs:
                    self._threads -= 1
                    return
                job = self._jobs.popleft()
            if not self._run(job):
                return

    def _run(self, job: Job) -> bool:
        """Run *job* to its end; false if it was given up meanwhile and so was this thread."""
        dispatcher = self._dispatcher
        me = threading.get_ident()
        limit = job.handler.timeout
        while (delivery := dispatcher.following(job)) is not None:
            running = _Running(job, delivery, None if limit is None else time.monotonic() + limit)
            self._running[me] = running
            error: BaseException | None = None
            try:
                dispatcher.run(job, delivery)
            except BaseException as raised:  # noqa: BLE001 - it ends this attempt only
                error = raised
            if limit is None:
                del self._running[me]
            else:
                with self._available:  # expire() decides under the same lock
                    self._running.pop(me, None)
                    if job.abandoned:
                        self.left_behind -= 1
                        return False
            if not dispatcher.conclude(job, delivery, error):
                break
        return True

    def expire(self, now: float) -> list[tuple[Job, Delivery]]:
        """Abandon the jobs whose time limit has passed."""
        expired = []
        with self._available:
            for me, running in list(self._running.items()):
                if running.deadline is None or running.deadline > now:
                    continue
                running.job.abandoned = True
                del self._running[me]
                self.left_behind += 1
                self._threads -= 1
                expired.append((running.job, running.delivery))
            self._staff()
        return expired

    def drain(self) -> list[Job]:
        """Take back the jobs that no thread has begun."""
        with self._available:
            jobs = list(self._jobs)
            self._jobs.clear()
        return jobs

    def close(self) -> None:
        with self._available:
            self._closed = True
            self._available.notify_all()
