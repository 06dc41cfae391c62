import asyncio
import shutil
from pathlib import Path

import pytest

from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import KeptCheckpoints, PendingCounts, RequestStore, StoreContext
from tinsmith.testing.postgres import Postgres
from tinsmith.testing.store_contract import RequestStoreContract
from tinsmith.testing.store_records import MakeStore, a_checkpoint, a_model, a_sample, an_operation

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


class SqlStoreContract(RequestStoreContract):
    async def test_what_a_tenant_has_is_counted(self, store: RequestStore) -> None:
        await a_model(store)
        await store.submit(an_operation(seq_id=2, payload=b"123"))
        await store.submit(a_sample(payload=b"45"))
        await store.submit(a_sample(tenant="bob", subject_id="s2:sample:0"))
        await store.add_checkpoint(a_checkpoint("a"))
        await store.add_checkpoint(a_checkpoint("b"))
        await store.delete_checkpoint(a_checkpoint("b").path)
        assert await store.pending("ann") == PendingCounts(by_kind={"optim_step": 1, "sample": 1}, num_bytes=5)
        assert await store.count_samples("ann") == 1
        assert [await store.count_live_models(tenant) for tenant in ("ann", "bob")] == [1, 0]
        assert [await store.count_live_sessions(tenant) for tenant in ("ann", "bob")] == [1, 0]
        assert await store.kept_checkpoints("ann") == KeptCheckpoints(number=1, num_bytes=2**40)
        assert [await store.is_awaited("s1:train:0", seq_id) for seq_id in (1, 2)] == [True, False]


class TestSqlStoreOnSqlite(SqlStoreContract):
    @pytest.fixture
    def make_store(self, tmp_path: Path, migrated_file: Path) -> MakeStore:
        shutil.copy(migrated_file, tmp_path)
        return lambda: SqlStore(ON_SQLITE, StoreContext(data_dir=tmp_path))


class TestSqlStoreOnPostgres(SqlStoreContract):
    @pytest.fixture
    def make_store(self, tmp_path: Path, postgres: Postgres, database: str) -> MakeStore:
        postgres.empty(database)
        config = SqlStoreConfig(url=database, safety_poll_s=600.0)
        return lambda: SqlStore(config, StoreContext(data_dir=tmp_path))
