"""A connection to the database that can be cut where a test wants it to be."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import make_url


class Proxy:
    """Listens on a Unix socket in *directory* and passes on to the server behind *url*."""

    def __init__(self, url: str, directory: Path) -> None:
        target = make_url(url)
        host, port = str(target.query["host"]), str(target.query.get("port", "5432"))
        self._target = f"{host}/.s.PGSQL.{port}"
        self.url = target.update_query_dict({"host": str(directory)}).render_as_string(
            hide_password=False
        )
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

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._sockets += [client, server]
                server.connect(self._target)
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
