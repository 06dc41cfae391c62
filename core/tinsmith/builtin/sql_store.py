"""The SQL request store."""

from tinsmith.hookspecs import hookimpl
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.store import RequestStore, StoreContext, StoreSpec


@hookimpl
def tinsmith_register_stores() -> StoreSpec[SqlStoreConfig]:
    return StoreSpec(
        name="sql",
        config=SqlStoreConfig,
        create=_create,
        description="SQLite in the data directory (default)",
        diagnose=_diagnose,
    )


def _diagnose(config: SqlStoreConfig, context: StoreContext) -> str:
    from tinsmith.sql_store.choose import diagnose

    return diagnose(config, context)


def _create(config: SqlStoreConfig, context: StoreContext) -> RequestStore:
    from tinsmith.sql_store.store import SqlStore

    return SqlStore(config, context)
