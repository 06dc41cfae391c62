import asyncio
import shutil
from pathlib import Path

import pytest

from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import StoreContext
from tinsmith.testing.postgres import Postgres
from tinsmith.testing.store_contract import RequestStoreContract
from tinsmith.testing.store_records import MakeStore

# No test cuts the power. A poll far longer than any wait shows that wake-ups alone suffice.
ON_SQLITE = SqlStoreConfig(synchronous="off", safety_poll_s=600.0)


@pytest.fixture(scope="module")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an empty database: a copy of it costs a fraction of a migration."""
    directory = tmp_path_factory.mktemp("migrated")

    async def migrate() -> None:
        store = SqlStore(ON_SQLITE, StoreContext(data_dir=directory))
        await store.open()
        await store.close()

    asyncio.run(migrate())
    return directory / "tinsmith.db"


@pytest.fixture(scope="module")
def database(postgres: Postgres) -> str:
    return postgres.new_database()


class TestSqlStoreOnSqlite(RequestStoreContract):
    @pytest.fixture
    def make_store(self, tmp_path: Path, migrated_file: Path) -> MakeStore:
        shutil.copy(migrated_file, tmp_path)
        return lambda: SqlStore(ON_SQLITE, StoreContext(data_dir=tmp_path))


class TestSqlStoreOnPostgres(RequestStoreContract):
    @pytest.fixture
    def make_store(self, tmp_path: Path, postgres: Postgres, database: str) -> MakeStore:
        postgres.empty(database)
        config = SqlStoreConfig(url=database, safety_poll_s=600.0)
        return lambda: SqlStore(config, StoreContext(data_dir=tmp_path))
