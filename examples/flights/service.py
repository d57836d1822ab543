"""The outside service: a process of its own that writes down whoever calls it.

Usage: ``python -m examples.flights.service LEDGER``. It prints the address it listens on, and
ends when its standard input does, so it never outlives what started it.

Every call becomes a line of the ledger, with a receive number and whether it had an effect. A call
whose idempotency key was seen before is written down too, and has none.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path


class Ledger:
    """The service's own file and its memory of idempotency keys."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")
        self._received = 0
        self._keys: set[str] = set()

    def record(self, lines: Iterable[bytes]) -> None:
        """Write down *lines*, a call each. They have left this process when this returns."""
        for line in lines:
            call = json.loads(line)
            self._received += 1
            effect = call["key"] not in self._keys
            self._keys.add(call["key"])
            noted = {"received": self._received, "at": time.time(), "effect": effect, **call}
            self._file.write(json.dumps(noted).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Desk(asyncio.Protocol):
    """One caller's connection: lines in, one line of answer for each."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        # All that arrived together is written together: one flush for many calls under load.
        *lines, self._rest = (self._rest + data).split(b"\n")
        if lines:
            self._ledger.record(lines)
            self._transport.write(b"ok\n" * len(lines))


async def serve(path: Path) -> None:
    """Serve until standard input ends."""
    loop = asyncio.get_running_loop()
    ledger = Ledger(path)
    server = await loop.create_server(lambda: Desk(ledger), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    print(f"{host}:{port}", flush=True)
    try:
        await loop.run_in_executor(None, sys.stdin.buffer.read)
    finally:
        server.close()
        ledger.close()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
