"""The operation save_for_sampler: publish a model's weights, write them if they have a name, have them sampled."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from tinsmith import operations as ops
from tinsmith.backend import Snapshot
from tinsmith.engine.checkpoint_files import CheckpointWriter
from tinsmith.engine.claimed import Outcome
from tinsmith.engine.consistency_gate import ConsistencyGate, refusal
from tinsmith.engine.models import Models
from tinsmith.engine.sampling_snapshots import Snapshots
from tinsmith.engine.store_retries import with_retries
from tinsmith.errors import NotFoundError
from tinsmith.store import (
    CheckpointRecord,
    CheckpointWritten,
    Effect,
    OperationRecord,
    RequestStore,
    SamplingSessionCreated,
    SamplingSessionRecord,
)
from tinsmith.store.sampling_sessions import taken


class SaveForSampler:
    def __init__(
        self,
        store: RequestStore,
        models: Models,
        snapshots: Snapshots,
        gate: ConsistencyGate,
        *,
        checkpoints: CheckpointWriter,
    ) -> None:
        self._store = store
        self._models = models
        self._snapshots = snapshots
        self._gate = gate
        self._checkpoints = checkpoints
        self._saving: set[str] = set()  # ids of sampling sessions

    async def run(self, operation: ops.SaveForSampler, record: OperationRecord) -> Outcome:
        """Raise UserError if an ephemeral snapshot is asked for and its id is taken or the model has no sampler."""
        with self._reserved(operation.sampling_session_id):
            await self._refuse_recorded(operation.sampling_session_id)
            return await self._run(operation, record)

    async def _run(self, operation: ops.SaveForSampler, record: OperationRecord) -> Outcome:
        why_not = self._snapshots.why_not(self._models.lora(operation.model_id))
        if why_not is not None and operation.sampling_session_id is not None:
            raise why_not
        snapshot = await self._models.publish(operation.model_id, _snapshot_id(operation))
        written = await self._write(operation, snapshot, record)
        found = None if why_not is not None else await self._load(operation, snapshot, written)
        if found is not None and self._gate.refuses(found):
            await self._take_back(operation)
            return Outcome(result=ops.Failed(message=refusal(found), category="server"), consistency=found)
        saved = ops.WeightsSaved(
            path=operation.path,
            sampling_session_id=operation.sampling_session_id,
            size_bytes=None if written is None else written.size_bytes,
            consistency=found,
        )
        return Outcome(result=saved, effects=_effects(operation, written, record), consistency=found)

    @contextmanager
    def _reserved(self, sampling_session_id: str | None) -> Iterator[None]:
        """Keep an id for one save, from which on its snapshot keeps it. Raise ConflictError if another save has it.

        The snapshot of a sampling session never changes.
        """
        if sampling_session_id is None:
            yield
            return
        if sampling_session_id in self._saving or self._snapshots.holds(sampling_session_id):
            raise taken(sampling_session_id, "another save")
        self._saving.add(sampling_session_id)
        try:
            yield
        finally:
            self._saving.discard(sampling_session_id)

    async def _refuse_recorded(self, sampling_session_id: str | None) -> None:
        """Raise ConflictError if the sampling session exists.

        That of this very operation is recorded together with its result, so it cannot be the one found.
        """
        if sampling_session_id is None:
            return
        try:
            first = await with_retries(self._store.get_sampling_session, sampling_session_id)
        except NotFoundError:
            return
        raise taken(sampling_session_id, first.snapshot_id or first.base_model)

    async def _write(
        self, operation: ops.SaveForSampler, snapshot: Snapshot, record: OperationRecord
    ) -> CheckpointRecord | None:
        if operation.path is None:
            return None
        return await self._checkpoints.write(
            operation.path,
            "sampler",
            await self._models.weights_of(snapshot),
            record,
            ttl_seconds=operation.ttl_seconds,
            user_metadata=operation.user_metadata,
        )

    async def _load(
        self, operation: ops.SaveForSampler, snapshot: Snapshot, written: CheckpointRecord | None
    ) -> ops.Consistency | None:
        """Load the snapshot into the sampler, and compare it with the model, which does not train meanwhile."""
        model_id = operation.model_id
        await self._snapshots.add(snapshot, model_id=model_id, checkpoint=written)
        async with self._snapshots.use(snapshot.snapshot_id):
            return await self._gate.check(model_id, snapshot.snapshot_id, snapshot.lora)

    async def _take_back(self, operation: ops.SaveForSampler) -> None:
        """No client knows the snapshot yet, because its result has not been recorded."""
        await self._snapshots.discard(_snapshot_id(operation))
        if operation.path is not None:
            await self._checkpoints.remove(operation.path)


def _snapshot_id(operation: ops.SaveForSampler) -> str:
    snapshot_id = operation.sampling_session_id or operation.path
    assert snapshot_id is not None
    return snapshot_id


def _effects(
    operation: ops.SaveForSampler, written: CheckpointRecord | None, record: OperationRecord
) -> tuple[Effect, ...]:
    effects: list[Effect] = []
    if written is not None:
        effects.append(CheckpointWritten(record=written))
    if operation.sampling_session_id is not None:
        session = SamplingSessionRecord(
            sampling_session_id=operation.sampling_session_id,
            session_id=record.session_id,
            tenant=record.tenant,
            base_model=record.base_model,
            created_at=datetime.now(UTC),
            snapshot_id=operation.sampling_session_id,
            model_id=operation.model_id,
        )
        effects.append(SamplingSessionCreated(record=session))
    return tuple(effects)
