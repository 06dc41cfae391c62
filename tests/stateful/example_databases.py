"""The databases that the stateful test runs on: an empty one for each example, at little cost."""

import asyncio
import shutil
from abc import ABC, abstractmethod
from pathlib import Path

import psycopg
from psycopg import sql

from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import RequestStore, StoreContext

NO_POLL_S = 600.0  # far longer than any wait: wake-ups alone suffice


class Databases(ABC):
    """One at a time is in use."""

    @abstractmethod
    def empty(self, data_dir: Path) -> None:
        """Make this example's database, and its data directory."""

    @abstractmethod
    def store(self, data_dir: Path) -> RequestStore:
        """Return a new store on it, not open."""


class SqliteFiles(Databases):
    def __init__(self, template: Path) -> None:
        self._template = template
        _migrate(self.store(template))

    def empty(self, data_dir: Path) -> None:
        shutil.copytree(self._template, data_dir, dirs_exist_ok=True)

    def store(self, data_dir: Path) -> RequestStore:
        return SqlStore(SqlStoreConfig(synchronous="off", safety_poll_s=NO_POLL_S), StoreContext(data_dir=data_dir))


class PostgresTables(Databases):
    """One database; to empty its tables takes a fraction of the time that a new one takes."""

    def __init__(self, url: str) -> None:
        self._url = url
        _migrate(self.store(Path("unused")))
        self._connection = psycopg.connect(url, autocommit=True)
        found = self._connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
        names = [sql.Identifier(name) for (name,) in found if name != "alembic_version"]
        self._truncate = sql.SQL("TRUNCATE {} RESTART IDENTITY").format(sql.SQL(", ").join(names))

    def close(self) -> None:
        self._connection.close()

    def empty(self, data_dir: Path) -> None:
        data_dir.mkdir(parents=True)
        self._connection.execute(self._truncate)

    def store(self, data_dir: Path) -> RequestStore:
        config = SqlStoreConfig(url=self._url, safety_poll_s=NO_POLL_S)
        return SqlStore(config, StoreContext(data_dir=data_dir))

    def break_connections(self) -> None:
        """End those of the stores, whatever they are at."""
        self._connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )


def _migrate(store: RequestStore) -> None:
    async def make() -> None:
        await store.open()
        await store.close()

    asyncio.run(make())
