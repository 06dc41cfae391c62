"""Driving an engine without HTTP: submit operations to the store and read their results, as the server does."""

import hashlib
import secrets
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from tinsmith import operations as ops
from tinsmith.backend import SamplingBackend, TrainingBackend
from tinsmith.builtin.fair_scheduler import FairConfig, FairScheduler
from tinsmith.engine.call_watch import CallWatch
from tinsmith.engine.context import EngineContext
from tinsmith.engine.device_turns import DeviceTurns
from tinsmith.engine.engine import Engine
from tinsmith.hook_values import OperationFinished
from tinsmith.losses import BUILTIN_LOSSES
from tinsmith.settings import DataDir, ModelSettings, ServerSettings, Settings, WatchdogSettings
from tinsmith.store import (
    WAITS_FOR_PLACE,
    EngineRecord,
    Lease,
    NewOperation,
    RequestStore,
    RunRecord,
    SamplingSessionRecord,
    SessionRecord,
)
from tinsmith.store.codec import decode_result, decoded_bytes, encode_operation, kind_of

WAIT_S = 300.0  # a test that waits this long has failed


async def take_over(store: RequestStore, base_model: str, *, engine_id: str | None = None) -> Lease:
    """Take the lease. Whichever engine holds it counts as dead from now on."""
    own = engine_id or f"engine-{secrets.token_hex(4)}"
    dead: str | None = None
    while True:
        found = await store.acquire_lease(base_model, engine_id=own, duration_s=3600.0, dead=dead)
        if isinstance(found, Lease):
            return found
        dead = found.engine_id


def make_context(store: RequestStore, lease: Lease, data_dir: Path, **options: Any) -> EngineContext:
    """Return what the parts of an engine share. `options` are fields of ModelSettings and Settings, and `watch`."""
    watch = options.pop("watch", None) or CallWatch(WatchdogSettings())
    usual = {"resident_snapshots": 8, "resident_snapshot_bytes": 1 << 30, "server": ServerSettings(gap_timeout_s=600.0)}
    options = {**usual, **options}
    of_model = {name: options.pop(name) for name in list(options) if name in ModelSettings.model_fields}
    return EngineContext(
        store=store,
        lease=lease,
        data_dir=DataDir(data_dir),
        settings=Settings(**options),
        model=ModelSettings(name="toy", **of_model),
        watch=watch,
    )


async def make_engine(
    store: RequestStore,
    backend: TrainingBackend,
    data_dir: Path,
    *,
    sampler: SamplingBackend | None,
    lease: Lease | None = None,
    on_finished: Callable[[OperationFinished], None] = lambda _: None,
    thread: ThreadPoolExecutor | None = None,
    turns: DeviceTurns | None = None,
    **options: Any,
) -> Engine:
    """Build an engine of base model "toy" with the default scheduler and the built-in losses.

    By default it takes the lease over from whichever engine holds it.
    """
    return Engine(
        make_context(store, lease or await take_over(store, "toy"), data_dir, **options),
        backend=backend,
        sampler=sampler,
        scheduler=FairScheduler(FairConfig()),
        losses={loss.name: loss for loss in BUILTIN_LOSSES},
        on_finished=on_finished,
        thread=thread,
        turns=turns,
    )


class EngineDriver:
    """One client session on one base model."""

    def __init__(self, store: RequestStore, base_model: str, *, tenant: str = "ann", session_id: str = "s1") -> None:
        self.store = store
        self.base_model = base_model
        self.tenant = tenant
        self.session_id = session_id
        self.next_seq_id: Counter[str] = Counter()

    async def open_session(self) -> None:
        now = datetime.now(UTC)
        session = SessionRecord(session_id=self.session_id, tenant=self.tenant, created_at=now, last_seen_at=now)
        await self.store.create_session(session, idempotency_key=None)

    async def create_model(
        self, number: int = 0, *, rank: int = 4, checkpoint: str | None = None, load_optimizer: bool = False
    ) -> str:
        """Submit the creation of a model, and return its request_id."""
        lora = ops.LoraConfig(rank=rank, seed=number)
        operation = ops.CreateModel(
            model_id=self.model_id(number), lora=lora, checkpoint=checkpoint, load_optimizer=load_optimizer
        )
        now = datetime.now(UTC)
        run = RunRecord(
            model_id=operation.model_id,
            session_id=self.session_id,
            tenant=self.tenant,
            base_model=self.base_model,
            lora=lora,
            created_at=now,
            last_request_at=now,
            next_seq_id=WAITS_FOR_PLACE,
        )
        self.next_seq_id[operation.model_id] = 1
        return await self.store.create_run(run, self.new_operation(operation, operation.model_id, 0))

    def model_id(self, number: int = 0) -> str:
        return f"{self.session_id}:train:{number}"

    def path(self, name: str, kind: str = "weights", number: int = 0) -> str:
        return f"tinker://{self.model_id(number)}/{kind}/{name}"

    async def submit(
        self, operation: ops.Operation, *, seq_id: int | None = None, refused: ops.Failed | None = None
    ) -> str:
        """Submit an operation under the next seq_id of its subject, and return the request_id.

        `refused`: the server's refusal, if it has refused the operation.
        """
        subject_id = operation.sampling_session_id if isinstance(operation, ops.Sample) else operation.model_id
        if isinstance(operation, ops.Sample) and (operation.snapshot_id or "").startswith("tinker://"):
            await self._open_sampling_session(operation)
        if seq_id is None:
            seq_id = self.next_seq_id[subject_id]
            self.next_seq_id[subject_id] += 1
        return await self.store.submit(replace(self.new_operation(operation, subject_id, seq_id), refused=refused))

    async def _open_sampling_session(self, operation: ops.Sample) -> None:
        """Open the session of a sample from a checkpoint, unless it is open already."""
        session = SamplingSessionRecord(
            sampling_session_id=operation.sampling_session_id,
            session_id=self.session_id,
            tenant=self.tenant,
            base_model=self.base_model,
            created_at=datetime.now(UTC),
            snapshot_id=operation.snapshot_id,
            model_path=operation.snapshot_id,
        )
        await self.store.create_sampling_session(session)

    def new_operation(self, operation: ops.Operation, subject_id: str, seq_id: int) -> NewOperation:
        payload = encode_operation(operation)
        return NewOperation(
            base_model=self.base_model,
            kind=kind_of(operation),
            tenant=self.tenant,
            session_id=self.session_id,
            subject_id=subject_id,
            seq_id=seq_id,
            ordered=not isinstance(operation, ops.Sample),
            payload=payload,
            digest=hashlib.sha256(payload).digest(),
            num_tokens=operation.num_tokens if isinstance(operation, ops.ForwardBackward) else 0,
            num_bytes=decoded_bytes(operation),
        )

    async def result(self, request_id: str) -> ops.Result:
        """Wait for the result of an operation."""
        record = await self.store.wait_for(request_id, WAIT_S)
        assert record.result_kind is not None, f"{record.kind} is still {record.state} after {WAIT_S:.0f} s"
        assert record.result is not None
        return decode_result(record.result_kind, record.result)

    async def run(self, operation: ops.Operation) -> ops.Result:
        return await self.result(await self.submit(operation))

    async def failure(self, request_id: str) -> ops.Failed:
        result = await self.result(request_id)
        assert isinstance(result, ops.Failed), result
        return result

    async def engine(self) -> EngineRecord:
        (record,) = [each for each in await self.store.list_engines() if each.base_model == self.base_model]
        return record

    async def close_gaps_at_once(self) -> int:
        await self.store.hear_session(self.session_id, datetime.now(UTC))
        return await self.store.fail_gaps(self.base_model, older_than=datetime.now(UTC) + timedelta(hours=1))
