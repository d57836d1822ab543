"""Coroutine handlers run in an event loop in a thread of its own.

A handler that blocks the loop holds up the other coroutines, but neither claims nor renewals:
those are the pump's, in another thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .dispatch import Dispatcher, Job

log = logging.getLogger("sqlalchemy_relaybus.worker")

#: After so many jobs in a row that never waited, a slot lets others have the loop.
_BREATHER = 50
#: How long to wait for the loop to end, seconds.
_CLOSING = 0.5


class LoopExecutor:
    """At most *size* tasks that take jobs from one queue, each running many in turn.

    A task a job would cost as much as the rest of a delivery.
    """

    def __init__(self, dispatcher: Dispatcher, size: int) -> None:
        self._dispatcher = dispatcher
        self._size = size
        self._jobs: deque[Job] = deque()
        self._slots: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._aborted = False
        self._closed = False
        self._closing: asyncio.Task[None] | None = None

    def submit(self, jobs: Sequence[Job]) -> None:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._serve, name="relaybus-loop", daemon=True)
            self._thread.start()
        self._loop.call_soon_threadsafe(self._accept, jobs)

    def _serve(self) -> None:
        assert self._loop is not None
        asyncio.set_event_loop(self._loop)
        while not self._closed:
            try:
                self._loop.run_forever()
            except BaseException:
                # SystemExit in a task that a handler made goes through the loop; the others go on
                log.exception("a task of a handler ended the event loop; it goes on")
        if not asyncio.all_tasks(self._loop):
            self._loop.close()

    def _accept(self, jobs: Sequence[Job]) -> None:
        assert self._loop is not None
        self._jobs.extend(jobs)
        for _ in range(min(len(self._jobs), self._size - len(self._slots))):
            slot = self._loop.create_task(self._work())
            self._slots.add(slot)
            slot.add_done_callback(self._slots.discard)

    async def _work(self) -> None:
        me = asyncio.current_task()
        assert me is not None
        breath = 0
        while True:
            try:
                job = self._jobs.popleft()
            except IndexError:
                # here and not when the loop calls back: jobs accepted in between would find no
                # free slot and wait for one that has ended
                self._slots.discard(me)
                return
            await self._run(job)
            breath += 1
            if breath % _BREATHER == 0:
                await asyncio.sleep(0)

    async def _run(self, job: Job) -> None:
        dispatcher = self._dispatcher
        limit = job.handler.timeout
        while (delivery := dispatcher.following(job)) is not None:
            error: BaseException | None = None
            context = dispatcher.context(job, delivery)
            try:
                if limit is None:
                    await dispatcher.call(job, delivery, context)
                else:
                    async with asyncio.timeout(limit) as clock:
                        await dispatcher.call(job, delivery, context)
            except asyncio.CancelledError as raised:
                task = asyncio.current_task()
                if self._aborted and task is not None and task.cancelling():
                    task.uncancel()
                    dispatcher.release(job, delivery)
                    return
                error = raised  # the handler's own doing
            except GeneratorExit as raised:
                if self._closed:
                    raise  # the coroutine is thrown away: it was stuck when the worker stopped
                error = raised
            except BaseException as raised:  # noqa: BLE001 - it ends this attempt only
                error = raised
                if isinstance(raised, TimeoutError) and limit is not None and clock.expired():
                    error = TimeoutError(f"the handler ran longer than {limit:g} s")
            if not dispatcher.conclude(job, delivery, error):
                return

    def drain(self) -> list[Job]:
        """Take back the jobs that no task has begun. From any thread."""
        jobs = []
        while self._jobs:
            try:
                jobs.append(self._jobs.popleft())
            except IndexError:
                break
        return jobs

    def abort(self) -> None:
        """Cancel what runs; each is reported as released once it has ended."""

        def cancel() -> None:
            self._aborted = True
            for slot in self._slots:
                slot.cancel()

        if self._loop is not None:
            self._loop.call_soon_threadsafe(cancel)

    def close(self) -> None:
        """End the loop, if no handler blocks it."""
        if self._loop is None or self._thread is None or self._loop.is_closed():
            self._closed = True
            return
        self._loop.call_soon_threadsafe(self._finish)
        self._thread.join(_CLOSING)

    def _finish(self) -> None:
        assert self._loop is not None
        self._closing = self._loop.create_task(self._close())
        self._closing.add_done_callback(self._end)

    async def _close(self) -> None:
        # hints that are still to be sent, for example; handlers have had their time
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=_CLOSING / 2)
        await self._dispatcher.close_transactions()

    def _end(self, closing: asyncio.Task[None]) -> None:
        assert self._loop is not None
        if not closing.cancelled() and (error := closing.exception()) is not None:
            log.debug("connections of an async engine were not closed: %s", error)
        self._closed = True
        self._loop.stop()
