import asyncio
import shutil
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tinsmith.errors import NotFoundError, UserError
from tinsmith.operations import Failed, OptimStepOutput
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.sql_store.subjects import engine_states, gaps, sessions
from tinsmith.store import (
    WAITS_FOR_PLACE,
    CheckpointWritten,
    Completion,
    EngineRecord,
    EngineState,
    KeptCheckpoints,
    OperationState,
    PendingCounts,
    PlaceLimits,
    RecoveryPointTaken,
    RequestStore,
    RunState,
    RunStateChanged,
    SamplingSessionCreated,
    SamplingSessionRecord,
    StoreContext,
    StoredCheckpoints,
    Usage,
    UsageRecord,
)
from tinsmith.testing.postgres import Postgres
from tinsmith.testing.store_contract import RequestStoreContract
from tinsmith.testing.store_records import (
    BASE,
    NOW,
    MakeStore,
    a_checkpoint,
    a_creation,
    a_model,
    a_recovery_point,
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

    async def test_what_a_tenant_keeps_is_counted_until_it_is_deleted(self, store: RequestStore) -> None:
        """Of the log, of checkpoints, of snapshots and of recovery points; nothing of it is another tenant's."""
        await a_model(store)
        assert await store.kept_bytes("bob") == []
        before = (await store.kept_bytes("ann"))[0]
        assert before.log > 0  # of the creation
        step = await store.submit(an_operation(seq_id=1, payload=b"123"))
        await claim(store)
        saved = CheckpointWritten(record=a_checkpoint("a"))
        sampler = SamplingSessionRecord(
            sampling_session_id="s1:sample:7",
            session_id="s1",
            tenant="ann",
            base_model=BASE,
            created_at=NOW,
            num_bytes=700,
        )
        taken = RecoveryPointTaken(record=a_recovery_point(1), keep=2)
        effects = saved, SamplingSessionCreated(record=sampler), taken
        await complete(store, [done(step, OptimStepOutput(), *effects)])
        (kept,) = await store.kept_bytes("ann")
        result = len((await store.get_operation(step)).result or b"")
        assert kept.log == before.log + 3 + result
        assert (kept.checkpoints, kept.snapshots, kept.recovery_points) == (2**40, 700, 2**40)
        assert [each.tenant for each in await store.kept_bytes(None)] == ["ann"]
        await store.delete_checkpoint(a_checkpoint("a").path)
        assert (await store.kept_bytes("ann"))[0].checkpoints == 0
        await store.end_session("s1", "success", None)
        await store.lose_run(await lease_of(store), "s1:train:0", "lost")
        await store.prune(datetime.now(UTC) + timedelta(hours=1))
        assert [each.total for each in await store.kept_bytes("ann")] == [0]

    async def test_a_session_that_ends_lets_go_of_what_waits_in_bounded_parts(self, store: SqlStore) -> None:
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

    async def test_an_engine_that_is_given_up_fails_what_waits_in_bounded_parts(self, store: SqlStore) -> None:
        """It refuses first, so nothing is left behind."""
        await a_model(store)
        kept = await store.submit(an_operation(seq_id=1))
        await store.create_session(a_session("s2"), idempotency_key=None)
        creation = await store.create_run(a_run("s2:train:0"), a_creation("s2:train:0"))
        samples = await asyncio.gather(*[store.submit(a_sample(number)) for number in range(600)])
        lease = await lease_of(store)
        given_up = EngineRecord(base_model=BASE, state=EngineState.FAILED, updated_at=NOW, detail="no GPU")
        assert await store.connections.durable.write(engine_states.report, given_up, lease)  # and the supervisor dies
        assert "no GPU" in (await failure_of(store, await store.submit(a_sample(600)))).message
        assert await store.connections.durable.write(engine_states.fail_some, BASE, 0) is not None
        assert (await store.pending("ann")).by_kind == {"optim_step": 1, "sample": 101}
        await store.report_engine(given_up, lease=lease)
        assert (await store.pending("ann")).by_kind == {"optim_step": 1}
        assert await state_of(store, kept) == OperationState.QUEUED
        for request_id in (creation, samples[-1]):
            assert "no GPU" in (await failure_of(store, request_id)).message
        assert (await store.get_run("s2:train:0")).state is RunState.LOST
        found = await store.finished_samples("s1:sample:0", 0, after=0, limit=999, timeout_s=0)
        assert len(found.samples) == 601

    async def test_open_sampling_sessions_are_counted(self, store: SqlStore) -> None:
        for number, tenant in enumerate(["ann", "ann", "bob"]):
            await store.create_session(a_session(f"s{number}", tenant=tenant), idempotency_key=None)
            for name in ("a", "b"):
                sampler = SamplingSessionRecord(
                    sampling_session_id=f"s{number}:sample:{name}",
                    session_id=f"s{number}",
                    tenant=tenant,
                    base_model=BASE,
                    created_at=NOW,
                )
                await store.create_sampling_session(sampler)
        assert [await store.count_open_sampling_sessions(tenant) for tenant in ("ann", "bob", "eve")] == [4, 2, 0]
        await store.end_session("s0", "success", None)
        assert await store.count_open_sampling_sessions("ann") == 2

    async def test_whatever_has_finished_no_longer_counts_as_pending(self, store: SqlStore) -> None:
        await a_model(store)
        await heard(store)
        await a_model(store, "s2:train:0")
        lease = await lease_of(store)
        sizes = {"payload": b"x" * 10}
        refused = an_operation(seq_id=1, refused=Failed(message="no"), **sizes)
        assert await store.submit(refused) == await store.submit(refused)
        samples = [store.submit(a_sample(number, **sizes)) for number in range(4)]
        bad = store.submit(an_operation("nope:train:0", 1))  # shares a commit with them
        assert isinstance((await asyncio.gather(*samples, bad, return_exceptions=True))[-1], NotFoundError)
        step = await store.submit(an_operation(seq_id=2, **sizes))
        held = PendingCounts(by_kind={"sample": 4, "optim_step": 1}, num_bytes=50)
        assert await store.pending("ann") == held
        claimed = await claim(store)
        assert await store.pending("ann") == held
        await asyncio.gather(complete(store, [done(step)]), complete(store, [done(step)]))
        await store.cancel(claimed[1])
        await store.cancel(claimed[1])
        for _ in range(2):
            await store.requeue(lease, max_attempts=2, reason="it was killed")
            await claim(store)
        await store.submit(an_operation(seq_id=4, **sizes))
        await store.submit(an_operation("s2:train:0", 1, **sizes))
        assert await store.pending("ann") == PendingCounts(by_kind={"optim_step": 2}, num_bytes=20)
        await store.fail_gaps(BASE, older_than=datetime.now(UTC) + timedelta(hours=1))
        await store.lose_run(lease, "s2:train:0", "why")
        assert await store.pending("ann") == PendingCounts(by_kind={}, num_bytes=0)
        await store.submit(an_operation(seq_id=6, **sizes))
        await store.end_session("s1", "success", None)
        (unload,) = await claim(store)
        assert (await store.pending("ann")).by_kind == {"unload_model": 1}
        await complete(store, [done(unload)])
        assert await store.pending("ann") == PendingCounts(by_kind={}, num_bytes=0)

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
        now, hour = datetime.now(UTC), timedelta(hours=1)
        (hourly,) = await store.hourly_usage("ann", first=now - hour, last=now)
        assert hourly.hour is not None
        assert replace(hourly, hour=None) == ann
        assert hourly.hour in {each.replace(minute=0, second=0, microsecond=0) for each in (now, now - hour)}
        assert await store.hourly_usage("ann", first=hourly.hour, last=hourly.hour) == [hourly]
        for other in (hourly.hour - hour, hourly.hour + hour):
            assert await store.hourly_usage(None, first=other, last=other) == []

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
