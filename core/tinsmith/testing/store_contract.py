"""The suite that every request store passes: subclass `RequestStoreContract` and say how to make one.

    class TestMyStore(RequestStoreContract):
        @pytest.fixture
        def make_store(self, tmp_path):
            return lambda: MyStore(...)  # each call: another process's view of the same, initially empty database

Needs the `testing` extra (pytest, pytest-asyncio in auto mode).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tinsmith.backend import Capabilities
from tinsmith.codec import decode_operation, decode_result, encode_operation
from tinsmith.errors import ConflictError, LeaseLostError, NotFoundError, ResultExpiredError, ServerError, UserError
from tinsmith.operations import (
    CreateModel,
    Failed,
    LoraConfig,
    ModelCreated,
    ModelUnloaded,
    OptimStepOutput,
    Result,
    SampleOutput,
    UnloadModel,
)
from tinsmith.store import (
    SEQ_IDS_PER_CLONE,
    CheckpointRecord,
    CheckpointWritten,
    Completion,
    EngineRecord,
    EngineState,
    Lease,
    LeaseHeld,
    LoraResolved,
    NewOperation,
    OperationState,
    RequestStore,
    RunRecord,
    RunState,
    RunStateChanged,
    SamplerCreated,
    SamplerRecord,
    SessionRecord,
    SnapshotRecord,
    SnapshotTaken,
)

BASE = "org/base-model"
NOW = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
LONG_S = 30.0  # a wait that a test expects to be woken from
LORA = LoraConfig(rank=8, seed=7)

MakeStore = Callable[[], RequestStore]


def a_session(session_id: str = "s1", **more: Any) -> SessionRecord:  # Any: fields of the record
    values: dict[str, Any] = {"tenant": "ann", "created_at": NOW, "last_seen_at": NOW, **more}
    return SessionRecord(session_id=session_id, **values)


def a_run(model_id: str = "s1:train:0", **more: Any) -> RunRecord:  # Any: as above
    values: dict[str, Any] = {
        "session_id": model_id.split(":")[0],
        "tenant": "ann",
        "base_model": BASE,
        "lora": LORA,
        "created_at": NOW,
        "last_request_at": NOW,
        **more,
    }
    return RunRecord(model_id=model_id, **values)


def an_operation(stream: str = "s1:train:0", seq_id: int = 0, **more: Any) -> NewOperation:  # Any: as above
    values: dict[str, Any] = {
        "base_model": BASE,
        "kind": "optim_step",
        "tenant": "ann",
        "session_id": stream.split(":")[0],
        "ordered": True,
        "payload": f"{stream} {seq_id}".encode(),
        "digest": f"digest {seq_id}".encode(),
        **more,
    }
    return NewOperation(stream=stream, seq_id=seq_id, **values)


def a_creation(model_id: str = "s1:train:0", **more: Any) -> NewOperation:  # Any: as above
    payload = encode_operation(CreateModel(model_id=model_id, lora=LORA))
    return an_operation(model_id, 0, kind="create_model", payload=payload, **more)


def a_sample(seq_id: int = 0, stream: str = "s1:sample:0", **more: Any) -> NewOperation:  # Any: as above
    return an_operation(stream, seq_id, kind="sample", ordered=False, **more)


def a_checkpoint(name: str = "first", **more: Any) -> CheckpointRecord:  # Any: as above
    values: dict[str, Any] = {
        "model_id": "s1:train:0",
        "tenant": "ann",
        "kind": "training",
        "base_model": BASE,
        "lora": LORA,
        "created_at": NOW,
        "size_bytes": 2**40,
        "directory": f"s1:train:0/weights/{name}",
        "step": 3,
        "user_metadata": {"who": "ann"},
        **more,
    }
    return CheckpointRecord(path=f"tinker://s1:train:0/weights/{name}", **values)


def a_snapshot(seq_id: int, model_id: str = "s1:train:0") -> SnapshotRecord:
    return SnapshotRecord(
        model_id=model_id, seq_id=seq_id, directory=f"{model_id}/{seq_id}", size_bytes=2**40, created_at=NOW
    )


async def a_model(store: RequestStore, model_id: str = "s1:train:0", tenant: str = "ann") -> str:
    """Make a session and a model that is ready, and return the creation's request_id."""
    session_id = model_id.split(":")[0]
    await store.create_session(a_session(session_id, tenant=tenant), idempotency_key=session_id)
    request_id = await store.create_run(a_run(model_id, tenant=tenant), a_creation(model_id, tenant=tenant))
    await claim(store)
    ready = RunStateChanged(model_id=model_id, state=RunState.READY)
    await complete(store, [done(request_id, ModelCreated(model_id=model_id), ready)])
    return request_id


async def claim(store: RequestStore, max_operations: int = 100, **more: Any) -> list[str]:  # Any: claim's keywords
    records = await store.claim(await lease_of(store), max_operations=max_operations, **more)
    return [record.request_id for record in records]


async def lease_of(store: RequestStore, engine_id: str = "engine-1", duration_s: float = 3600.0) -> Lease:
    """Return the lease of an engine that no other one disputes."""
    lease = await store.acquire_lease(BASE, engine_id=engine_id, duration_s=duration_s)
    assert isinstance(lease, Lease), lease
    return lease


async def complete(store: RequestStore, completions: Sequence[Completion]) -> None:
    await store.complete(await lease_of(store), completions)


def done(request_id: str, result: Result | None = None, *effects: Any) -> Completion:  # Any: Effect
    return Completion(request_id=request_id, result=result or OptimStepOutput(), effects=effects)


async def finished(
    store: RequestStore, stream: str = "s1:sample:0", clone: int = 0, *, after: int = 0, timeout_s: float = 0
) -> tuple[list[tuple[str, bool]], int]:
    """Return who finished and whether it succeeded, and the cursor."""
    found = await store.finished_samples(stream, clone, after=after, limit=100, timeout_s=timeout_s)
    return [(sample.request_id, sample.succeeded) for sample in found.samples], found.cursor


async def state_of(store: RequestStore, request_id: str) -> OperationState:
    return (await store.get_operation(request_id)).state


async def failure_of(store: RequestStore, request_id: str) -> Failed:
    record = await store.get_operation(request_id)
    assert record.result_kind is not None
    assert record.result is not None
    result = decode_result(record.result_kind, record.result)
    assert isinstance(result, Failed)
    return result


class RequestStoreContract:
    """Every promise of `tinsmith.store.RequestStore`. Override nothing but `make_store`."""

    @pytest.fixture
    def make_store(self) -> MakeStore:
        raise NotImplementedError

    @pytest.fixture
    async def store(self, make_store: MakeStore) -> AsyncIterator[RequestStore]:
        store = make_store()
        await store.open()
        yield store
        await store.close()

    @pytest.fixture
    async def other(self, make_store: MakeStore, store: RequestStore) -> AsyncIterator[RequestStore]:
        """Another process's view of the same database."""
        other = make_store()
        await other.open()
        yield other
        await other.close()

    # sessions

    async def test_a_session_comes_back_as_it_was(self, store: RequestStore) -> None:
        session = a_session(
            tags=("a", "b"), user_metadata={"x": [1, None]}, sdk_version="0.38.0", project_id="p", display_name="n"
        )
        assert await store.create_session(session, idempotency_key=None) == session
        assert await store.get_session("s1") == session
        with pytest.raises(NotFoundError, match="'s9'"):
            await store.get_session("s9")

    async def test_a_session_is_created_once_per_key_and_tenant(self, store: RequestStore) -> None:
        first = await store.create_session(a_session("s1"), idempotency_key="k")
        assert await store.create_session(a_session("s2"), idempotency_key="k") == first
        other = await store.create_session(a_session("s3", tenant="bob"), idempotency_key="k")
        assert other.session_id == "s3"

    async def test_sessions_are_listed_newest_first_by_tenant(self, store: RequestStore) -> None:
        for number, tenant in enumerate(["ann", "bob", "ann", "ann"]):
            session = a_session(f"s{number}", tenant=tenant, created_at=NOW + timedelta(microseconds=number))
            await store.create_session(session, idempotency_key=None)
        assert [s.session_id for s in await store.list_sessions("ann", limit=2, offset=1)] == ["s2", "s0"]
        assert [s.session_id for s in await store.list_sessions(None, limit=9, offset=0)] == ["s3", "s2", "s1", "s0"]

    async def test_a_session_is_touched_and_updated(self, store: RequestStore) -> None:
        await store.create_session(a_session(), idempotency_key=None)
        later = NOW + timedelta(seconds=10)
        assert (await store.touch_session("s1", later)).last_seen_at == later
        assert (await store.touch_session("s1", NOW)).last_seen_at == later
        assert (await store.update_session("s1", project_id="p")).project_id == "p"
        assert await store.get_session("s1") == a_session(last_seen_at=later, project_id="p")

    async def test_the_first_end_of_a_session_counts(self, store: RequestStore) -> None:
        await store.create_session(a_session(), idempotency_key=None)
        await store.end_session("s1", "errored", "why")
        ended = await store.end_session("s1", "success", None)
        assert (ended.ended, ended.end_detail) == ("errored", "why")

    async def test_silent_sessions_expire(self, store: RequestStore) -> None:
        for number in range(3):
            session = a_session(f"s{number}", last_seen_at=NOW + timedelta(seconds=number))
            await store.create_session(session, idempotency_key=None)
        await store.end_session("s0", "success", None)
        assert await store.expire_sessions(NOW + timedelta(seconds=2)) == ["s1"]
        assert (await store.get_session("s1")).ended == "expired"
        assert (await store.get_session("s2")).ended is None

    # models, samplers, checkpoints

    async def test_a_model_is_created_once(self, store: RequestStore) -> None:
        await store.create_session(a_session(), idempotency_key=None)
        run = a_run(user_metadata={"renderer": "x"})
        first = await store.create_run(run, a_creation())
        assert await store.create_run(run, a_creation()) == first
        found = await store.get_run(run.model_id)
        assert replace(found, last_request_at=NOW) == run
        with pytest.raises(ConflictError):
            await store.create_run(run, a_creation(digest=b"other"))
        with pytest.raises(NotFoundError, match="'nope'"):
            await store.get_run("nope")

    async def test_models_are_listed_newest_first_with_their_number(self, store: RequestStore) -> None:
        await store.create_session(a_session(), idempotency_key=None)
        for number in range(3):
            run = a_run(f"s1:train:{number}", created_at=NOW + timedelta(seconds=number))
            await store.create_run(run, a_creation(run.model_id))
        runs, total = await store.list_runs("ann", limit=2, offset=1)
        assert ([run.model_id for run in runs], total) == (["s1:train:1", "s1:train:0"], 3)
        assert await store.list_runs("bob", limit=2, offset=0) == ([], 0)
        assert (await store.list_runs(None, session_id="s1", limit=9, offset=0))[1] == 3
        assert (await store.list_runs(None, session_id="s2", limit=9, offset=0))[1] == 0

    async def test_samplers(self, store: RequestStore) -> None:
        first = SamplerRecord(
            sampling_session_id="s1:sample:0",
            session_id="s1",
            tenant="ann",
            base_model=BASE,
            created_at=NOW,
            snapshot_id="tinker://s1:train:0/sampler_weights/x",
            model_path="tinker://s1:train:0/sampler_weights/x",
            model_id="s1:train:0",
        )
        assert await store.create_sampler(first) == first
        assert await store.create_sampler(replace(first, snapshot_id=None)) == first
        assert await store.get_sampler("s1:sample:0") == first
        assert await store.list_samplers("s1") == [first]
        assert await store.list_samplers("s2") == []
        with pytest.raises(NotFoundError):
            await store.get_sampler("nope")

    async def test_checkpoints_are_kept_listed_changed_and_deleted(self, store: RequestStore) -> None:
        request_id = await a_model(store)
        first, second = a_checkpoint("first"), a_checkpoint("second", created_at=NOW + timedelta(seconds=1))
        save = await store.submit(an_operation(seq_id=1, kind="save_state"))
        await claim(store)
        written = [CheckpointWritten(record=first), CheckpointWritten(record=second)]
        await complete(store, [done(save, None, *written)])
        assert await store.get_checkpoint(first.path) == first
        assert await store.list_checkpoints("ann") == ([second, first], 2)
        assert await store.list_checkpoints("ann", limit=1, offset=1) == ([first], 2)
        assert await store.list_checkpoints(None, model_id="other") == ([], 0)
        expires_at = NOW + timedelta(days=1)
        changed = await store.update_checkpoint(first.path, lambda it: replace(it, public=True, expires_at=expires_at))
        assert changed == replace(first, public=True, expires_at=expires_at)
        assert await store.expired_checkpoints(expires_at - timedelta(seconds=1)) == []
        assert await store.expired_checkpoints(expires_at) == [changed]
        assert await store.delete_checkpoint(first.path) == changed
        for missing in (store.get_checkpoint, store.delete_checkpoint):
            with pytest.raises(NotFoundError, match="first"):
                await missing(first.path)
        assert await state_of(store, request_id) == OperationState.SUCCEEDED
        assert await store.list_checkpoints("ann") == ([second], 1)
        assert await store.expired_checkpoints(expires_at) == []
        # a client that did not hear the answer asks again
        assert await store.deleted_checkpoint(first.path) == changed
        for never in (second.path, "tinker://s1:train:0/weights/never"):
            with pytest.raises(NotFoundError, match=never):
                await store.deleted_checkpoint(never)
        again = await store.submit(an_operation(seq_id=2, kind="save_state"))
        await claim(store)
        await complete(store, [done(again, None, CheckpointWritten(record=first))])
        assert await store.get_checkpoint(first.path) == first
        await store.delete_checkpoint(first.path)
        await store.prune(datetime.now(UTC) + timedelta(hours=1))
        with pytest.raises(NotFoundError):
            await store.deleted_checkpoint(first.path)

    async def test_a_checkpoint_that_no_operation_wrote(self, store: RequestStore) -> None:
        await store.add_checkpoint(a_checkpoint())
        assert await store.get_checkpoint(a_checkpoint().path) == a_checkpoint()
        with pytest.raises(UserError, match=r"weights/first.*exists already"):
            await store.add_checkpoint(replace(a_checkpoint(), step=9))
        assert (await store.get_checkpoint(a_checkpoint().path)).step == a_checkpoint().step

    async def test_a_refused_change_changes_nothing(self, store: RequestStore) -> None:
        await a_model(store)
        save = await store.submit(an_operation(seq_id=1))
        await claim(store)
        await complete(store, [done(save, None, CheckpointWritten(record=a_checkpoint()))])

        def refuse(record: CheckpointRecord) -> CheckpointRecord:
            raise UserError(record.path)

        with pytest.raises(UserError, match="first"):
            await store.update_checkpoint(a_checkpoint().path, refuse)
        assert await store.get_checkpoint(a_checkpoint().path) == a_checkpoint()

    # submit

    async def test_a_repeat_finds_the_first_and_other_content_conflicts(
        self, store: RequestStore, other: RequestStore
    ) -> None:
        await a_model(store)
        for operation in (an_operation(seq_id=1), a_sample(1)):
            first = await store.submit(operation)
            assert await other.submit(operation) == first
            with pytest.raises(ConflictError, match="seq_id 1"):
                await store.submit(replace(operation, digest=b"other"))
        await claim(store)
        assert await store.submit(an_operation(seq_id=1)) != await store.submit(a_sample(1))

    async def test_concurrent_repeats_find_one(self, store: RequestStore, other: RequestStore) -> None:
        await a_model(store)
        repeats = [each.submit(an_operation(seq_id=1)) for each in (store, other) for _ in range(8)]
        assert len(set(await asyncio.gather(*repeats))) == 1
        assert len(await claim(store)) == 1

    async def test_one_bad_write_does_not_harm_its_neighbours(self, store: RequestStore) -> None:
        await a_model(store)
        await store.submit(an_operation(seq_id=1))
        writes = [
            store.submit(an_operation(seq_id=2)),
            store.submit(an_operation(seq_id=1, digest=b"other")),
            store.submit(an_operation(stream="nope:train:0", seq_id=1)),
            store.submit(an_operation(seq_id=3)),
        ]
        first, conflict, missing, last = await asyncio.gather(*writes, return_exceptions=True)
        assert isinstance(conflict, ConflictError)
        assert isinstance(missing, NotFoundError)
        assert (await claim(store))[1:] == [first, last]

    async def test_an_operation_is_there_for_others_when_submit_returns(
        self, store: RequestStore, other: RequestStore
    ) -> None:
        await a_model(store)
        operation = an_operation(seq_id=1, num_tokens=11, payload=bytes(range(256)) * 100)
        request_id = await store.submit(operation)
        record = await other.get_operation(request_id)
        assert (record.state, record.seq_id, record.stream) == (OperationState.QUEUED, 1, "s1:train:0")
        (claimed,) = await other.claim(await lease_of(other), max_operations=9)
        assert (claimed.payload, claimed.num_tokens, claimed.tenant) == (operation.payload, 11, "ann")
        assert claimed.started_at is not None

    async def test_seq_ids_of_64_bits(self, store: RequestStore) -> None:
        request_id = await store.submit(a_sample(2**62))
        assert (await store.get_operation(request_id)).seq_id == 2**62

    async def test_a_refused_operation_consumes_its_number(self, store: RequestStore) -> None:
        await a_model(store)
        refused = await store.submit(an_operation(seq_id=1, refused=Failed(message="no such loss")))
        assert await state_of(store, refused) == OperationState.FAILED
        assert (await failure_of(store, refused)).message == "no such loss"
        second = await store.submit(an_operation(seq_id=2))
        assert (await store.waiting(second)).missing_seq_id is None
        assert await claim(store) == [second]

    async def test_a_refused_operation_ahead_of_its_turn(self, store: RequestStore) -> None:
        await a_model(store)
        await store.submit(an_operation(seq_id=2, refused=Failed(message="no")))
        third = await store.submit(an_operation(seq_id=3))
        assert await claim(store) == []
        first = await store.submit(an_operation(seq_id=1))
        assert await claim(store) == [first, third]
        assert (await store.get_run("s1:train:0")).next_seq_id == 4

    async def test_what_belongs_to_nothing_is_refused(self, store: RequestStore) -> None:
        with pytest.raises(NotFoundError, match="s1:train:0"):
            await store.submit(an_operation(seq_id=1))
        with pytest.raises(NotFoundError):
            await store.get_operation("req-nope")

    async def test_an_ended_session_takes_no_more_training(self, store: RequestStore) -> None:
        await a_model(store)
        first = await store.submit(an_operation(seq_id=1))
        await store.end_session("s1", "success", None)
        assert await store.submit(an_operation(seq_id=1)) == first
        with pytest.raises(UserError, match="has ended"):
            await store.submit(an_operation(seq_id=9))
        with pytest.raises(UserError, match="has ended"):
            await store.create_run(a_run("s1:train:1"), a_creation("s1:train:1"))

    # claim

    async def test_claims_are_in_order_and_made_once(self, store: RequestStore, other: RequestStore) -> None:
        await a_model(store)
        ids = [await store.submit(an_operation(seq_id=seq_id)) for seq_id in range(1, 6)]
        assert await claim(store, 2) == ids[:2]
        assert await claim(other) == ids[2:]
        assert await claim(store) == []
        assert await state_of(store, ids[0]) == OperationState.RUNNING

    async def test_nothing_passes_a_gap(self, store: RequestStore) -> None:
        await a_model(store)
        late = {seq_id: await store.submit(an_operation(seq_id=seq_id)) for seq_id in (3, 2)}
        assert await claim(store) == []
        assert (await store.waiting(late[3])).missing_seq_id == 1
        first = await store.submit(an_operation(seq_id=1))
        assert await claim(store, 1) == [first]
        assert await claim(store) == [late[2], late[3]]

    async def test_a_small_claim_takes_the_lowest_numbers(self, store: RequestStore) -> None:
        await a_model(store)
        ids = {seq_id: await store.submit(an_operation(seq_id=seq_id)) for seq_id in (3, 2, 4, 1)}
        taken = [(await claim(store, 1))[0] for _ in ids]
        assert taken == [ids[1], ids[2], ids[3], ids[4]]

    async def test_a_gap_of_one_model_does_not_delay_another(self, store: RequestStore) -> None:
        await a_model(store, "s1:train:0")
        await a_model(store, "s2:train:0")
        await store.submit(an_operation("s1:train:0", 2))
        free = await store.submit(an_operation("s2:train:0", 1))
        assert await claim(store) == [free]

    async def test_samples_need_no_order(self, store: RequestStore) -> None:
        ids = [await store.submit(a_sample(seq_id)) for seq_id in (7, 3, 10**18)]
        assert await claim(store) == ids

    async def test_tenants_take_turns(self, store: RequestStore) -> None:
        hog = [await store.submit(a_sample(seq_id)) for seq_id in range(6)]
        mouse = await store.submit(a_sample(0, "s2:sample:0", tenant="bob"))
        assert set(await claim(store, 2)) == {hog[0], mouse}

    async def test_claims_of_one_sort(self, store: RequestStore) -> None:
        await a_model(store)
        sample, step = await store.submit(a_sample()), await store.submit(an_operation(seq_id=1))
        assert await claim(store, ordered=True) == [step]
        assert await claim(store, ordered=True) == []
        assert await claim(store, ordered=False) == [sample]

    async def test_queues_are_separate(self, store: RequestStore) -> None:
        await store.submit(a_sample(base_model="another"))
        assert await claim(store) == []

    # complete

    async def test_a_completion_records_result_effects_and_position(
        self, store: RequestStore, other: RequestStore
    ) -> None:
        await store.create_session(a_session(), idempotency_key=None)
        request_id = await store.create_run(a_run(), a_creation())
        await claim(store)
        sampler = SamplerRecord(
            sampling_session_id="s1:sample:1", session_id="s1", tenant="ann", base_model=BASE, created_at=NOW
        )
        lora = LoraConfig(rank=4, seed=9, train_mlp=False)
        effects = (
            RunStateChanged(model_id="s1:train:0", state=RunState.READY),
            LoraResolved(model_id="s1:train:0", lora=lora),
            CheckpointWritten(record=a_checkpoint()),
            SamplerCreated(record=sampler),
        )
        await complete(store, [done(request_id, ModelCreated(model_id="s1:train:0"), *effects)])
        run = await other.get_run("s1:train:0")
        assert (run.state, run.lora, run.next_seq_id, run.applied_seq_id) == (RunState.READY, lora, 1, 0)
        assert await other.get_checkpoint(a_checkpoint().path) == a_checkpoint()
        assert await other.get_sampler("s1:sample:1") == sampler
        record = await other.get_operation(request_id)
        assert record.finished_at is not None
        assert record.result is not None
        assert decode_result("model_created", record.result) == ModelCreated(model_id="s1:train:0")

    async def test_a_second_completion_changes_nothing(self, store: RequestStore) -> None:
        await a_model(store)
        request_id = await store.submit(an_operation(seq_id=1))
        await claim(store)
        await complete(store, [done(request_id, OptimStepOutput(metrics={"a": 1.0}))])
        await complete(store, [done(request_id, Failed(message="late"), CheckpointWritten(record=a_checkpoint()))])
        assert await state_of(store, request_id) == OperationState.SUCCEEDED
        assert (await store.list_checkpoints(None))[1] == 0

    async def test_results_can_be_read_again(self, store: RequestStore) -> None:
        request_id = await store.submit(a_sample())
        await claim(store)
        await complete(store, [done(request_id, SampleOutput(sequences=()))])
        first = await store.wait_for(request_id, LONG_S)
        assert await store.wait_for(request_id, LONG_S) == first
        assert first.state == OperationState.SUCCEEDED

    # waiting

    async def test_a_waiter_is_woken_by_another_process(self, store: RequestStore, other: RequestStore) -> None:
        request_id = await store.submit(a_sample())
        waiter = asyncio.create_task(store.wait_for(request_id, LONG_S))
        await claim(other)
        await complete(other, [done(request_id)])
        assert (await waiter).state == OperationState.SUCCEEDED

    async def test_a_wait_ends_with_the_record_as_it_stands(self, store: RequestStore) -> None:
        request_id = await store.submit(a_sample())
        assert (await store.wait_for(request_id, 0.0)).state == OperationState.QUEUED
        with pytest.raises(NotFoundError):
            await store.wait_for("req-nope", LONG_S)

    async def test_many_waiters(self, store: RequestStore, other: RequestStore) -> None:
        ids = await asyncio.gather(*[store.submit(a_sample(seq_id)) for seq_id in range(200)])
        waiters = [asyncio.create_task(store.wait_for(request_id, LONG_S)) for request_id in ids]
        claimed = await claim(other, 1000)
        await complete(other, [done(request_id) for request_id in claimed])
        assert {record.state for record in await asyncio.gather(*waiters)} == {OperationState.SUCCEEDED}

    async def test_an_engine_is_woken_by_a_submit(self, store: RequestStore, other: RequestStore) -> None:
        async def next_claim() -> list[str]:
            while not (claimed := await claim(other)):
                await other.wait_for_work(BASE, LONG_S)
            return claimed

        engine = asyncio.create_task(next_claim())
        request_id = await store.submit(a_sample())
        assert await engine == [request_id]

    async def test_a_cancelled_wait_ends_although_it_is_woken(self, store: RequestStore, other: RequestStore) -> None:
        async def watch() -> None:
            while True:
                await store.wait_for_work(BASE, LONG_S)

        for seq_id in range(40):
            task = asyncio.create_task(watch())
            submit = asyncio.create_task(store.submit(a_sample(seq_id)))
            await (submit if seq_id % 2 else other.submit(a_sample(seq_id, "s2:sample:0")))
            for _ in range(seq_id // 2 % 5):
                await asyncio.sleep(0)
            task.cancel()
            await submit
            done, _ = await asyncio.wait([task], timeout=LONG_S / 2)
            assert done

    async def test_no_wake_up_is_lost_between_a_claim_and_the_wait(
        self, store: RequestStore, other: RequestStore
    ) -> None:
        for seq_id in range(5):
            assert await claim(other) == []
            request_id = await store.submit(a_sample(seq_id))
            async with asyncio.timeout(LONG_S):
                while not (claimed := await claim(other)):
                    await other.wait_for_work(BASE, LONG_S)
            assert claimed == [request_id]

    async def test_what_is_ahead_is_counted(self, store: RequestStore) -> None:
        ids = [await store.submit(a_sample(seq_id)) for seq_id in range(3)]
        await claim(store, 1)
        engine = EngineRecord(base_model=BASE, state=EngineState.LOADING, updated_at=NOW, detail="loading weights")
        await store.report_engine(engine, lease=await lease_of(store))
        waiting = await store.waiting(ids[2])
        assert (waiting.num_ahead, waiting.engine, waiting.missing_seq_id) == (2, engine, None)

    # cancel

    async def test_a_queued_sample_is_cancelled(self, store: RequestStore) -> None:
        request_id = await store.submit(a_sample())
        assert (await store.cancel(request_id)).state == OperationState.CANCELLED
        assert await claim(store) == []
        assert await store.cancelled(await lease_of(store)) == []

    async def test_a_running_sample_is_cancelled_and_its_engine_told_once(
        self, store: RequestStore, other: RequestStore
    ) -> None:
        request_id = await store.submit(a_sample())
        await claim(other)
        waiter = asyncio.create_task(store.wait_for(request_id, LONG_S))
        await store.cancel(request_id)
        assert (await waiter).state == OperationState.CANCELLED
        await other.wait_for_work(BASE, LONG_S)
        assert await other.cancelled(await lease_of(other)) == [request_id]
        assert await other.cancelled(await lease_of(other)) == []
        await complete(other, [done(request_id, SampleOutput(sequences=()))])
        assert await state_of(store, request_id) == OperationState.CANCELLED

    async def test_training_cannot_be_cancelled(self, store: RequestStore) -> None:
        await a_model(store)
        request_id = await store.submit(an_operation(seq_id=1))
        assert (await store.cancel(request_id)).state == OperationState.QUEUED
        assert await claim(store) == [request_id]

    # finished samples

    async def test_samples_are_announced_in_the_order_in_which_they_finish(
        self, store: RequestStore, other: RequestStore
    ) -> None:
        """Whatever their end was, each client its own, and what is not announced does not move the cursor."""
        ids = [await store.submit(a_sample(seq_id)) for seq_id in range(5)]
        clone = await store.submit(a_sample(3 * SEQ_IDS_PER_CLONE + 1))
        neighbour = await store.submit(a_sample(0, "s2:sample:0"))
        assert await finished(store) == ([], 0)
        await claim(other)
        bad = done(ids[0], Failed(message="no"))
        sampled = [done(request_id, SampleOutput(sequences=())) for request_id in (neighbour, ids[2], clone)]
        await complete(other, [bad, *sampled])
        await store.cancel(ids[4])
        await store.cancel(ids[4])
        await complete(other, [done(ids[4], SampleOutput(sequences=()))])  # too late
        assert await finished(store) == ([(ids[0], False), (ids[2], True), (ids[4], False)], 3)
        assert await finished(other, clone=3) == ([(clone, True)], 1)
        assert await finished(other, "s2:sample:0") == ([(neighbour, True)], 1)
        assert await finished(store, clone=1) == ([], 0)
        assert await finished(store, after=3) == ([], 3)
        given_up = EngineRecord(base_model=BASE, state=EngineState.FAILED, updated_at=NOW, detail="broken")
        await other.release_lease(BASE, "engine-1")
        await other.report_engine(given_up)
        hopeless = await store.submit(a_sample(5))
        assert await finished(store, after=3) == ([(ids[1], False), (ids[3], False), (hopeless, False)], 6)

    async def test_finished_samples_come_in_pages_with_their_sizes(self, store: RequestStore) -> None:
        ids = [await store.submit(a_sample(seq_id)) for seq_id in range(5)]
        await claim(store)
        for request_id in reversed(ids):
            await complete(store, [done(request_id, SampleOutput(sequences=()))])
        seen: list[str] = []
        cursor = 0
        for size in (2, 2, 1):
            page = await store.finished_samples("s1:sample:0", 0, after=cursor, limit=2, timeout_s=0)
            assert len(page.samples) == size
            for sample in page.samples:
                result = (await store.get_operation(sample.request_id)).result
                assert result is not None
                assert sample.size_bytes == len(result)
                seen.append(sample.request_id)
            cursor = page.cursor
        assert seen == ids[::-1]

    async def test_who_waits_for_samples_is_woken_by_another_process(
        self, store: RequestStore, other: RequestStore
    ) -> None:
        first, second = [await store.submit(a_sample(seq_id)) for seq_id in range(2)]
        await claim(other)
        waiter = asyncio.create_task(finished(store, timeout_s=LONG_S))
        elsewhere = asyncio.create_task(finished(store, clone=1, timeout_s=LONG_S))
        await asyncio.sleep(0)
        await complete(other, [done(first, SampleOutput(sequences=()))])
        assert await waiter == ([(first, True)], 1)
        waiter = asyncio.create_task(finished(store, after=1, timeout_s=LONG_S))
        await other.cancel(second)
        assert await waiter == ([(second, False)], 2)
        assert not elsewhere.done()
        elsewhere.cancel()
        assert await finished(store, after=2, timeout_s=0.05) == ([], 2)

    async def test_nothing_appears_behind_a_cursor(self, store: RequestStore, other: RequestStore) -> None:
        """Two processes finish samples of several clients at once, and a third one follows each of them."""
        streams = [f"s1:sample:{number}" for number in range(3)]
        ids = {stream: [await store.submit(a_sample(seq_id, stream)) for seq_id in range(40)] for stream in streams}
        await claim(store, 1000)

        async def finish(process: RequestStore, numbers: range) -> None:
            for number in numbers:
                order = streams if number % 2 else streams[::-1]
                mixed = [done(ids[stream][number], SampleOutput(sequences=())) for stream in order]
                await asyncio.gather(complete(process, mixed[:2]), complete(process, mixed[2:]))

        async def follow(stream: str) -> list[str]:
            seen: list[str] = []
            cursor = 0
            while len(seen) < len(ids[stream]):
                page = await other.finished_samples(stream, 0, after=cursor, limit=7, timeout_s=LONG_S)
                assert page.samples, f"{stream}: nothing came after {cursor}, and only {len(seen)} before"
                seen += [sample.request_id for sample in page.samples]
                assert page.cursor == len(seen)
                cursor = page.cursor
            return seen

        followed, *_ = await asyncio.gather(
            asyncio.gather(*[follow(stream) for stream in streams]),
            finish(store, range(0, 40, 2)),
            finish(other, range(1, 40, 2)),
        )
        for stream, seen in zip(streams, followed, strict=True):
            assert sorted(seen) == sorted(ids[stream])

    async def test_a_cursor_outlives_restarts_and_results(self, store: RequestStore, make_store: MakeStore) -> None:
        ids = [await store.submit(a_sample(seq_id)) for seq_id in range(2)]
        await claim(store)
        await complete(store, [done(ids[0], SampleOutput(sequences=()))])
        await store.close()
        again = make_store()
        await again.open()
        try:
            await complete(again, [done(ids[1], SampleOutput(sequences=()))])
            assert await finished(again, after=1) == ([(ids[1], True)], 2)
            assert await again.prune(datetime.now(UTC) + timedelta(seconds=1)) == 2
            with pytest.raises(ResultExpiredError):
                await again.get_operation(ids[1])
            assert await finished(again, after=1) == ([(ids[1], True)], 2)  # or its client would wait for ever
            for clone, cursor in ((0, 3), (1, 1)):
                with pytest.raises(UserError, match=f"cursor {cursor} of 's1:sample:0' is ahead"):
                    await finished(again, clone=clone, after=cursor)
        finally:
            await again.close()

    # gaps, ends, engines

    async def test_a_gap_that_stays_open_fails_what_waits(self, store: RequestStore) -> None:
        await a_model(store)
        late = [await store.submit(an_operation(seq_id=seq_id)) for seq_id in (3, 2)]
        assert await store.fail_gaps(BASE, older_than=datetime.now(UTC) - timedelta(hours=1)) == 0
        assert await store.fail_gaps(BASE, older_than=datetime.now(UTC) + timedelta(hours=1)) == 2
        for request_id in late:
            failed = await failure_of(store, request_id)
            assert "seq_id 1 " in failed.message
            assert failed.category == "user"
        fourth = await store.submit(an_operation(seq_id=4))
        assert await claim(store) == [fourth]
        too_late = await store.submit(an_operation(seq_id=1))
        assert "gone on without" in (await failure_of(store, too_late)).message

    async def test_nothing_is_left_behind_a_failed_gap(self, store: RequestStore) -> None:
        """Requests sent in parallel arrive in any order: a younger one must not be stranded below an older one."""
        await a_model(store)
        old, young = [await store.submit(an_operation(seq_id=seq_id)) for seq_id in (3, 2)]
        between = (await store.get_operation(young)).created_at
        assert (await store.get_operation(old)).created_at < between
        assert await store.fail_gaps(BASE, older_than=between) == 2
        assert await state_of(store, young) == OperationState.FAILED

    async def test_what_can_run_is_no_gap(self, store: RequestStore) -> None:
        await a_model(store)
        first = await store.submit(an_operation(seq_id=1))
        assert await store.fail_gaps(BASE, older_than=datetime.now(UTC) + timedelta(hours=1)) == 0
        assert await claim(store) == [first]

    async def test_a_gap_stays_open_while_an_operation_before_it_runs(self, store: RequestStore) -> None:
        """Once the model has moved on it never comes back to the gap, also where its engine dies."""
        await a_model(store)
        first = await store.submit(an_operation(seq_id=1))
        assert await claim(store) == [first]
        behind = await store.submit(an_operation(seq_id=3))
        late = datetime.now(UTC) + timedelta(hours=1)
        assert await store.fail_gaps(BASE, older_than=late) == 0
        assert (await store.get_run("s1:train:0")).applied_seq_id == 0
        await store.requeue(await lease_of(store), max_attempts=3, reason="it was killed")
        assert await claim(store) == [first]
        await complete(store, [done(first)])
        assert await store.fail_gaps(BASE, older_than=late) == 1
        assert await state_of(store, behind) == OperationState.FAILED
        fourth = await store.submit(an_operation(seq_id=4))
        await store.requeue(await lease_of(store), max_attempts=3, reason="it was killed")
        assert await claim(store) == [fourth]

    async def test_an_ended_session_unloads_its_models_last(self, store: RequestStore) -> None:
        await a_model(store)
        first = await store.submit(an_operation(seq_id=1))
        behind_a_gap = await store.submit(an_operation(seq_id=3))
        await store.end_session("s1", "success", None)
        assert "seq_id 2 " in (await failure_of(store, behind_a_gap)).message
        records = await store.claim(await lease_of(store), max_operations=9)
        assert [record.request_id for record in records][:1] == [first]
        unload = records[-1]
        assert unload.payload is not None
        assert decode_operation(unload.kind, unload.payload) == UnloadModel(model_id="s1:train:0")
        unloaded = RunStateChanged(model_id="s1:train:0", state=RunState.UNLOADED)
        await complete(store, [done(unload.request_id, ModelUnloaded(model_id="s1:train:0"), unloaded)])
        assert (await store.get_run("s1:train:0")).state == RunState.UNLOADED
        assert await claim(store) == []

    # recovery

    async def test_what_was_running_is_queued_again(self, store: RequestStore) -> None:
        await a_model(store)
        running = [await store.submit(an_operation(seq_id=seq_id)) for seq_id in (1, 2)]
        await claim(store)
        await complete(store, [done(running[0])])
        queued = await store.submit(an_operation(seq_id=3))
        sample = await store.submit(a_sample())
        assert await claim(store, ordered=False) == [sample]
        waiter = asyncio.create_task(store.wait_for(running[1], LONG_S))
        assert await store.requeue(await lease_of(store), max_attempts=3, reason="killed") == []
        assert await state_of(store, running[1]) == OperationState.QUEUED
        run = await store.get_run("s1:train:0")
        assert (run.state, run.next_seq_id, run.applied_seq_id) == (RunState.READY, 2, 1)
        # what an engine died of may not take others with it
        assert await claim(store, 1, alone=True) == [running[1]]
        assert await claim(store, alone=True) == []
        assert set(await claim(store)) == {queued, sample}
        await complete(store, [done(running[1])])
        assert (await waiter).state == OperationState.SUCCEEDED

    async def test_deaths_from_outside_are_counted_for_themselves(self, store: RequestStore) -> None:
        await a_model(store)
        innocent = await store.submit(an_operation(seq_id=1))
        await claim(store, 1)
        for _ in range(4):
            assert (
                await store.requeue(await lease_of(store), max_attempts=2, reason="killed", max_interruptions=5) == []
            )
            assert await claim(store, alone=True) == [innocent]
        assert await store.requeue(await lease_of(store), max_attempts=2, reason="crashed") == []
        await claim(store)
        assert await store.requeue(await lease_of(store), max_attempts=2, reason="killed", max_interruptions=5) == [
            innocent
        ]
        assert "6 times" in (await failure_of(store, innocent)).message

    async def test_rebuilds_are_counted_until_one_is_finished(self, store: RequestStore) -> None:
        await a_model(store)
        model_id = "s1:train:0"
        assert await store.begin_rebuild(await lease_of(store), model_id, interrupted=True) == 1
        assert await store.begin_rebuild(await lease_of(store), model_id, interrupted=True) == 1
        assert await store.begin_rebuild(await lease_of(store), model_id, interrupted=False) == 2
        assert await store.begin_rebuild(await lease_of(store), model_id, interrupted=True) == 2
        await store.end_rebuild(await lease_of(store), model_id)
        assert await store.begin_rebuild(await lease_of(store), model_id, interrupted=False) == 1

    async def test_an_operation_that_ends_every_engine_fails_alone(self, store: RequestStore) -> None:
        await a_model(store)
        poison = await store.submit(an_operation(seq_id=1))
        behind = await store.submit(an_operation(seq_id=2))
        await claim(store, 1)
        for _ in range(2):
            assert await store.requeue(await lease_of(store), max_attempts=3, reason="killed by signal 9") == []
            assert await claim(store, alone=True) == [poison]
        assert await store.requeue(await lease_of(store), max_attempts=3, reason="killed by signal 9") == [poison]
        failed = await failure_of(store, poison)
        assert failed.category == "server"
        assert "3 times" in failed.message
        assert "killed by signal 9" in failed.message
        run = await store.get_run("s1:train:0")
        assert (run.state, run.applied_seq_id) == (RunState.READY, 1)
        assert await claim(store) == [behind]

    async def test_a_creation_that_ends_every_engine_is_a_lost_model(self, store: RequestStore) -> None:
        await store.create_session(a_session(), idempotency_key=None)
        created = await store.create_run(a_run(), a_creation())
        behind = await store.submit(an_operation(seq_id=1))
        for _ in range(3):
            await claim(store, 1)
            await store.requeue(await lease_of(store), max_attempts=3, reason="killed by signal 9")
        for request_id in (created, behind):
            assert "killed by signal 9" in (await failure_of(store, request_id)).message
        assert (await store.get_run("s1:train:0")).state == RunState.LOST

    async def test_an_orderly_stop_is_no_attempt(self, store: RequestStore) -> None:
        request_id = await store.submit(a_sample())
        for _ in range(10):
            assert await claim(store) == [request_id]
            assert await store.requeue(await lease_of(store), max_attempts=1, reason=None) == []
        assert await claim(store, alone=True) == []
        assert await claim(store) == [request_id]

    async def test_what_is_held_is_not_put_back(self, store: RequestStore) -> None:
        """An engine that did not hear what it claimed last knows what it had claimed before."""
        await a_model(store)
        held = [await store.submit(an_operation(seq_id=1)), await store.submit(a_sample())]
        assert sorted(await claim(store)) == sorted(held)
        unheard = [await store.submit(an_operation(seq_id=2)), await store.submit(a_sample(1))]
        assert sorted(await claim(store)) == sorted(unheard)
        assert await store.requeue(await lease_of(store), max_attempts=1, reason=None, held=held) == []
        assert sorted(await claim(store)) == sorted(unheard)
        await complete(store, [done(held[0]), done(unheard[0])])
        assert (await store.get_run("s1:train:0")).applied_seq_id == 2

    async def test_a_sample_that_ends_every_engine_is_given_up(self, store: RequestStore) -> None:
        request_id = await store.submit(a_sample())
        assert await claim(store) == [request_id]
        await store.requeue(await lease_of(store), max_attempts=3, reason="killed by signal 9")
        assert await claim(store, alone=True) == []  # many may have been running: they are tried together once more
        assert await claim(store) == [request_id]
        await store.requeue(await lease_of(store), max_attempts=3, reason="killed by signal 9")
        assert await claim(store, alone=True) == [request_id]
        assert await store.requeue(await lease_of(store), max_attempts=3, reason="killed by signal 9") == [request_id]
        failed = await failure_of(store, request_id)
        assert failed.category == "server"
        assert "killed by signal 9" in failed.message

    async def test_the_log_and_the_snapshots_of_a_live_model(self, store: RequestStore) -> None:
        created = await a_model(store)
        first, second, third = [await store.submit(an_operation(seq_id=seq_id)) for seq_id in (1, 2, 3)]
        await claim(store)
        ephemeral = SamplerRecord(
            sampling_session_id="s1:sample:0",
            session_id="s1",
            tenant="ann",
            base_model=BASE,
            created_at=NOW,
            snapshot_id="s1:sample:0",
            model_id="s1:train:0",
        )
        await complete(store, [done(first, None, SamplerCreated(record=ephemeral)), done(second, Failed(message="no"))])
        records = await store.replayable("s1:train:0", after_seq_id=-1, limit=9)
        assert [record.request_id for record in records] == [created, first]
        assert records[1].payload == b"s1:train:0 1"
        assert records[1].result_kind == "optim_step_output"
        assert await store.replayable("s1:train:0", after_seq_id=0, limit=1) == records[1:]
        (live,) = await store.live_models(BASE)
        assert (live.run.applied_seq_id, live.snapshots, live.ephemeral) == (2, (), ("s1:sample:0",))

        snapshots = [a_snapshot(seq_id) for seq_id in range(4)]
        with pytest.raises(ServerError, match="ahead"):
            await store.add_snapshot(await lease_of(store), snapshots[3], keep=2)
        for snapshot in snapshots[:3]:
            await store.add_snapshot(await lease_of(store), snapshot, keep=2)
        assert await store.list_snapshots("s1:train:0") == [snapshots[2], snapshots[1]]
        await complete(store, [done(third, None, SnapshotTaken(record=snapshots[3], keep=2))])
        (live,) = await store.live_models(BASE)
        assert live.snapshots == (snapshots[3], snapshots[2])
        await store.drop_snapshot(await lease_of(store), "s1:train:0", 3)
        assert await store.list_snapshots("s1:train:0") == [snapshots[2]]

    async def test_a_model_that_ends_has_no_snapshots(self, store: RequestStore) -> None:
        for number, ending in enumerate([RunState.UNLOADED, RunState.LOST]):
            model_id = f"s{number}:train:0"
            await a_model(store, model_id)
            await store.add_snapshot(await lease_of(store), a_snapshot(0, model_id), keep=2)
            last = await store.submit(an_operation(model_id, seq_id=1))
            await claim(store)
            await complete(store, [done(last, None, RunStateChanged(model_id=model_id, state=ending))])
            assert await store.list_snapshots(model_id) == []
            with pytest.raises(ServerError, match="not live"):
                await store.add_snapshot(await lease_of(store), a_snapshot(0, model_id), keep=2)
        assert await store.live_models(BASE) == []

    async def test_a_model_that_cannot_be_rebuilt_is_lost_alone(self, store: RequestStore) -> None:
        await a_model(store)
        await a_model(store, "s2:train:0")
        running = await store.submit(an_operation(seq_id=1))
        await claim(store)
        queued = await store.submit(an_operation(seq_id=2))
        await store.lose_run(await lease_of(store), "s1:train:0", "its log is incomplete")
        await store.note_run(await lease_of(store), "s2:train:0", "look at this")
        await store.note_run(await lease_of(store), "s1:train:0", "no longer")
        run, other = await store.get_run("s1:train:0"), await store.get_run("s2:train:0")
        assert (run.state, run.state_reason) == (RunState.LOST, "its log is incomplete")
        assert (other.state, other.state_reason) == (RunState.READY, "look at this")
        later = await store.submit(an_operation(seq_id=3))
        for request_id in (running, queued, later):
            failed = await failure_of(store, request_id)
            assert failed.category == "server"
            assert "its log is incomplete" in failed.message
            assert "checkpoint" in failed.message
        assert [live.run.model_id for live in await store.live_models(BASE)] == ["s2:train:0"]

    async def test_what_a_recovery_needs_is_not_pruned(self, store: RequestStore) -> None:
        await a_model(store)
        steps = [await store.submit(an_operation(seq_id=seq_id)) for seq_id in range(1, 5)]
        samples = [await store.submit(a_sample(number)) for number in range(3)]
        await claim(store)
        await complete(store, [done(each) for each in steps + samples])
        later = datetime.now(UTC) + timedelta(hours=1)
        assert await store.prune(later) == len(samples)
        await store.add_snapshot(await lease_of(store), a_snapshot(2), keep=2)
        await store.add_snapshot(await lease_of(store), a_snapshot(4), keep=2)
        assert await store.prune(later) == 3
        kept = await store.replayable("s1:train:0", after_seq_id=-1, limit=9)
        assert [record.seq_id for record in kept] == [3, 4]
        assert (await store.live_models(BASE))[0].pruned_seq_id == 2
        await store.lose_run(await lease_of(store), "s1:train:0", "for some reason")
        assert await store.prune(later) == 2

    async def test_a_log_is_kept_since_its_creation_while_requests_come(self, store: RequestStore) -> None:
        await a_model(store)
        step = await store.submit(an_operation(seq_id=1))
        await claim(store)
        await complete(store, [done(step)])
        await store.add_snapshot(await lease_of(store), a_snapshot(1), keep=2)
        later = datetime.now(UTC) + timedelta(hours=1)
        assert await store.prune(later, idle_since=datetime.now(UTC) - timedelta(hours=1)) == 0
        assert (await store.run_log("s1:train:0")).pruned_seq_id == -1
        assert await store.prune(later, idle_since=later) == 2
        log = await store.run_log("s1:train:0")
        assert (log.pruned_seq_id, log.snapshots, log.run) == (1, (a_snapshot(1),), await store.get_run("s1:train:0"))

    async def test_a_log_as_people_look_at_it(self, store: RequestStore) -> None:
        await a_model(store)
        steps = [await store.submit(an_operation(seq_id=seq_id, num_tokens=seq_id)) for seq_id in (1, 2, 3)]
        await store.submit(a_sample())
        await claim(store)
        await complete(store, [done(steps[0]), done(steps[1], Failed(message="no"))])
        first, second, third = await store.list_log("s1:train:0", from_seq_id=1, limit=9)
        assert (first.seq_id, first.request_id, first.state, first.attempts) == (1, steps[0], "succeeded", 1)
        assert first.created_at <= (first.started_at or NOW) <= (first.finished_at or NOW)
        assert (first.payload_bytes, first.result_kind) == (len(b"s1:train:0 1"), "optim_step_output")
        assert first.result is not None
        assert first.result_bytes == len(first.result)
        assert decode_result(second.result_kind or "", second.result or b"") == Failed(message="no")
        assert (third.state, third.finished_at, third.result, third.result_bytes) == ("running", None, None, 0)
        page = await store.list_log("s1:train:0", from_seq_id=None, limit=2)
        assert [each.seq_id for each in page] == [2, 3]
        assert [each.seq_id for each in await store.list_log("s1:train:0", from_seq_id=1, limit=1)] == [1]
        totals = {(each.kind, each.state): each for each in await store.log_totals("s1:train:0")}
        assert [(*key, each.number, each.num_tokens) for key, each in totals.items()] == [
            ("create_model", "succeeded", 1, 0),
            ("optim_step", "failed", 1, 2),
            ("optim_step", "running", 1, 3),
            ("optim_step", "succeeded", 1, 1),
        ]
        done_once = totals["optim_step", OperationState.SUCCEEDED]
        assert (done_once.payload_bytes, done_once.result_bytes) == (first.payload_bytes, first.result_bytes)
        assert done_once.queued_s >= 0 <= done_once.run_s
        assert await store.log_totals("nobody") == []
        assert await store.list_log("nobody", from_seq_id=0, limit=9) == []
        with pytest.raises(NotFoundError):
            await store.run_log("nobody")

    # leases

    async def test_one_engine_holds_the_lease(self, store: RequestStore, other: RequestStore) -> None:
        first = await lease_of(store, "engine-1")
        held = await other.acquire_lease(BASE, engine_id="engine-2", duration_s=3600.0)
        assert isinstance(held, LeaseHeld)
        assert held.engine_id == "engine-1"
        assert 3000.0 < held.remaining_s <= 3600.0
        assert await lease_of(store, "engine-1") == first
        another = await other.acquire_lease("another", engine_id="engine-2", duration_s=3600.0)
        assert isinstance(another, Lease)

    async def test_one_of_many_gets_the_lease(self, store: RequestStore, other: RequestStore) -> None:
        asked = [
            each.acquire_lease(BASE, engine_id=f"engine-{number}", duration_s=3600.0)
            for number, each in enumerate([store, other] * 4)
        ]
        found = await asyncio.gather(*asked)
        (lease,) = [each for each in found if isinstance(each, Lease)]
        assert {each.engine_id for each in found} == {lease.engine_id}

    async def test_a_released_lease_is_free_and_wakes_who_waits(self, store: RequestStore, other: RequestStore) -> None:
        first = await lease_of(store, "engine-1")
        waiting = asyncio.create_task(other.wait_for_lease(BASE, LONG_S))
        await asyncio.sleep(0)  # it has subscribed
        await store.release_lease(BASE, "engine-9")  # not its
        await store.renew_lease(first)
        await store.release_lease(BASE, "engine-1")
        await waiting
        second = await lease_of(other, "engine-2")
        assert second.epoch > first.epoch
        with pytest.raises(LeaseLostError, match=f"'engine-1'.*'engine-2' with epoch {second.epoch}"):
            await store.renew_lease(first)
        await other.release_lease(BASE, "engine-2")
        with pytest.raises(LeaseLostError, match="nobody"):
            await other.renew_lease(second)

    async def test_the_lease_of_a_dead_engine_is_free(self, store: RequestStore, other: RequestStore) -> None:
        first = await lease_of(store, "engine-1")
        wrong = await other.acquire_lease(BASE, engine_id="engine-2", duration_s=3600.0, dead="engine-9")
        assert isinstance(wrong, LeaseHeld)
        second = await other.acquire_lease(BASE, engine_id="engine-2", duration_s=3600.0, dead="engine-1")
        assert isinstance(second, Lease)
        assert second.epoch == first.epoch + 1

    async def test_a_lease_that_ran_out_may_be_taken_or_go_on(self, store: RequestStore, other: RequestStore) -> None:
        for number in range(3):  # nobody wants it: the engine goes on with the same epoch, whatever it does first
            short = await lease_of(store, "engine-1", 0.001)
            await self._until_it_ran_out(other)
            long = replace(short, duration_s=3600.0)
            if number == 0:
                await store.renew_lease(long)
            elif number == 1:
                await store.requeue(long, max_attempts=1, reason=None)
            else:
                await store.report_engine(self._record("engine-1"), lease=long)
            assert isinstance(await other.acquire_lease(BASE, engine_id="engine-2", duration_s=1.0), LeaseHeld)
        short = await lease_of(store, "engine-1", 0.001)
        await self._until_it_ran_out(other)
        second = await lease_of(other, "engine-2")
        assert second.epoch == short.epoch + 1
        with pytest.raises(LeaseLostError):
            await store.renew_lease(short)

    async def _until_it_ran_out(self, store: RequestStore) -> None:
        """Without taking it: a supervisor's report is ignored until then."""
        probe = replace(self._record(None), detail=f"probe {id(asyncio.current_task())} {datetime.now(UTC)}")
        async with asyncio.timeout(LONG_S):
            while probe not in await store.list_engines():
                await store.report_engine(probe)

    @staticmethod
    def _record(engine_id: str | None) -> EngineRecord:
        return EngineRecord(base_model=BASE, state=EngineState.READY, updated_at=NOW, engine_id=engine_id)

    async def test_a_superseded_engine_changes_nothing(self, store: RequestStore, other: RequestStore) -> None:
        await a_model(store)
        running = await store.submit(an_operation(seq_id=1))
        sample = await store.submit(a_sample())
        await claim(store)
        old = await lease_of(store)
        await store.cancel(sample)
        new = await other.acquire_lease(BASE, engine_id="engine-2", duration_s=3600.0, dead="engine-1")
        assert isinstance(new, Lease)
        await other.report_engine(self._record("engine-2"), lease=new)
        assert await other.requeue(new, max_attempts=3, reason="it was silent") == []
        queued = await store.submit(a_sample(1))

        late = done(running, None, CheckpointWritten(record=a_checkpoint()))
        for attempt in (
            store.claim(old, max_operations=9),
            store.complete(old, [late]),
            store.cancelled(old),
            store.requeue(old, max_attempts=3, reason=None),
            store.add_snapshot(old, a_snapshot(0), keep=2),
            store.drop_snapshot(old, "s1:train:0", 0),
            store.lose_run(old, "s1:train:0", "why not"),
            store.note_run(old, "s1:train:0", "look"),
            store.report_engine(replace(self._record("engine-1"), state=EngineState.FAILED), lease=old),
            store.begin_rebuild(old, "s1:train:0", interrupted=False),
            store.end_rebuild(old, "s1:train:0"),
            store.renew_lease(old),
        ):
            with pytest.raises(LeaseLostError, match="'engine-1'"):
                await attempt
        assert await state_of(other, running) == OperationState.QUEUED
        assert await state_of(other, queued) == OperationState.QUEUED
        assert (await other.list_checkpoints(None))[1] == 0
        assert await other.list_snapshots("s1:train:0") == []
        assert (await other.get_run("s1:train:0")).state_reason is None
        assert await other.list_engines() == [self._record("engine-2")]
        assert await other.cancelled(new) == [sample]

        claimed = await other.claim(new, max_operations=9)
        assert {each.request_id for each in claimed} == {running, queued}
        with pytest.raises(LeaseLostError):
            await store.complete(old, [late])
        await other.complete(new, [done(running)])
        assert await state_of(store, running) == OperationState.SUCCEEDED

    async def test_only_what_an_engine_claimed_is_its_to_complete(self, store: RequestStore) -> None:
        first = await store.submit(a_sample())
        await claim(store)
        await store.release_lease(BASE, "engine-1")
        second = await lease_of(store, "engine-2")
        await store.complete(second, [done(first)])
        assert await state_of(store, first) == OperationState.RUNNING

    async def test_takeovers_and_completions_at_once(self, store: RequestStore, other: RequestStore) -> None:
        """Whichever comes first: what was completed is never queued again, and what was queued again not completed."""
        for number in range(8):
            engine_id = f"engine-{number}"
            lease = await lease_of(store, engine_id)
            ids = [await store.submit(a_sample(10 * number + each)) for each in range(3)]
            assert len(await store.claim(lease, max_operations=9)) == 3

            async def take_over(dead: str) -> list[str]:
                new = await other.acquire_lease(BASE, engine_id="engine-x", duration_s=3600.0, dead=dead)
                assert isinstance(new, Lease)
                await other.requeue(new, max_attempts=99, reason="silent")
                claimed = await other.claim(new, max_operations=9)
                await other.complete(new, [done(each.request_id) for each in claimed])
                await other.release_lease(BASE, "engine-x")
                return [each.request_id for each in claimed]

            completing = store.complete(lease, [done(each, Failed(message="the first")) for each in ids])
            again, completed = await asyncio.gather(take_over(engine_id), completing, return_exceptions=True)
            assert isinstance(again, list)
            assert sorted(again) == ([] if completed is None else sorted(ids))
            for each in ids:
                expected = OperationState.FAILED if completed is None else OperationState.SUCCEEDED
                assert await state_of(store, each) == expected

    async def test_a_supervisor_does_not_speak_for_an_engine_that_holds_the_lease(
        self, store: RequestStore, other: RequestStore
    ) -> None:
        pending = await store.submit(a_sample())
        lease = await lease_of(store)
        await store.report_engine(self._record("engine-1"), lease=lease)
        given_up = replace(self._record(None), state=EngineState.FAILED, detail="no GPU here")
        await other.report_engine(given_up)
        assert await other.list_engines() == [self._record("engine-1")]
        assert await state_of(other, pending) == OperationState.QUEUED
        await store.release_lease(BASE, "engine-1")
        await other.report_engine(given_up)
        assert await state_of(other, pending) == OperationState.FAILED

    # engines

    async def test_engines_are_reported(self, store: RequestStore, other: RequestStore) -> None:
        capabilities = Capabilities(
            vocab_size=9,
            max_context_tokens=8,
            max_batch_tokens=7,
            losses=frozenset({"ppo", "dro"}),
            lora_targets=frozenset({"mlp"}),
            isolation="close",
            isolation_error=1e-6,
        )
        record = EngineRecord(
            base_model=BASE,
            state=EngineState.READY,
            updated_at=NOW,
            detail="d",
            progress=0.5,
            engine_id="e",
            pid=1,
            restarts=2,
            capabilities=capabilities,
        )
        await store.report_engine(replace(record, state=EngineState.STARTING, capabilities=None))
        await store.report_engine(record)
        assert await other.list_engines() == [record]

    async def test_an_engine_that_is_given_up_fails_all_but_its_models(self, store: RequestStore) -> None:
        await a_model(store)
        kept = [await store.submit(an_operation(seq_id=1))]
        await claim(store)
        await store.release_lease(BASE, "engine-1")
        being_made = a_creation("s1:train:1")
        pending = [await store.submit(a_sample()), await store.create_run(a_run("s1:train:1"), being_made)]
        given_up = EngineRecord(base_model=BASE, state=EngineState.FAILED, updated_at=NOW, detail="no such directory")
        await store.report_engine(given_up)
        kept.append(await store.submit(an_operation(seq_id=2)))
        pending.append(await store.submit(a_sample(1)))
        for request_id in pending:
            failed = await failure_of(store, request_id)
            assert failed.category == "server"
            assert "no such directory" in failed.message
        assert (await store.get_run("s1:train:1")).state == RunState.LOST
        assert [live.run.model_id for live in await store.live_models(BASE)] == ["s1:train:0"]
        assert (await store.waiting(kept[1])).engine == given_up
        await store.requeue(await lease_of(store), max_attempts=3, reason="given up")
        assert await claim(store) == kept
        await store.report_engine(replace(given_up, state=EngineState.STARTING), lease=await lease_of(store))
        assert await state_of(store, await store.submit(a_sample(2))) == OperationState.QUEUED

    # secrets

    async def test_a_secret_is_made_once_for_everybody(
        self, store: RequestStore, other: RequestStore, make_store: MakeStore
    ) -> None:
        made = await asyncio.gather(*[each.secret("tokens") for each in (store, other) * 5])
        assert len(set(made)) == 1
        assert len(made[0]) == 32
        assert await store.secret("links") != made[0]
        again = make_store()
        await again.open()
        try:
            assert await again.secret("tokens") == made[0]
        finally:
            await again.close()

    # housekeeping

    async def test_pruned_results_are_known_to_have_existed(self, store: RequestStore) -> None:
        created = await a_model(store)
        first = await store.submit(an_operation(seq_id=1))
        pending = await store.submit(a_sample())
        await claim(store)
        await complete(store, [done(first)])
        await store.add_snapshot(await lease_of(store), a_snapshot(1), keep=2)
        assert await store.prune(NOW) == 0
        assert await store.prune(datetime.now(UTC) + timedelta(hours=1)) == 2
        for request_id in (created, first):
            with pytest.raises(ResultExpiredError, match=request_id):
                await store.get_operation(request_id)
        with pytest.raises(ResultExpiredError, match="seq_id 1"):
            await store.submit(an_operation(seq_id=1))
        with pytest.raises(NotFoundError):
            await store.get_operation(first.upper())
        assert await state_of(store, pending) == OperationState.RUNNING
        assert await claim(store) == []
        second = await store.submit(an_operation(seq_id=2))
        assert await claim(store) == [second]

    async def test_everything_outlives_a_restart(self, store: RequestStore, make_store: MakeStore) -> None:
        await a_model(store)
        first = await store.submit(an_operation(seq_id=1))
        await store.close()
        again = make_store()
        await again.open()
        try:
            assert await claim(again) == [first]
            assert await again.submit(an_operation(seq_id=1)) == first
            assert (await again.get_run("s1:train:0")).next_seq_id == 2
        finally:
            await again.close()
