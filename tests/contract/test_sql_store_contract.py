import asyncio
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tinsmith.errors import UserError
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.sql_store.subjects import engines, gaps, sessions
from tinsmith.store import (
    WAITS_FOR_PLACE,
    EngineRecord,
    EngineState,
    OperationState,
    PlaceLimits,
    RunState,
    RunStateChanged,
    StoreContext,
)
from tinsmith.testing.postgres import Postgres
from tinsmith.testing.store_contract import RequestStoreContract
from tinsmith.testing.store_records import (
    BASE,
    NOW,
    MakeStore,
    a_creation,
    a_model,
    a_run,
    a_sample,
    a_session,
    an_operation,
    claim,
    complete,
    done,
    failure_of,
    heard,
    lease_of,
    state_of,
)

# No test cuts the power. A poll far longer than any wait shows that wake-ups alone suffice.
LONG_AGO = NOW - timedelta(days=1)
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
    async def test_a_session_that_ends_lets_go_of_what_waits_in_bounded_chunks(self, store: SqlStore) -> None:
        """Whatever dies in between, nothing runs behind the unloading, and the engine goes on with the failing."""
        await a_model(store)
        first = await store.submit(an_operation(seq_id=1))
        late = await asyncio.gather(*[store.submit(an_operation(seq_id=seq_id)) for seq_id in range(3, 604)])
        await store.connections.durable.write(sessions.end, "s1", "success", None)  # and the server dies
        assert {await state_of(store, each) for each in late} == {OperationState.QUEUED}
        assert (await store.waiting(late[5])).missing_seq_id == 2
        claimed = await claim(store)
        assert claimed[0] == first
        assert [(await store.get_operation(each)).kind for each in claimed[1:]] == ["unload_model"]
        with pytest.raises(UserError, match="has ended"):
            await store.submit(an_operation(seq_id=900))
        assert await store.submit(an_operation(seq_id=3)) == late[0]
        part = await store.connections.durable.write(gaps.fail_some, "s1:train:0", None)
        assert part == (500, True)
        await store.requeue(await lease_of(store), max_attempts=3, reason="it was killed")
        assert await claim(store) == claimed
        assert await store.fail_gaps(BASE, older_than=LONG_AGO) == 101
        assert {await state_of(store, each) for each in late} == {OperationState.FAILED}
        assert await store.fail_gaps(BASE, older_than=LONG_AGO) == 0

    async def test_a_session_that_ends_while_a_gap_is_being_failed(self, store: SqlStore) -> None:
        await a_model(store)
        await heard(store)
        late = await asyncio.gather(*[store.submit(an_operation(seq_id=seq_id)) for seq_id in range(2, 603)])
        soon = datetime.now(UTC) + timedelta(hours=1)
        part = await store.connections.durable.write(gaps.fail_some, "s1:train:0", soon)
        assert part == (500, True)
        following = await store.submit(an_operation(seq_id=603))
        behind = await store.submit(an_operation(seq_id=605))
        await store.end_session("s1", "success", None)
        assert {await state_of(store, each) for each in late} == {OperationState.FAILED}
        assert "seq_id 1 " in (await failure_of(store, late[-1])).message
        assert "seq_id 604 " in (await failure_of(store, behind)).message
        claimed = await claim(store)
        assert claimed[0] == following
        assert [(await store.get_operation(each)).kind for each in claimed[1:]] == ["unload_model"]

    @pytest.mark.parametrize("state", [RunState.LOST, RunState.UNLOADED])
    async def test_an_engine_fails_what_waits_behind_a_gap_of_a_model_that_is_gone(
        self, store: SqlStore, state: RunState
    ) -> None:
        """Whether its session has ended does not matter."""
        await a_model(store)
        first = await store.submit(an_operation(seq_id=1))
        late = await asyncio.gather(*[store.submit(an_operation(seq_id=seq_id)) for seq_id in range(3, 604)])
        await claim(store)
        await complete(store, [done(first, None, RunStateChanged(model_id="s1:train:0", state=state))])
        assert await store.fail_gaps(BASE, older_than=LONG_AGO) == len(late)
        assert f" {state.value}" in (await failure_of(store, late[-1])).message
        assert await store.fail_gaps(BASE, older_than=LONG_AGO) == 0

    async def test_a_model_without_a_place_whose_session_ends_leaves_nothing_behind(self, store: SqlStore) -> None:
        await store.create_session(a_session(), idempotency_key=None)
        creation = await store.create_run(a_run(next_seq_id=WAITS_FOR_PLACE), a_creation())
        first = await store.submit(an_operation(seq_id=1))
        behind = await store.submit(an_operation(seq_id=3))
        await store.connections.durable.write(sessions.end, "s1", "success", None)  # and the server dies
        limits = PlaceLimits(max_models=1, kept=0, give_up_before=LONG_AGO, failure="")
        await store.admit_models(await lease_of(store), limits)
        claimed = await claim(store)
        assert claimed[:2] == [creation, first]
        assert [(await store.get_operation(each)).kind for each in claimed[2:]] == ["unload_model"]
        assert await store.fail_gaps(BASE, older_than=LONG_AGO) == 1
        assert "seq_id 2 " in (await failure_of(store, behind)).message

    async def test_an_engine_that_is_given_up_fails_what_waits_in_bounded_chunks(self, store: SqlStore) -> None:
        """It refuses first, so nothing is left behind."""
        await a_model(store)
        kept = await store.submit(an_operation(seq_id=1))
        await store.create_session(a_session("s2"), idempotency_key=None)
        creation = await store.create_run(a_run("s2:train:0"), a_creation("s2:train:0"))
        samples = await asyncio.gather(*[store.submit(a_sample(number)) for number in range(600)])
        lease = await lease_of(store)
        given_up = EngineRecord(base_model=BASE, state=EngineState.FAILED, updated_at=NOW, detail="no GPU")
        assert await store.connections.durable.write(engines.report, given_up, lease)  # and the supervisor dies
        assert "no GPU" in (await failure_of(store, await store.submit(a_sample(600)))).message
        assert await store.connections.durable.write(engines.fail_some, BASE, 0) is not None
        assert (await store.pending("ann")).by_kind == {"optim_step": 1, "sample": 101}
        await store.report_engine(given_up, lease=lease)
        assert (await store.pending("ann")).by_kind == {"optim_step": 1}
        assert await state_of(store, kept) == OperationState.QUEUED
        for request_id in (creation, samples[-1]):
            assert "no GPU" in (await failure_of(store, request_id)).message
        assert (await store.get_run("s2:train:0")).state is RunState.LOST
        found = await store.finished_samples("s1:sample:0", 0, after=0, limit=999, timeout_s=0)
        assert len(found.samples) == 601


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
