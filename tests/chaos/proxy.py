"""The network between a worker and the server, which can fail in the ways that networks do."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from sqlalchemy import make_url

#: refuse: connections are closed and new ones refused; reset: those there are are closed, once;
#: delay: nothing arrives until it is over, then all does; drop: nothing arrives, and when it is
#: over connections are closed; request: the next one is lost, with its connection; reply: the next
#: request is answered, and its connection is closed before the answer arrives.
Failure = Literal["refuse", "reset", "delay", "drop", "request", "reply"]
#: Closing with this option set sends a reset.
_AT_ONCE = struct.pack("ii", 1, 0)


class TcpProxy:
    """Listens on a port of 127.0.0.1 and passes on to the Unix socket of the server at *url*."""

    def __init__(self, url: str) -> None:
        target = make_url(url)
        self._target = f"{target.query['host']}/.s.PGSQL.{target.query['port']}"
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._clear = threading.Event()
        self._clear.set()
        self._failure: Failure | None = None
        self._words = b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._port: int = self._listener.getsockname()[1]
        self.url = target.set(
            query={"host": "127.0.0.1", "port": str(self._port)}
        ).render_as_string(hide_password=False)
        self._listen()

    def fail(self, failure: Failure, words: bytes = b"") -> None:
        """Fail from now on, until :meth:`recover`. *words*: what is in the request to be lost."""
        self._words = words
        self._failure = failure
        if failure == "refuse":
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        if failure in ("refuse", "reset"):
            self._close_all()
        elif failure in ("delay", "drop"):
            self._clear.clear()

    def recover(self) -> None:
        if self._failure == "drop":
            self._close_all()
        if self._failure == "refuse":
            self._listener = socket.create_server(("127.0.0.1", self._port))
            self._listen()
        self._failure = None
        self._clear.set()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._close_all()
        self._clear.set()

    def _listen(self) -> None:
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with self._lock:
            self._open |= {client, server}
        try:
            self._clear.wait()
            server.connect(self._target)
        except OSError:  # the server is down
            self._close(client, server)
            return
        doomed = threading.Event()
        for ends in ((client, server), (server, client)):
            threading.Thread(target=self._pass, args=(*ends, doomed), daemon=True).start()

    def _pass(self, source: socket.socket, to: socket.socket, doomed: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._clear.wait()
                if source.family == socket.AF_INET:
                    lost = self._loses(data)
                    if lost == "request":
                        break
                    if lost == "reply":
                        doomed.set()
                elif doomed.is_set():
                    break  # the server has answered, so it has done it
                to.sendall(data)
        self._close(source, to)

    def _loses(self, request: bytes) -> Failure | None:
        with self._lock:
            failure = self._failure
            if failure not in ("request", "reply") or self._words not in request:
                return None
            self._failure = None
            return failure

    def _close_all(self) -> None:
        with self._lock:
            both = list(self._open)
        self._close(*both)

    def _close(self, *sockets: socket.socket) -> None:
        for each in sockets:
            with self._lock:
                if each not in self._open:
                    continue
                self._open.discard(each)
            with contextlib.suppress(OSError):
                if each.family == socket.AF_INET:
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
                each.shutdown(socket.SHUT_RDWR)  # wakes up whoever reads from it
            each.close()


@contextmanager
def tcp_proxy(url: str) -> Iterator[TcpProxy]:
    """A proxy for the length of the block."""
    proxy = TcpProxy(url)
    try:
        yield proxy
    finally:
        proxy.close()
