"""Choosing the database from the configuration."""

from sqlalchemy import make_url
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError

from tinsmith.errors import ConfigError
from tinsmith.settings import DataDir
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.databases.database import Dialect
from tinsmith.sql_store.databases.sqlite import SqliteDialect
from tinsmith.store import StoreContext


def dialect_of(config: SqlStoreConfig, context: StoreContext) -> Dialect:
    """Raise ConfigError if the URL cannot be used; the message says which URLs can."""
    default = URL.create("sqlite", database=str(DataDir.at(context.data_dir).database))
    try:
        url = default if config.url is None else make_url(config.url.get_secret_value())
    except ArgumentError as error:
        msg = (
            "store.url is not a database URL; use for instance sqlite:////var/lib/tinsmith.db or "
            "postgresql://user@host/database"
        )
        raise ConfigError(msg) from error
    if url.drivername == "postgres":  # as many programs and hosts write it
        url = url.set(drivername="postgresql")
    match url.get_backend_name():
        case "sqlite" if context.shared:
            msg = (
                "server.share_data_dir: several servers cannot share an SQLite database; set store.url, for instance "
                "to postgresql://user@host/database"
            )
            raise ConfigError(msg)
        case "sqlite":
            return SqliteDialect(url, config)
        case "postgresql":
            return _postgres(url, config)
        case other:
            msg = f"store.url: {other!r} is not supported; supported: sqlite, postgresql"
            raise ConfigError(msg)


def _postgres(url: URL, config: SqlStoreConfig) -> Dialect:
    try:
        from tinsmith.sql_store.databases.postgres import PostgresDialect
    except ImportError as error:
        msg = f'store.url: PostgreSQL needs a driver: pip install "tinsmith[postgres]" ({error})'
        raise ConfigError(msg) from error
    return PostgresDialect(url, config)
