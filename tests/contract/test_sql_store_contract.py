from pathlib import Path

import pytest

from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import StoreContext
from tinsmith.testing.store_contract import RequestStoreContract
from tinsmith.testing.store_records import MakeStore


class TestSqlStoreOnSqlite(RequestStoreContract):
    @pytest.fixture
    def make_store(self, tmp_path: Path) -> MakeStore:
        # No test cuts the power; a poll far longer than any wait shows that wake-ups alone suffice.
        config = SqlStoreConfig(synchronous="off", safety_poll_s=600.0)
        return lambda: SqlStore(config, StoreContext(data_dir=tmp_path))


class TestSqlStoreOnPostgres(RequestStoreContract):
    @pytest.fixture
    def make_store(self, tmp_path: Path, postgres_url: str) -> MakeStore:
        config = SqlStoreConfig(url=postgres_url, safety_poll_s=600.0)
        return lambda: SqlStore(config, StoreContext(data_dir=tmp_path))
