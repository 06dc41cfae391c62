"""Records, operations and short calls, shared by the suites of request stores."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from tinsmith.operations import (
    CreateModel,
    Failed,
    LoraConfig,
    ModelCreated,
    OptimStepOutput,
    Result,
)
from tinsmith.store import (
    CheckpointRecord,
    ClaimRoom,
    Completion,
    Lease,
    NewOperation,
    OperationRecord,
    OperationState,
    RecoveryPointRecord,
    RequestStore,
    RunRecord,
    RunState,
    RunStateChanged,
    SessionRecord,
)
from tinsmith.store.codec import decode_result, encode_operation

BASE = "org/base-model"
NOW = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
LONG_S = 300.0  # longer than any wait: a test expects a wake-up before it
LORA = LoraConfig(rank=8, seed=7)

MakeStore = Callable[[], RequestStore]


def a_session(session_id: str = "s1", **more: Any) -> SessionRecord:
    values: dict[str, Any] = {"tenant": "ann", "created_at": NOW, "last_seen_at": NOW, **more}
    return SessionRecord(session_id=session_id, **values)


def a_run(model_id: str = "s1:train:0", **more: Any) -> RunRecord:
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


def an_operation(subject_id: str = "s1:train:0", seq_id: int = 0, **more: Any) -> NewOperation:
    values: dict[str, Any] = {
        "base_model": BASE,
        "kind": "optim_step",
        "tenant": "ann",
        "session_id": subject_id.split(":")[0],
        "ordered": True,
        "payload": f"{subject_id} {seq_id}".encode(),
        "digest": f"digest {seq_id}".encode(),
        **more,
    }
    return NewOperation(subject_id=subject_id, seq_id=seq_id, **values)


def a_creation(model_id: str = "s1:train:0", **more: Any) -> NewOperation:
    payload = encode_operation(CreateModel(model_id=model_id, lora=LORA))
    return an_operation(model_id, 0, kind="create_model", payload=payload, **more)


def a_sample(seq_id: int = 0, subject_id: str = "s1:sample:0", **more: Any) -> NewOperation:
    return an_operation(subject_id, seq_id, kind="sample", ordered=False, **more)


def a_checkpoint(name: str = "first", **more: Any) -> CheckpointRecord:
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


def a_recovery_point(seq_id: int, model_id: str = "s1:train:0") -> RecoveryPointRecord:
    return RecoveryPointRecord(
        model_id=model_id, seq_id=seq_id, directory=f"{model_id}/{seq_id}", size_bytes=2**40, created_at=NOW
    )


async def a_model(store: RequestStore, model_id: str = "s1:train:0", tenant: str = "ann") -> str:
    """Create a session and a model, and complete the creation. Return its request_id."""
    session_id = model_id.split(":")[0]
    await store.create_session(a_session(session_id, tenant=tenant), idempotency_key=session_id)
    request_id = await store.create_run(a_run(model_id, tenant=tenant), a_creation(model_id, tenant=tenant))
    await claim(store)
    ready = RunStateChanged(model_id=model_id, state=RunState.READY)
    await complete(store, [done(request_id, ModelCreated(model_id=model_id), ready)])
    return request_id


async def claim_records(store: RequestStore, lease: Lease, max_operations: int = 100) -> list[OperationRecord]:
    """Claim at most `number` operations of models, and as many samples."""
    room = ClaimRoom(operations=max_operations, num_bytes=1 << 40)
    return (await store.claim(lease, training=room, samples=room)).records


async def claim(store: RequestStore, max_operations: int = 100) -> list[str]:
    return [record.request_id for record in await claim_records(store, await lease_of(store), max_operations)]


async def claim_suspect(store: RequestStore) -> str | None:
    record = await store.claim_suspect(await lease_of(store))
    return None if record is None else record.request_id


async def claim_within(store: RequestStore, room: ClaimRoom) -> list[str]:
    claimed = await store.claim(await lease_of(store), training=room, samples=room)
    return [record.request_id for record in claimed.records]


async def lease_of(store: RequestStore, engine_id: str = "engine-1", duration_s: float = 3600.0) -> Lease:
    """Return the lease of an engine without a competitor."""
    lease = await store.acquire_lease(BASE, engine_id=engine_id, duration_s=duration_s)
    assert isinstance(lease, Lease), lease
    return lease


async def complete(store: RequestStore, completions: Sequence[Completion]) -> None:
    await store.complete(await lease_of(store), completions)


def done(request_id: str, result: Result | None = None, *effects: Any) -> Completion:
    return Completion(request_id=request_id, result=result or OptimStepOutput(), effects=effects)


async def finished(
    store: RequestStore, subject_id: str = "s1:sample:0", clone: int = 0, *, after: int = 0, timeout_s: float = 0
) -> tuple[list[tuple[str, bool]], int]:
    """Return the request_ids that finished and whether they succeeded, and the cursor."""
    found = await store.finished_samples(subject_id, clone, after=after, limit=100, timeout_s=timeout_s)
    return [(sample.request_id, sample.succeeded) for sample in found.samples], found.cursor


async def heard(store: RequestStore, session_id: str = "s1") -> None:
    """Have a heartbeat of the session arrive now. Gaps are closed only for clients that are heard."""
    await store.hear_session(session_id, datetime.now(UTC))


async def state_of(store: RequestStore, request_id: str) -> OperationState:
    return (await store.get_operation(request_id)).state


async def failure_of(store: RequestStore, request_id: str) -> Failed:
    record = await store.get_operation(request_id)
    assert record.result_kind is not None
    assert record.result is not None
    result = decode_result(record.result_kind, record.result)
    assert isinstance(result, Failed)
    return result
