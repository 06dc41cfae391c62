"""Chooses the database from the configuration, and describes it before it is opened."""

import time

from sqlalchemy import inspect, make_url, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from tinsmith.errors import ConfigError, StoreError
from tinsmith.settings import DataDir
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.databases.database import Dialect
from tinsmith.sql_store.databases.sqlite import SqliteDialect
from tinsmith.sql_store.migrate import check_known, schema_of_log
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


def diagnose(config: SqlStoreConfig, context: StoreContext) -> str:
    """Return the database's version, its migrations, and how long it takes to answer. Change nothing.

    Raise ConfigError if it can never be used, StoreError if it cannot be reached.
    """
    dialect, log = dialect_of(config, context), schema_of_log()
    engine = dialect.visitor()
    if engine is None:
        return f"{dialect.name} will be made"
    try:
        with engine.connect() as connection:
            began_s = time.perf_counter()
            connection.execute(text("SELECT 1"))
            took_s = time.perf_counter() - began_s
            version = dialect.version(connection)
            revision = log.found_revision(connection, inspect(connection).get_table_names())
    except SQLAlchemyError as error:
        why = _reason(error)
        msg = f"the database {dialect.name} cannot be used ({why}); check that it runs and that store.url is right"
        raise StoreError(msg) from error
    finally:
        engine.dispose()
    newest = log.revisions[-1]
    if revision is None:
        schema = "empty"
    else:
        check_known(revision, dialect.name, log)
        schema = f"schema {revision}" if revision == newest else f"schema {revision}, to be migrated to {newest}"
    return f"{version}, {schema}, answers in {took_s * 1e3:.1f} ms"


def _reason(error: SQLAlchemyError) -> str:
    cause = getattr(error, "orig", None) or error
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0]
