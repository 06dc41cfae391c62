"""The operation save_for_sampler: publish a model's weights, write them if they have a name, have them sampled."""

from datetime import UTC, datetime

from tinsmith import operations as ops
from tinsmith.backend import Snapshot
from tinsmith.engine.checkpoint_files import CheckpointWriter
from tinsmith.engine.claimed import Outcome
from tinsmith.engine.consistency_gate import ConsistencyGate, refusal
from tinsmith.engine.models import Models
from tinsmith.engine.sampling_snapshots import Snapshots
from tinsmith.store import (
    CheckpointRecord,
    CheckpointWritten,
    Effect,
    OperationRecord,
    SamplingSessionCreated,
    SamplingSessionRecord,
)


class SaveForSampler:
    def __init__(
        self, models: Models, snapshots: Snapshots, gate: ConsistencyGate, *, checkpoints: CheckpointWriter
    ) -> None:
        self._models = models
        self._snapshots = snapshots
        self._gate = gate
        self._checkpoints = checkpoints

    async def run(self, operation: ops.SaveForSampler, record: OperationRecord) -> Outcome:
        """Raise UserError if an ephemeral snapshot is asked for and the model cannot be sampled from."""
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
