"""What differs between databases, behind one interface: connections, durability, and the channel for wake-ups."""

from abc import ABC, abstractmethod

from sqlalchemy import make_url
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError

from tinsmith.errors import ConfigError
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.database import Database
from tinsmith.sql_store.wakeups import WakeUps
from tinsmith.store import StoreContext


class Dialect(ABC):
    """One database. Creating it does no I/O."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The database as messages may show it: no password."""

    @abstractmethod
    def reader(self) -> Database:
        """Make a connection for reading."""

    @abstractmethod
    def writer(self, *, durable: bool) -> Database:
        """Make a connection whose commits are durable, or only visible to every process at once.

        What a durable commit follows is durable with it. Commits that are not may be lost only together with every
        process that has seen them.
        """

    @abstractmethod
    def wakeups(self) -> WakeUps:
        """Make the channel to the other processes on this database."""


def dialect_of(config: SqlStoreConfig, context: StoreContext) -> Dialect:
    """Raise ConfigError where the URL cannot be used, naming what can."""
    from tinsmith.sql_store.sqlite import SqliteDialect

    default = URL.create("sqlite", database=str(context.data_dir.expanduser() / "tinsmith.db"))
    try:
        url = default if config.url is None else make_url(config.url)
    except ArgumentError as error:
        msg = (
            f"store.url {config.url!r} is not a database URL; expected for instance sqlite:////var/lib/tinsmith.db "
            "or postgresql://user@host/database"
        )
        raise ConfigError(msg) from error
    match url.get_backend_name():
        case "sqlite" if context.shared:
            msg = (
                "server.share_data_dir: several servers need a database that they share, which SQLite is not; set "
                "store.url, for instance to postgresql://user@host/database"
            )
            raise ConfigError(msg)
        case "sqlite":
            return SqliteDialect(url, config)
        case "postgresql":
            return _postgres(url, config)
        case other:
            msg = f"store.url: no support for {other!r}; supported: sqlite, postgresql"
            raise ConfigError(msg)


def _postgres(url: URL, config: SqlStoreConfig) -> Dialect:
    try:
        from tinsmith.sql_store.postgres import PostgresDialect
    except ImportError as error:
        msg = f'store.url: PostgreSQL needs a driver: pip install "tinsmith[postgres]" ({error})'
        raise ConfigError(msg) from error
    return PostgresDialect(url, config)
