import asyncio
import shutil
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tinsmith.operations import OptimStepOutput
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import (
    CheckpointWritten,
    Completion,
    KeptCheckpoints,
    OperationState,
    PendingCounts,
    RequestStore,
    StoreContext,
    StoredCheckpoints,
    Usage,
    UsageRecord,
)
from tinsmith.testing.postgres import Postgres
from tinsmith.testing.store_contract import RequestStoreContract
from tinsmith.testing.store_records import (
    BASE,
    MakeStore,
    a_checkpoint,
    a_model,
    a_sample,
    an_operation,
    claim,
    complete,
    heard,
    lease_of,
)

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

    async def test_what_can_never_run_is_stored_without_its_payload(self, store: RequestStore) -> None:
        await a_model(store)
        await heard(store)
        await store.submit(an_operation(seq_id=2))
        await store.fail_gaps(BASE, older_than=datetime.now(UTC) + timedelta(hours=1))
        await store.submit(an_operation(seq_id=1))  # the model has gone on without it
        await store.lose_run(await lease_of(store), "s1:train:0", "for some reason")
        await store.submit(an_operation(seq_id=3))
        logged = await store.list_log("s1:train:0", from_seq_id=1, limit=9)
        assert [(each.state, each.payload_bytes > 0) for each in logged] == [
            (OperationState.FAILED, False),
            (OperationState.FAILED, True),
            (OperationState.FAILED, False),
        ]

    async def test_what_an_operation_used_is_counted_once(self, store: RequestStore) -> None:
        await a_model(store)
        steps = [await store.submit(an_operation(seq_id=seq_id)) for seq_id in (1, 2)]
        sample = await store.submit(a_sample(tenant="bob"))
        await claim(store)
        completions = [
            Completion(request_id=steps[0], result=OptimStepOutput(), usage=Usage(trained_tokens=5, engine_s=0.5)),
            Completion(
                request_id=steps[1],
                result=OptimStepOutput(),
                effects=(CheckpointWritten(record=a_checkpoint(size_bytes=2**40)),),
                usage=Usage(trained_tokens=7, engine_s=0.25),
            ),
            Completion(request_id=sample, result=OptimStepOutput(), usage=Usage(prefilled_tokens=3, sampled_tokens=2)),
        ]
        for _ in range(2):  # the answer to the first may have been lost
            await complete(store, completions)
        ann = UsageRecord(
            tenant="ann", base_model=BASE, trained_tokens=12, checkpoints=1, stored_bytes=2**40, engine_s=0.75
        )
        bob = UsageRecord(tenant="bob", base_model=BASE, prefilled_tokens=3, sampled_tokens=2)
        assert await store.total_usage(None) == [ann, bob]
        assert await store.total_usage("bob") == [bob]
        today = datetime.now(UTC).date()
        daily = await store.daily_usage("ann", first=today - timedelta(days=1), last=today)
        assert [replace(record, day=None) for record in daily] == [ann]
        assert await store.daily_usage(None, first=today - timedelta(days=9), last=today - timedelta(days=2)) == []

    async def test_what_is_kept_is_told_by_project(self, store: RequestStore) -> None:
        await a_model(store)
        await store.update_session("s1", project_id="p")
        await store.add_checkpoint(a_checkpoint("a"))
        await store.add_checkpoint(replace(a_checkpoint("b"), model_id="imported"))
        await store.add_checkpoint(a_checkpoint("c", tenant="bob"))
        of_project = StoredCheckpoints(tenant="ann", project_id="p", number=1, num_bytes=2**40)
        assert await store.stored_checkpoints("ann", project_id="p") == [of_project]
        assert {each.project_id for each in await store.stored_checkpoints("ann")} == {"p", None}
        assert {each.tenant for each in await store.stored_checkpoints(None)} == {"ann", "bob"}


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
