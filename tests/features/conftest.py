"""Stores with the tables of the core's features, on both databases."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tinsmith.plugins.loading import Plugins
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import RequestStore, StoreContext
from tinsmith.testing.postgres import Postgres
from tinsmith.testing.store_records import MakeStore

_HERE = Path(__file__).parent
ON_SQLITE = SqlStoreConfig(synchronous="off", safety_poll_s=600.0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The SDK leaves HTTP connections open until they are collected; that is its own business."""
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"))


@pytest.fixture(scope="module")
def database(postgres: Postgres) -> str:
    return postgres.new_database()


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> MakeStore:
    """Return a function that opens the same, initially empty database as another process would."""
    config = ON_SQLITE
    if request.param == "postgresql":
        postgres, database = request.getfixturevalue("postgres"), request.getfixturevalue("database")
        postgres.empty(database)
        config = SqlStoreConfig(url=database, safety_poll_s=600.0)
    context = StoreContext(data_dir=tmp_path, tables=Plugins.load().make_tables())
    return lambda: SqlStore(config, context)


@pytest.fixture
async def store(make_store: MakeStore) -> AsyncIterator[RequestStore]:
    store = make_store()
    await store.open()
    yield store
    await store.close()
