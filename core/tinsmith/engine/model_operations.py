"""The operations that run by themselves: they create and unload models, and read and write checkpoints.

`replay.py` defines what the same operations mean to a model that is rebuilt.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import assert_never

from tinsmith import operations as ops
from tinsmith.backend import ModelState
from tinsmith.checkpoints.tinker_path import TinkerPath
from tinsmith.engine.checkpoint_files import Checkpoints, Save
from tinsmith.engine.claimed import Outcome, failed
from tinsmith.engine.consistency_gate import ConsistencyGate, refusal
from tinsmith.engine.context import EngineContext
from tinsmith.engine.failures import with_retries
from tinsmith.engine.models import Models
from tinsmith.engine.recovery_points import RecoveryPoints
from tinsmith.engine.snapshots import Snapshots, persisted_id
from tinsmith.engine.steps import Steps
from tinsmith.errors import NotFoundError, TinsmithError, UserError
from tinsmith.store import (
    CheckpointWritten,
    Effect,
    LoraResolved,
    OperationRecord,
    Origin,
    RunState,
    RunStateChanged,
    SamplingSessionCreated,
    SamplingSessionRecord,
)
from tinsmith.store.refusals import taken

ModelOperation = (
    ops.CreateModel | ops.SaveState | ops.LoadState | ops.SaveForSampler | ops.ExportAdapter | ops.UnloadModel
)


@dataclass(slots=True, eq=False)
class ModelOperations:
    engine: EngineContext
    models: Models
    steps: Steps
    checkpoints: Checkpoints
    snapshots: Snapshots
    gate: ConsistencyGate
    recovery_points: RecoveryPoints
    _saving: set[str] = field(default_factory=set, init=False)  # ids of sampling sessions

    async def run(self, operation: ModelOperation, record: OperationRecord) -> Outcome:
        """Run one. If the request or the disk is at fault, the outcome says so."""
        try:
            return await self._run(operation, record)
        except TinsmithError as error:
            return self.refuse(operation, failed(error, during=f"{record.kind} {record.request_id}"))

    async def tidy_after(self, operation: ops.Operation | None) -> None:
        """Call this when the operation's result is recorded."""
        if isinstance(operation, Save) and operation.path is not None:
            await self.checkpoints.tidy(operation.path)

    def refuse(self, operation: ops.Operation | None, failure: ops.Failed) -> Outcome:
        """Return the outcome of an operation that failed. A model whose creation failed is lost."""
        if not isinstance(operation, ops.CreateModel):
            return Outcome(result=failure)
        reason = f"it could not be created: {failure.message}"
        self.models.mark_gone(operation.model_id, reason)
        lost = RunStateChanged(model_id=operation.model_id, state=RunState.LOST, reason=reason)
        return Outcome(result=failure, effects=(lost,))

    async def _run(self, operation: ModelOperation, record: OperationRecord) -> Outcome:
        match operation:
            case ops.CreateModel():
                return await self._create(operation, record)
            case ops.SaveState() | ops.ExportAdapter():
                return await self._save_state(operation, record)
            case ops.LoadState():
                return await self._load_state(operation, record)
            case ops.SaveForSampler():
                return await self._save_for_sampler(operation, record)
            case ops.UnloadModel():
                return await self._unload(operation.model_id)
            case _:
                assert_never(operation)

    async def _create(self, operation: ops.CreateModel, record: OperationRecord) -> Outcome:
        effects: tuple[Effect, ...] = ()
        state, version = None, None
        if operation.checkpoint is not None:
            state, version = await self.checkpoints.state_at(
                operation.checkpoint,
                load_optimizer=operation.load_optimizer,
                right=operation.right,
                tenant=record.tenant,
            )
            origin = _origin(operation.checkpoint, state, record)
            operation = replace(operation, lora=state.lora)
            kept = await self.recovery_points.keep(operation.model_id, state, record)
            resolved = LoraResolved(model_id=operation.model_id, lora=state.lora)
            effects = (resolved, kept, origin)
        await self.models.create(operation, state)
        ready = RunStateChanged(model_id=operation.model_id, state=RunState.READY)
        created = ops.ModelCreated(model_id=operation.model_id, version=version)
        steps = 0 if state is None else state.step
        return Outcome(result=created, effects=(*effects, ready), loaded_steps=steps)

    async def _save_state(self, operation: ops.SaveState | ops.ExportAdapter, record: OperationRecord) -> Outcome:
        """Capture the state when there is memory for it, which it takes until it is written."""
        spoilt = await self.steps.failed_pass(record) is not None
        async with self.engine.waiting.reserve(self.models.lora(operation.model_id)) as reservation:
            state = await self.models.capture(operation.model_id)
            reservation.holds(state)
            state = replace(state, gradients={}) if spoilt else state  # which no step will apply
            written = await self.checkpoints.write(operation, state, record)
        result = ops.WeightsSaved(path=written.path, size_bytes=written.size_bytes)
        return Outcome(result=result, effects=(CheckpointWritten(record=written),))

    async def _save_for_sampler(self, operation: ops.SaveForSampler, record: OperationRecord) -> Outcome:
        """Raise UserError if an ephemeral snapshot is asked for and its id is taken or the model has no sampler."""
        if operation.path is not None:
            return await self._save_persisted(operation, operation.path, record)
        assert operation.sampling_session_id is not None
        with self._reserved(operation.sampling_session_id):
            await self._refuse_recorded(operation.sampling_session_id)
            return await self._save_ephemeral(operation, operation.sampling_session_id, record)

    async def _save_persisted(self, operation: ops.SaveForSampler, path: str, record: OperationRecord) -> Outcome:
        directory = TinkerPath.parse(path).new_directory()
        snapshot = await self.models.publish(operation.model_id, persisted_id(directory))
        state = await self.models.weights_of(snapshot)
        written = await self.checkpoints.write(operation, state, record, directory=directory)
        sampled = self.snapshots.why_not(snapshot.lora) is None
        found = await self.gate.admit(operation.model_id, snapshot) if sampled else None
        if found is not None and self.gate.refuses(found):
            await self.checkpoints.remove(written)
            return Outcome(result=ops.Failed(message=refusal(found), category="server"), consistency=found)
        saved = ops.WeightsSaved(path=path, size_bytes=written.size_bytes, consistency=found)
        return Outcome(result=saved, effects=(CheckpointWritten(record=written),), consistency=found)

    async def _save_ephemeral(self, operation: ops.SaveForSampler, session_id: str, record: OperationRecord) -> Outcome:
        model_id, snapshot_id = operation.model_id, operation.snapshot_id
        assert snapshot_id is not None
        if (why_not := self.snapshots.why_not(self.models.lora(model_id))) is not None:
            raise why_not
        snapshot = await self.models.publish(model_id, snapshot_id)
        num_bytes = snapshot.num_bytes
        await self.engine.room.expect(record.tenant, num_bytes)
        comparing = await self.gate.admit_for_now(model_id, snapshot)
        if operation.inflight:
            self.snapshots.follow(model_id, snapshot_id)
        saved = ops.WeightsSaved(sampling_session_id=session_id)
        created = _session(session_id, snapshot_id, num_bytes, model_id, record)
        return Outcome(result=saved, effects=(created,), comparing=comparing)

    @contextmanager
    def _reserved(self, sampling_session_id: str) -> Iterator[None]:
        """Reserve the id until the snapshot owns it. Raise ConflictError if another save has it.

        The snapshot of a sampling session never changes.
        """
        if sampling_session_id in self._saving or self.snapshots.holds(sampling_session_id):
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
            first = await with_retries(self.engine.store.get_sampling_session, sampling_session_id)
        except NotFoundError:
            return
        raise taken(sampling_session_id, first.snapshot_id or first.base_model)

    async def _load_state(self, operation: ops.LoadState, record: OperationRecord) -> Outcome:
        state, version = await self.checkpoints.state_at(
            operation.path, load_optimizer=operation.load_optimizer, right=operation.right, tenant=record.tenant
        )
        own = self.models.lora(operation.model_id)
        if replace(state.lora, seed=own.seed) != own:
            msg = (
                f"{operation.path!r} has {_describe(state.lora)}, but model {operation.model_id!r} has "
                f"{_describe(own)}; create a new model from the checkpoint instead"
            )
            raise UserError(msg)
        kept = await self.recovery_points.keep(operation.model_id, state, record)
        await self.models.restore(operation.model_id, state)
        result = ops.WeightsLoaded(model_id=operation.model_id, path=operation.path, version=version)
        effects = kept, _origin(operation.path, state, record)
        return Outcome(result=result, effects=effects, loaded_steps=state.step)

    async def _unload(self, model_id: str) -> Outcome:
        await self.models.unload(model_id)
        await self.gate.drop_model(model_id)
        unloaded = RunStateChanged(model_id=model_id, state=RunState.UNLOADED)
        return Outcome(result=ops.ModelUnloaded(model_id=model_id), effects=(unloaded,))


def _origin(path: str, state: ModelState, record: OperationRecord) -> Origin:
    return Origin(
        model_id=record.subject_id,
        seq_id=record.seq_id,
        path=path,
        source_id=TinkerPath.parse(path).model_id,
        step=state.step,
        created_at=datetime.now(UTC),
    )


def _session(
    session_id: str, snapshot_id: str, num_bytes: int, model_id: str, record: OperationRecord
) -> SamplingSessionCreated:
    return SamplingSessionCreated(
        record=SamplingSessionRecord(
            sampling_session_id=session_id,
            session_id=record.session_id,
            tenant=record.tenant,
            base_model=record.base_model,
            created_at=datetime.now(UTC),
            snapshot_id=snapshot_id,
            model_id=model_id,
            num_bytes=num_bytes,
        )
    )


def _describe(lora: ops.LoraConfig) -> str:
    return f"rank {lora.rank} on {', '.join(lora.targets)}"
