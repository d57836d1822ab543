"""The bus that is measured, and the handlers that do nothing but count."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from pathlib import Path
from uuid import UUID

from sqlalchemy.orm import Session

from sqlalchemy_relaybus import Event, RelayBus

bus = RelayBus(wake=False)
_handled: deque[UUID] = deque()
#: How long after it a delivery is in its process's ledger, seconds.
LATE = 0.4


@bus.handler("coroutine", name="coroutine")
async def coroutine(event: Event) -> None:
    _handled.append(event.id)


@bus.handler("function", name="function")
def function(event: Event) -> None:
    _handled.append(event.id)


@bus.handler("transactional", name="transactional", mode="transactional")
def transactional(event: Event, session: Session) -> None:
    _handled.append(event.id)


def _write() -> None:
    """Tell what this process has handled, a little later: a worker's end waits for no thread."""
    path = Path(os.environ["BENCHMARK_LEDGERS"]) / f"{os.getpid()}"
    with path.open("a") as ledger:
        while True:
            time.sleep(LATE / 4)
            count = len(_handled)
            ledger.writelines(f"{_handled.popleft()}\n" for _ in range(count))
            ledger.flush()


if "BENCHMARK_LEDGERS" in os.environ:
    threading.Thread(target=_write, daemon=True).start()
