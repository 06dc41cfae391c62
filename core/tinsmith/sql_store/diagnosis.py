"""What can be said about a database before it is opened, without changing it."""

import time

from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from tinsmith.errors import StoreError
from tinsmith.sql_store.choose import dialect_of
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.migrate import check_known, found_revision, known_revisions
from tinsmith.store import StoreContext


def diagnose(config: SqlStoreConfig, context: StoreContext) -> str:
    """Return the database's version, its migrations, and how long it takes to answer.

    Raise ConfigError if it can never be used, StoreError if it cannot be reached.
    """
    dialect = dialect_of(config, context)
    engine = dialect.visitor()
    if engine is None:
        return f"{dialect.name} will be made"
    try:
        with engine.connect() as connection:
            began_s = time.perf_counter()
            connection.execute(text("SELECT 1"))
            took_s = time.perf_counter() - began_s
            version = dialect.version(connection)
            revision = found_revision(connection)
    except SQLAlchemyError as error:
        why = _reason(error)
        msg = f"the database {dialect.name} cannot be used ({why}); check that it runs and that store.url is right"
        raise StoreError(msg) from error
    finally:
        engine.dispose()
    newest = known_revisions()[-1]
    if revision is None:
        schema = "empty"
    else:
        check_known(revision, dialect.name)
        schema = f"schema {revision}" if revision == newest else f"schema {revision}, to be migrated to {newest}"
    return f"{version}, {schema}, answers in {took_s * 1e3:.1f} ms"


def _reason(error: SQLAlchemyError) -> str:
    cause = getattr(error, "orig", None) or error
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0]
