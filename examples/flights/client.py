"""The way to the outside service: lines of JSON over a connection that stays open.

A call returns when the service has written it down. Connections belong to whoever uses them, a
thread or an event loop, so that nothing here is shared and needs a lock.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

#: ``host:port`` of the service, for the processes that call it.
ADDRESS_VARIABLE = "FLIGHTS_SERVICE"


def send(call: Mapping[str, Any]) -> None:
    """Make *call* and wait for the service's answer. For plain functions."""
    connection = getattr(_thread, "connection", None)
    if connection is None:
        connection = _thread.connection = socket.create_connection(_address())
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        connection.sendall(_line(call))
        answer = b""
        while not answer.endswith(b"\n"):
            received = connection.recv(64)
            if not received:
                raise ConnectionError("the service closed the connection")
            answer += received
    except OSError:
        close()  # the next call opens another
        raise


def close() -> None:
    """Close the connection that plain functions use in this thread."""
    connection = _thread.__dict__.pop("connection", None)
    if connection is not None:
        connection.close()


async def send_async(call: Mapping[str, Any]) -> None:
    """Make *call* and wait for the service's answer. For coroutines: any number at a time."""
    loop = asyncio.get_running_loop()
    opening: asyncio.Future[_Pipeline] | None = getattr(_thread, "opening", None)
    if opening is None or opening.get_loop() is not loop or _is_broken(opening):
        opening = _thread.opening = asyncio.ensure_future(_open(loop))
    # The connection is for all calls of the loop: one that is cancelled must not take it along.
    pipeline = await asyncio.shield(opening)
    await pipeline.send(_line(call))


async def close_async() -> None:
    """Close the connection that coroutines use in this thread's event loop."""
    opening = _thread.__dict__.pop("opening", None)
    if opening is not None:
        (await opening).close()


class _Pipeline(asyncio.Protocol):
    """Calls sent without waiting for one another; the answers come in the order of the calls."""

    def __init__(self) -> None:
        self.closed = False
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for _ in range(data.count(b"\n")):
            answer = self._waiting.popleft()
            if not answer.done():  # its caller may have run out of time
                answer.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(ConnectionError("the service closed the connection"))
        self._waiting.clear()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    async def send(self, line: bytes) -> None:
        if self.closed or self._transport is None:
            raise ConnectionError("the connection to the service is closed")
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        self._transport.write(line)
        await answer


# ``connection`` for plain functions, ``opening`` for the event loop that runs in the thread
_thread = threading.local()


async def _open(loop: asyncio.AbstractEventLoop) -> _Pipeline:
    _, pipeline = await loop.create_connection(_Pipeline, *_address())
    return pipeline


def _is_broken(opening: asyncio.Future[_Pipeline]) -> bool:
    if not opening.done():
        return False
    return opening.cancelled() or opening.exception() is not None or opening.result().closed


def _address() -> tuple[str, int]:
    try:
        host, _, port = os.environ[ADDRESS_VARIABLE].rpartition(":")
    except KeyError:
        raise ConnectionError(
            f"set {ADDRESS_VARIABLE} to the host:port that examples.flights.service prints"
        ) from None
    return host, int(port)


def _line(call: Mapping[str, Any]) -> bytes:
    return json.dumps({**call, "pid": os.getpid()}).encode() + b"\n"
