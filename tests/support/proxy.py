"""A connection to the database that can be cut where a test wants it to be."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import make_url


class Proxy:
    """Listens on a Unix socket in *directory* and passes on to the server behind *url*.

    Whether that server is reached by a Unix socket or over TCP: what is cut is never encrypted.
    """

    def __init__(self, url: str, directory: Path) -> None:
        target = make_url(url)
        host = str(target.query.get("host") or target.host or "127.0.0.1")
        port = int(str(target.query.get("port") or target.port or 5432))
        #: of the server: a Unix socket in a directory, or a host and its port
        self._target = f"{host}/.s.PGSQL.{port}" if host.startswith("/") else (host, port)
        behind = target.set(host=None, port=None).update_query_dict(
            {"host": str(directory), "port": str(port)}
        )
        self.url = behind.render_as_string(hide_password=False)
        self._lock = threading.Lock()
        self._cut: bytes | None = None
        self._stalled = threading.Event()
        #: how many connections were cut
        self.cuts = 0
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"{directory}/.s.PGSQL.{port}")
        self._listener.listen()
        self._sockets: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_reply_to(self, words: bytes) -> None:
        """Deliver the next request with *words* in it, and close before the answer is passed on."""
        with self._lock:
            self._cut = words

    def stall(self) -> None:
        """Pass nothing on any more and close nothing, as a network that drops every packet."""
        self._stalled.set()

    def close(self) -> None:
        """Close everything."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _connect(self) -> socket.socket:
        if not isinstance(self._target, str):
            return socket.create_connection(self._target)
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        server.connect(self._target)
        return server

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = self._connect()
                self._sockets += [client, server]
                doomed = threading.Event()
                for ends in ((client, server), (server, client)):
                    threading.Thread(
                        target=self._pass, args=(*ends, ends[0] is client, doomed), daemon=True
                    ).start()

    def _pass(
        self, source: socket.socket, to: socket.socket, request: bool, doomed: threading.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self._stalled.is_set():
                    return
                if request:
                    with self._lock:
                        if self._cut is not None and self._cut in data:
                            self._cut = None
                            doomed.set()
                elif doomed.is_set():
                    self.cuts += 1
                    break  # the server has answered, so it has committed
                to.sendall(data)
        for each in (source, to):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def proxy_to(url: str, directory: Path) -> Iterator[Proxy]:
    """A proxy for the length of the block."""
    proxy = Proxy(url, directory)
    try:
        yield proxy
    finally:
        proxy.close()
