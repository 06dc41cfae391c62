"""SQLite: one file in WAL mode, on a local disk of this machine."""

import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar, cast
from urllib.parse import quote

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import URL
from sqlalchemy.pool import StaticPool

from tinsmith.errors import ConfigError, StoreError
from tinsmith.fair_lock import FairLock
from tinsmith.host import NETWORK, file_system_of
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.databases.database import Channel, Database, Dialect
from tinsmith.sql_store.databases.socket_wakeups import SocketWakeUps

_STRENGTH: Final = ("off", "normal", "full")
_TRY_MS: Final = 4
_MMAP: Final = "mmap_size = 268435456"

# of scrubbing
_WAIT_MS: Final = 1000  # for transactions of other processes, which are blocked as long
_SLACK: Final = 0.25  # share of the file that may stay free, to be used again
_SMALL_PAGES: Final = 1024
_PAGES_AT_A_TIME: Final = 8192  # other processes can write in between

_log = logging.getLogger(__name__)

T = TypeVar("T")


class SqliteDialect(Dialect):
    """Relaxed commits are written to the log without a sync. The next durable commit syncs them with itself.

    SQLite has one writer at a time, and gives the lock to any that asks when it is free. So a process's writers share a
    fair lock: one with much to write would keep out the other.
    """

    def __init__(self, url: URL, config: SqlStoreConfig) -> None:
        if not url.database or url.database == ":memory:" or url.query:
            msg = (
                f"store.url {url.render_as_string()!r}: several processes share the database, so it must be a plain "
                "file, for instance sqlite:////var/lib/tinsmith/tinsmith.db"
            )
            raise ConfigError(msg)
        self.path = Path(url.database).expanduser().absolute()
        self._config = config
        self.write_lock = FairLock()

    @property
    def name(self) -> str:
        return str(self.path)

    def visitor(self) -> Engine | None:
        _refuse_network(self.path)
        if not self.path.exists():
            return None
        url = URL.create("sqlite", database=f"file:{quote(str(self.path))}", query={"mode": "ro", "uri": "true"})
        return create_engine(url, connect_args={"timeout": 1.0})

    def version(self, connection: Connection) -> str:
        return f"SQLite {connection.scalar(text('SELECT sqlite_version()'))}"

    def reader(self) -> Database:
        return SqliteDatabase(self.path, begin=_begin_reading, pragmas=self._pragmas("normal"))

    def glances(self) -> Connection:
        """Readers wait for nobody in WAL mode, but while the log is recovered: then a glance fails."""
        pragmas = (_busy_timeout(0), "query_only = ON", _MMAP)
        return _engine(self.path, pragmas).connect()

    def writer(self, *, durable: bool) -> Database:
        mode = self._config.synchronous
        if durable:
            pragmas = self._pragmas(mode, "auto_vacuum = INCREMENTAL")  # has no effect once anything is written
        else:
            pragmas = self._pragmas(min("normal", mode, key=_STRENGTH.index))
        begin = partial(_begin_writing, self._config.busy_timeout_s)
        pragmas = (*pragmas, f"busy_timeout = {_TRY_MS}")  # of BEGIN; after it, a transaction waits for nobody
        return SqliteDatabase(self.path, begin=begin, pragmas=pragmas, write_lock=self.write_lock)

    def wakeups(self) -> Channel:
        return SocketWakeUps(self.path.with_name(self.path.name + ".wake"))

    def _pragmas(self, synchronous: str, *first: str) -> tuple[str, ...]:
        return (
            _busy_timeout(self._config.busy_timeout_s),
            *first,
            "secure_delete = ON",  # overwrites deleted content
            "journal_mode = WAL",
            f"synchronous = {synchronous}",
            "foreign_keys = ON",
            _MMAP,
            "journal_size_limit = 67108864",
        )


class SqliteDatabase(Database):
    """A connection. Connections of one process that write share their `write_lock`."""

    def __init__(
        self,
        path: Path,
        *,
        begin: Callable[[Connection], None],
        pragmas: tuple[str, ...],
        write_lock: FairLock | None = None,
    ) -> None:
        super().__init__(_engine(path, pragmas))
        self._path = path
        self._write_lock = write_lock
        self._connection: Connection | None = None
        event.listen(self._engine, "begin", begin)

    def _transact(self, work: Callable[[Connection], T], commit: Callable[[Connection], None]) -> T:
        with nullcontext() if self._write_lock is None else self._write_lock:
            connection = self._connected()
            connection.begin()
            try:
                result = work(connection)
                commit(connection)
            except BaseException:
                connection.rollback()
                connection.connection.rollback()  # SQLite keeps open what it refused to commit
                raise
            return result

    def _connected(self) -> Connection:
        if self._connection is None:
            self._connection = self._engine.connect()
        return self._connection

    async def close(self) -> None:
        if self._connection is not None:
            await self._in_thread(self._connection.close)
        await super().close()

    def _migrate(self, work: Callable[[Connection], None]) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_network(self._path)
        self._path.touch(mode=0o600)  # it holds users' data; SQLite gives its log the same mode
        with self._engine.begin() as connection:
            work(connection)

    async def scrub(self) -> None:
        await self._in_thread(self._raw, _scrub)

    def _raw(self, work: Callable[[sqlite3.Connection], None]) -> None:
        """Run `work` on the driver's connection, outside a transaction."""
        connection = self._engine.raw_connection()
        try:
            work(cast("sqlite3.Connection", connection.driver_connection))
        except sqlite3.Error as error:
            msg = f"the database {str(self._path)!r} could not be scrubbed: {error}"
            raise StoreError(msg) from error
        finally:
            connection.close()


def _engine(path: Path, pragmas: tuple[str, ...]) -> Engine:
    url = URL.create("sqlite", database=str(path))
    engine = create_engine(url, poolclass=StaticPool, connect_args={"check_same_thread": False})
    event.listen(engine, "connect", partial(_prepare, pragmas))
    return engine


def _refuse_network(path: Path) -> None:
    """Raise ConfigError: the write-ahead log needs shared memory and locks, and there two machines would corrupt it."""
    kind = file_system_of(path)
    if kind in NETWORK:
        msg = (
            f"the database {str(path)!r} would lie on a network file system ({kind}), where SQLite loses data; choose "
            "a directory on a local disk with server.data_dir or store.url (sqlite:////var/lib/tinsmith.db), or set "
            "store.url to a PostgreSQL database"
        )
        raise ConfigError(msg)


def _prepare(pragmas: tuple[str, ...], connection: Any, record: object) -> None:  # Any: the driver's connection
    del record
    connection.isolation_level = None  # `_begin` sends BEGIN: the driver's own breaks savepoints and DDL
    for pragma in pragmas:
        connection.execute(f"PRAGMA {pragma}")


def _busy_timeout(seconds: float) -> str:
    return f"busy_timeout = {int(seconds * 1000)}"


def _begin_reading(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN")


def _begin_writing(timeout_s: float, connection: Connection) -> None:
    """Wait for other writers, looking about every millisecond.

    SQLite looks less and less often, up to every 100 ms. A long wait would hardly ever end in the short
    pauses between the transactions of another busy process.
    """
    driver = cast("sqlite3.Connection", connection.connection.driver_connection)
    give_up_at = time.monotonic() + timeout_s
    while _others_write(driver) and time.monotonic() < give_up_at:
        pass
    if not driver.in_transaction:
        connection.exec_driver_sql("BEGIN IMMEDIATE")  # raises what is wrong, in SQLAlchemy's form


def _others_write(driver: sqlite3.Connection) -> bool:
    """Begin, unless another connection keeps writing for longer than a try takes (a writer's `busy_timeout`)."""
    try:
        driver.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        return error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
    return False


# removing deleted content: `secure_delete` overwrites it in the file, this empties the write-ahead log


def _scrub(connection: sqlite3.Connection) -> None:
    """Empty the write-ahead log, and shrink the file if much of it is free.

    If another process keeps a transaction open meanwhile, the next call does the rest.
    """
    with _waiting(connection, _WAIT_MS):
        free = _number(connection, "freelist_count")
        while free > max(_SMALL_PAGES, _SLACK * _number(connection, "page_count")):
            connection.execute(f"PRAGMA incremental_vacuum({_PAGES_AT_A_TIME})").fetchall()
            left = _number(connection, "freelist_count")
            if left >= free:
                break
            free = left
        (busy, _, _) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    if busy:
        _log.info("deleted rows may still be in the write-ahead log: another process reads it; trying again later")


@contextmanager
def _waiting(connection: sqlite3.Connection, milliseconds: int) -> Iterator[None]:
    before = _number(connection, "busy_timeout")
    connection.execute(f"PRAGMA busy_timeout = {milliseconds}")
    try:
        yield
    finally:
        connection.execute(f"PRAGMA busy_timeout = {before}")


def _number(connection: sqlite3.Connection, pragma: str) -> int:
    (value,) = connection.execute(f"PRAGMA {pragma}").fetchone()
    return int(value)
