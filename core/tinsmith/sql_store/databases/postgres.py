"""PostgreSQL 13 or later, with psycopg: for several servers, and engines on several machines."""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

import psycopg
from psycopg.pq import Format
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, IntegrityError, InterfaceError, OperationalError
from sqlalchemy.pool import QueuePool

from tinsmith.errors import ConfigError, StoreError
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.databases.database import Channel, Database, Dialect
from tinsmith.sql_store.databases.notify_wakeups import NotifyWakeUps

T = TypeVar("T")

_MIGRATION_LOCK: Final = 0x7469_6E73  # "tins": one process at a time migrates the schema
_CONFLICTS: Final = frozenset({"40001", "40P01"})  # serialisation failure, deadlock
_MAX_CONFLICTS: Final = 10  # in a row
_FIRST_DELAY_S, _MAX_DELAY_S = 0.05, 2.0
_KEEPALIVE: Final = {
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "25000",
}
_OF_THE_DATABASE: Final = {
    "keepalives_idle": "tcp_keepalives_idle",
    "keepalives_interval": "tcp_keepalives_interval",
    "keepalives_count": "tcp_keepalives_count",
    "tcp_user_timeout": "tcp_user_timeout",
}
"""The same at the other end, which would keep the sessions of a machine that is cut off for two hours."""
IDLE_MS: Final = 10_000
"""The database ends a transaction that has been idle this long: a stopped process must not keep its locks.

If the process continues, it repeats the transaction.
"""
_GONE: Final = ("08", "57P")  # connection exceptions; a server that shuts down or starts
_FULL: Final = "53300"  # too many connections
_OLDEST: Final = (13,)

_TRANSACTION: Final = "SELECT pg_current_xact_id_if_assigned()::text"
_STATUS: Final = "SELECT pg_xact_status(CAST(%(transaction)s AS xid8))"

_log = logging.getLogger(__name__)


class PostgresDialect(Dialect):
    """Every commit is durable: an engine outlives a crash of the database, which must not forget its claims."""

    def __init__(self, url: URL, config: SqlStoreConfig) -> None:
        if url.drivername not in ("postgresql", "postgresql+psycopg"):
            msg = f"store.url: the driver {url.drivername!r} is not supported; use postgresql://"
            raise ConfigError(msg)
        query = {**_KEEPALIVE, "application_name": "tinsmith", **url.query}
        self._url = url.set(drivername="postgresql+psycopg", query=query)
        self._config = config

    @property
    def name(self) -> str:
        return self._url.set(query={}).render_as_string(hide_password=True)

    def visitor(self) -> Engine:
        query = {**self._url.query, "connect_timeout": "5"}
        return create_engine(self._url.set(query=query), execution_options={"postgresql_readonly": True})

    def version(self, connection: Connection) -> str:
        found = connection.dialect.server_version_info or (0,)
        check_age(found, self.name)
        return f"PostgreSQL {'.'.join(map(str, found))}"

    def reader(self) -> Database:
        return self._database(isolation_level="REPEATABLE READ", read_only=True)

    def writer(self, *, durable: bool) -> Database:
        del durable
        commit = None if self._config.synchronous == "full" else "off"
        return self._database(isolation_level="READ COMMITTED", read_only=False, synchronous_commit=commit)

    def wakeups(self) -> Channel:
        return NotifyWakeUps(self._conninfo, prepare=self._prepare)

    @property
    def _prepare(self) -> str:
        """Return a statement that has the database notice as early as we do that the other end is gone."""
        values = {name: self._url.query[ours] for ours, name in _OF_THE_DATABASE.items()}
        values["idle_in_transaction_session_timeout"] = str(IDLE_MS)
        return "SELECT " + ", ".join(f"set_config('{name}', '{value}', false)" for name, value in values.items())

    @property
    def _conninfo(self) -> str:
        return self._url.set(drivername="postgresql").render_as_string(hide_password=False)

    def _database(
        self, *, isolation_level: str, read_only: bool, synchronous_commit: str | None = None
    ) -> "PostgresDatabase":
        options = [] if synchronous_commit is None else [f"-c synchronous_commit={synchronous_commit}"]
        given = self._url.query.get("options")
        options = [*([given] if isinstance(given, str) else given or ()), *options]
        url = self._url.update_query_dict({"options": " ".join(options)}) if options else self._url
        return PostgresDatabase(
            url,
            self.name,
            isolation_level=isolation_level,
            read_only=read_only,
            outage_s=self._config.outage_s,
            prepare=self._prepare,
        )


def check_age(version: tuple[Any, ...], name: str) -> None:
    """Raise ConfigError if PostgreSQL is too old. Any: SQLAlchemy's own."""
    if version < _OLDEST:
        msg = f"store.url: PostgreSQL {version[0]} at {name} is too old; use {_OLDEST[0]} or later"
        raise ConfigError(msg)


class _BinaryCursor(psycopg.Cursor[Any]):
    """Fetches results in binary format, which halves the size of tensors."""

    def __init__(self, *args: Any, **options: Any) -> None:  # Any: psycopg's own
        super().__init__(*args, **options)
        self.format = Format.BINARY


class PostgresDatabase(Database):
    """Reconnects if the connection breaks, without losing work or doing it twice.

    Work that did not commit runs again. If the connection broke during the commit itself, the database is asked
    afterwards whether the commit took place.
    """

    locks_rows = True

    def __init__(
        self,
        url: URL,
        name: str,
        *,
        isolation_level: str,
        read_only: bool,
        outage_s: float,
        prepare: str,
    ) -> None:
        """`prepare`: a statement for each new connection."""
        engine = create_engine(
            url,
            poolclass=QueuePool,
            pool_size=1,
            max_overflow=0,
            isolation_level=isolation_level,
            use_native_hstore=False,
            connect_args={"cursor_factory": _BinaryCursor},
            execution_options={"postgresql_readonly": True} if read_only else {},
        )
        super().__init__(engine)
        event.listen(engine, "connect", partial(_prepare, prepare))
        self._name = name
        self._writes = not read_only
        self._outage_s = outage_s
        self._down_since: float | None = None
        self._closing = threading.Event()

    def spoils(self, error: Exception) -> bool:
        return isinstance(error, DBAPIError) and (_is_gone(error) or _sqlstate(error) in _CONFLICTS)

    def _transact(self, work: Callable[[Connection], T], commit: Callable[[Connection], None]) -> T:
        conflicts = 0
        while True:
            transaction: str | None = None
            try:
                with self._engine.connect() as connection:
                    result = work(connection)
                    if self._writes:
                        transaction = connection.exec_driver_sql(_TRANSACTION).scalar()
                    commit(connection)
            except DBAPIError as error:
                if _is_gone(error):
                    if transaction is not None and self._has_committed(transaction, error):
                        return result
                    self._wait(error)
                elif conflicts < _MAX_CONFLICTS and _is_conflict(error):
                    conflicts += 1
                else:
                    raise
            else:
                if self._down_since is not None:
                    _log.warning(
                        "the database %s is back after %.1f s", self._name, time.monotonic() - self._down_since
                    )
                    self._down_since = None
                return result

    def _has_committed(self, transaction: str, error: DBAPIError) -> bool:
        """Ask whether a commit during which the connection broke took place."""
        while True:
            self._wait(error)
            try:
                with self._engine.connect() as connection:
                    status = connection.exec_driver_sql(_STATUS, {"transaction": transaction}).scalar()
            except DBAPIError as again:
                if not _is_gone(again):
                    raise
                error = again
                continue
            if status != "in progress":  # else its server process has not noticed the broken connection yet
                return bool(status == "committed")

    def _wait(self, error: DBAPIError) -> None:
        """Wait before the next try. Raise StoreError once the outage has lasted too long."""
        now = time.monotonic()
        if self._down_since is None:
            self._down_since = now
            _log.warning("the database %s cannot be reached; trying again: %s", self._name, _reason(error))
        down_s = now - self._down_since
        if down_s >= self._outage_s or self._closing.is_set():
            msg = (
                f"the database {self._name} has not been reachable for {down_s:.0f} s ({_reason(error)}); check that "
                "it runs and that store.url is right"
            )
            raise StoreError(msg) from error
        self._closing.wait(min(max(down_s, _FIRST_DELAY_S), _MAX_DELAY_S))

    def _migrate(self, work: Callable[[Connection], None]) -> None:
        with self._engine.begin() as connection:
            check_age(connection.dialect.server_version_info or (0,), self._name)
            connection.execute(text("SET LOCAL idle_in_transaction_session_timeout = 0"))  # a migration is not retried
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
            work(connection)

    async def close(self) -> None:
        self._closing.set()
        await super().close()


def _prepare(statement: str, connection: Any, record: object) -> None:  # Any: the driver's connection
    del record
    connection.execute(statement)
    connection.commit()


def _is_gone(error: DBAPIError) -> bool:
    """Return whether the connection itself failed, rather than a statement sent over it."""
    if error.connection_invalidated or isinstance(error, InterfaceError):
        return True
    state = _sqlstate(error)
    return isinstance(error, OperationalError) and (state is None or state.startswith(_GONE) or state == _FULL)


def _is_conflict(error: DBAPIError) -> bool:
    """Return whether another process was faster: a deadlock, or a unique key that a second try finds taken."""
    return _sqlstate(error) in _CONFLICTS or isinstance(error, IntegrityError)


def _sqlstate(error: DBAPIError) -> str | None:
    return getattr(error.orig, "sqlstate", None)


def _reason(error: DBAPIError) -> str:
    return " ".join(str(error.orig).split())
