"""SQLite: one file in WAL mode, on a disk of this machine."""

from pathlib import Path
from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import AsyncAdaptedQueuePool

from tinsmith.errors import ConfigError
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.dialect import Dialect
from tinsmith.sql_store.socket_wakeups import SocketWakeUps
from tinsmith.sql_store.wakeups import WakeUps


class SqliteDialect(Dialect):
    """Relaxed commits go to the write-ahead log unsynced; the next durable commit syncs the log, and them with it."""

    def __init__(self, url: URL, config: SqlStoreConfig) -> None:
        if not url.database or url.database == ":memory:" or url.query:
            msg = (
                f"store.url {url.render_as_string()!r}: several processes share the database, so it must be a plain "
                "file, for instance sqlite:////var/lib/tinsmith/tinsmith.db"
            )
            raise ConfigError(msg)
        self.path = Path(url.database).expanduser().absolute()
        self._url = url.set(drivername="sqlite+aiosqlite", database=str(self.path))
        self._config = config

    @property
    def name(self) -> str:
        return str(self.path)

    def reader(self) -> AsyncEngine:
        return self._engine(begin="BEGIN", synchronous="normal", size=self._config.max_readers)

    def writer(self, *, durable: bool) -> AsyncEngine:
        mode = self._config.synchronous if durable else min("normal", self._config.synchronous, key=_strength)
        return self._engine(begin="BEGIN IMMEDIATE", synchronous=mode, size=1)

    def wakeups(self) -> WakeUps:
        return SocketWakeUps(self.path.with_name(self.path.name + ".wake"))

    def _engine(self, *, begin: str, synchronous: str, size: int) -> AsyncEngine:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.touch(mode=0o600)  # it holds the users' data; SQLite copies the mode to its log
        engine = create_async_engine(self._url, poolclass=AsyncAdaptedQueuePool, pool_size=size, max_overflow=0)
        timeout_ms = int(self._config.busy_timeout_s * 1000)

        @event.listens_for(engine.sync_engine, "connect")
        def prepare(connection: Any, record: object) -> None:  # Any: the driver's connection
            del record
            connection.isolation_level = None  # we say BEGIN ourselves: the driver's own breaks savepoints and DDL
            cursor = connection.cursor()
            for pragma in (
                f"busy_timeout = {timeout_ms}",
                "journal_mode = WAL",
                f"synchronous = {synchronous}",
                "foreign_keys = ON",
                "secure_delete = OFF",
                "mmap_size = 268435456",
            ):
                cursor.execute(f"PRAGMA {pragma}")
            cursor.close()

        @event.listens_for(engine.sync_engine, "begin")
        def start(connection: Any) -> None:  # Any: SQLAlchemy types this hook loosely
            connection.exec_driver_sql(begin)

        return engine


def _strength(mode: str) -> int:
    return ("off", "normal", "full").index(mode)
