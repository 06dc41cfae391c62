"""The operation save_for_sampler: publish a model's weights, write them if they have a name, have them sampled."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from tinsmith import operations as ops
from tinsmith.checkpoints.tinker_path import TinkerPath
from tinsmith.engine.checkpoint_files import CheckpointWriter
from tinsmith.engine.claimed import Outcome
from tinsmith.engine.consistency_gate import ConsistencyGate, refusal
from tinsmith.engine.context import EngineContext
from tinsmith.engine.failures import with_retries
from tinsmith.engine.models import Models
from tinsmith.engine.snapshots import Snapshots, persisted_id
from tinsmith.errors import NotFoundError
from tinsmith.store import (
    CheckpointWritten,
    OperationRecord,
    SamplingSessionCreated,
    SamplingSessionRecord,
)
from tinsmith.store.sampling_sessions import taken


class SaveForSampler:
    def __init__(
        self,
        engine: EngineContext,
        models: Models,
        snapshots: Snapshots,
        gate: ConsistencyGate,
        checkpoints: CheckpointWriter,
    ) -> None:
        self._engine = engine
        self._models = models
        self._snapshots = snapshots
        self._gate = gate
        self._checkpoints = checkpoints
        self._saving: set[str] = set()  # ids of sampling sessions

    async def run(self, operation: ops.SaveForSampler, record: OperationRecord) -> Outcome:
        """Raise UserError if an ephemeral snapshot is asked for and its id is taken or the model has no sampler."""
        if operation.path is not None:
            return await self._persisted(operation, operation.path, record)
        assert operation.sampling_session_id is not None
        with self._reserved(operation.sampling_session_id):
            await self._refuse_recorded(operation.sampling_session_id)
            return await self._ephemeral(operation.model_id, operation.sampling_session_id, record)

    async def _persisted(self, operation: ops.SaveForSampler, path: str, record: OperationRecord) -> Outcome:
        directory = TinkerPath.parse(path).new_directory()
        snapshot = await self._models.publish(operation.model_id, persisted_id(directory))
        written = await self._checkpoints.write(
            path,
            "sampler",
            await self._models.weights_of(snapshot),
            record,
            directory=directory,
            ttl_seconds=operation.ttl_seconds,
            user_metadata=operation.user_metadata,
        )
        sampled = self._snapshots.why_not(snapshot.lora) is None
        found = await self._gate.admit(operation.model_id, snapshot) if sampled else None
        if found is not None and self._gate.refuses(found):
            await self._checkpoints.remove(written)
            return Outcome(result=ops.Failed(message=refusal(found), category="server"), consistency=found)
        saved = ops.WeightsSaved(path=path, size_bytes=written.size_bytes, consistency=found)
        return Outcome(result=saved, effects=(CheckpointWritten(record=written),), consistency=found)

    async def _ephemeral(self, model_id: str, session_id: str, record: OperationRecord) -> Outcome:
        if (why_not := self._snapshots.why_not(self._models.lora(model_id))) is not None:
            raise why_not
        snapshot = await self._models.publish(model_id, session_id)
        num_bytes = snapshot.num_bytes
        await self._engine.room.expect(record.tenant, num_bytes)
        comparing = await self._gate.admit_for_now(model_id, snapshot)
        saved = ops.WeightsSaved(sampling_session_id=session_id)
        return Outcome(result=saved, effects=(_session(session_id, num_bytes, model_id, record),), comparing=comparing)

    @contextmanager
    def _reserved(self, sampling_session_id: str) -> Iterator[None]:
        """Reserve the id until the snapshot owns it. Raise ConflictError if another save has it.

        The snapshot of a sampling session never changes.
        """
        if sampling_session_id in self._saving or self._snapshots.holds(sampling_session_id):
            raise taken(sampling_session_id, "another save")
        self._saving.add(sampling_session_id)
        try:
            yield
        finally:
            self._saving.discard(sampling_session_id)

    async def _refuse_recorded(self, sampling_session_id: str) -> None:
        """Raise ConflictError if the sampling session exists.

        This operation's own session is not recorded yet, so any session found here is another's.
        """
        try:
            first = await with_retries(self._engine.store.get_sampling_session, sampling_session_id)
        except NotFoundError:
            return
        raise taken(sampling_session_id, first.snapshot_id or first.base_model)


def _session(session_id: str, num_bytes: int, model_id: str, record: OperationRecord) -> SamplingSessionCreated:
    return SamplingSessionCreated(
        record=SamplingSessionRecord(
            sampling_session_id=session_id,
            session_id=record.session_id,
            tenant=record.tenant,
            base_model=record.base_model,
            created_at=datetime.now(UTC),
            snapshot_id=session_id,
            model_id=model_id,
            num_bytes=num_bytes,
        )
    )
