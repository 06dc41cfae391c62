"""What each operation means to a backend, a sampler and the disk. `engine.py` decides when; here is how.

Every call of the training backend happens in one thread. Files are read and written in others meanwhile, so that one
model's checkpoint does not hold up another's training.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar, assert_never

from tinsmith import operations as ops
from tinsmith.backend import ModelState, SamplingBackend, Snapshot, TrainingBackend
from tinsmith.engine.checkpoint_files import CheckpointFiles
from tinsmith.engine.consistency_gate import ConsistencyGate, refusal
from tinsmith.engine.recovery_points import RecoveryPoints
from tinsmith.engine.sampling_snapshots import Snapshots
from tinsmith.errors import OutOfMemoryError, ServerError, TinsmithError, UnsupportedError, UserError
from tinsmith.failpoints import durable_boundary
from tinsmith.settings import ConsistencySettings
from tinsmith.store import (
    CheckpointRecord,
    CheckpointWritten,
    Effect,
    LoraResolved,
    OperationRecord,
    RecoveryPointTaken,
    RunState,
    RunStateChanged,
    SamplingSessionCreated,
    SamplingSessionRecord,
)

T = TypeVar("T")
BatchOperation = ops.ForwardBackward | ops.OptimStep
BatchResult = ops.ForwardBackwardOutput | ops.OptimStepOutput | ops.Failed
SingleOperation = (
    ops.CreateModel | ops.SaveState | ops.LoadState | ops.SaveForSampler | ops.ExportAdapter | ops.UnloadModel
)


class BackendFailedError(Exception):
    """A backend raised what it must not: its state is unknown, and the engine must end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A result, and what else is recorded with it."""

    result: ops.Result
    effects: tuple[Effect, ...] = ()
    consistency: ops.Consistency | None = None  # of a save for sampling, also where it was refused


class Execution:
    """Runs operations that have been checked. Knows which models live on the backend."""

    def __init__(
        self,
        *,
        base_model: str,
        backend: TrainingBackend,
        snapshots: Snapshots | None,
        files: CheckpointFiles,
        thread: ThreadPoolExecutor,
        recovery_points: RecoveryPoints | None,
        sampler: SamplingBackend | None,
        consistency: ConsistencySettings,
    ) -> None:
        """Without `recovery_points` operations can be replayed, and none run for the first time."""
        self._base_model = base_model
        self._backend = backend
        self._snapshots = snapshots
        self._samples_full_models = sampler is not None and sampler.capabilities.full_fine_tuning
        self._gate = None if sampler is None else ConsistencyGate(backend, sampler, consistency, call=self._call)
        self._files = files
        self._thread = thread
        self._recovery_points = recovery_points
        self._models: dict[str, ops.LoraConfig] = {}
        self._gone: dict[str, str] = {}  # why a model that was asked for is not there

    def why_not(self, model_id: str, operation: ops.Operation | None) -> ops.Failed | None:
        """Say why an operation of this model cannot run, where its model is not there."""
        if isinstance(operation, ops.CreateModel | ops.UnloadModel) or model_id in self._models:
            return None
        reason = self._gone.get(model_id, "this engine does not hold it")
        return ops.Failed(message=f"model {model_id!r} is not there: {reason}", category="server")

    @durable_boundary("engine.run_batch")
    async def run_batch(self, kind: str, operations: Sequence[BatchOperation]) -> list[BatchResult]:
        """Run passes or optimizer steps together. Raise BackendFailedError where the backend breaks its contract."""
        try:
            results = await self._call(partial(self._batch_call(kind), operations))
        except OutOfMemoryError as error:
            return await self._run_one_by_one(kind, operations, error)
        except UserError as error:  # nobody could say which operation it is about
            msg = f"{kind} raised {type(error).__name__}, where it must return Failed: {error}"
            raise BackendFailedError(msg) from error
        if len(results) != len(operations):
            msg = f"{kind} of {len(operations)} operations returned {len(results)} results"
            raise BackendFailedError(msg)
        return results

    async def _run_one_by_one(
        self, kind: str, operations: Sequence[BatchOperation], error: OutOfMemoryError
    ) -> list[BatchResult]:
        """What does not fit together may fit alone; what does not fails, and nothing else with it."""
        if len(operations) == 1:
            return [ops.Failed(message=str(error), category=error.category)]
        return [result for each in operations for result in await self.run_batch(kind, [each])]

    def _batch_call(self, kind: str) -> Callable[[Any], list[BatchResult]]:  # Any: of the kind
        calls: Mapping[str, Callable[[Any], Any]] = {  # Any: results are invariant in lists
            "forward": self._backend.forward,
            "forward_backward": self._backend.forward_backward,
            "optim_step": self._backend.optim_step,
        }
        return calls[kind]

    async def run_single(self, operation: SingleOperation, record: OperationRecord) -> Outcome:
        """Run one of the others. What goes wrong with the request or the disk is its result."""
        try:
            return await self._run_single(operation, record)
        except TinsmithError as error:
            failed = ops.Failed(message=str(error), category=error.category)
            return self.refused(operation, failed)

    def refused(self, operation: ops.Operation | None, failed: ops.Failed) -> Outcome:
        """Return a failure, with what follows from it where a model was to be created."""
        if not isinstance(operation, ops.CreateModel):
            return Outcome(result=failed)
        reason = f"it could not be created: {failed.message}"
        self._gone[operation.model_id] = reason
        lost = RunStateChanged(model_id=operation.model_id, state=RunState.LOST, reason=reason)
        return Outcome(result=failed, effects=(lost,))

    async def _run_single(self, operation: SingleOperation, record: OperationRecord) -> Outcome:
        match operation:
            case ops.CreateModel():
                return await self._create(operation, record)
            case ops.SaveState():
                state = await self._call(partial(self._backend.capture_state, operation.model_id))
                written = await self._files.write(
                    operation.path,
                    "training",
                    state,
                    record,
                    overwrite=operation.overwrite,
                    ttl_seconds=operation.ttl_seconds,
                    user_metadata=operation.user_metadata,
                )
                return _saved(written)
            case ops.ExportAdapter():
                state = await self._call(partial(self._backend.capture_state, operation.model_id))
                return _saved(
                    await self._files.write(
                        operation.path, "external", state, record, ttl_seconds=operation.ttl_seconds
                    )
                )
            case ops.LoadState():
                return await self._load(operation, record)
            case ops.SaveForSampler():
                return await self._publish(operation, record)
            case ops.UnloadModel():
                return await self._unload(operation.model_id)
            case _:
                assert_never(operation)

    async def _create(self, operation: ops.CreateModel, record: OperationRecord) -> Outcome:
        effects: tuple[Effect, ...] = ()
        state: ModelState | None = None
        if operation.checkpoint is not None:
            state = await self._files.state_at(operation.checkpoint, load_optimizer=operation.load_optimizer)
            operation = replace(operation, lora=state.lora)
            taken = await self._snapshot(operation.model_id, state, record)
            effects = (LoraResolved(model_id=operation.model_id, lora=state.lora), taken)
        await self._make(operation, state)
        ready = RunStateChanged(model_id=operation.model_id, state=RunState.READY)
        return Outcome(result=ops.ModelCreated(model_id=operation.model_id), effects=(*effects, ready))

    async def _make(self, operation: ops.CreateModel, state: ModelState | None) -> None:
        model_id = operation.model_id
        await self._call(partial(self._backend.create_model, operation))
        if state is not None:
            try:
                await self._call(partial(self._backend.restore_state, model_id, state))
            except UserError:
                await self._call(partial(self._backend.unload_model, model_id))
                raise
        self._models[model_id] = operation.lora

    async def _load(self, operation: ops.LoadState, record: OperationRecord) -> Outcome:
        state = await self._files.state_at(operation.path, load_optimizer=operation.load_optimizer)
        own = self._models[operation.model_id]
        if replace(state.lora, seed=own.seed) != own:
            msg = (
                f"{operation.path!r} has {_describe(state.lora)}, but model {operation.model_id!r} has "
                f"{_describe(own)}; create a new model from the checkpoint instead"
            )
            raise UserError(msg)
        taken = await self._snapshot(operation.model_id, state, record)
        await self._call(partial(self._backend.restore_state, operation.model_id, state))
        result = ops.WeightsLoaded(model_id=operation.model_id, path=operation.path)
        return Outcome(result=result, effects=(taken,))

    async def _snapshot(self, model_id: str, state: ModelState, record: OperationRecord) -> RecoveryPointTaken:
        """Keep what is about to be loaded: a recovery must not need the checkpoint, which may be gone by then."""
        assert self._recovery_points is not None
        await self.persist_ephemeral(model_id)
        taken = await self._recovery_points.write(model_id, record.seq_id, state)
        return RecoveryPointTaken(record=taken, keep=self._recovery_points.keep)

    # recovery

    async def capture(self, model_id: str) -> ModelState:
        return await self._call(partial(self._backend.capture_state, model_id))

    async def persist_ephemeral(self, model_id: str) -> None:
        """Have the model's ephemeral snapshots on disk: a recovery does not replay what comes before its start."""
        if self._snapshots is not None:
            await self._snapshots.persist(model_id, self._base_model)

    @durable_boundary("recovery.restore")
    async def restore(self, model_id: str, lora: ops.LoraConfig, state: ModelState) -> None:
        """Make the model as a snapshot has it."""
        await self._make(ops.CreateModel(model_id=model_id, lora=lora), state)

    async def discard(self, model_id: str, reason: str) -> None:
        """Take a half rebuilt model off the backend."""
        if self._models.pop(model_id, None) is not None:
            await self._call(partial(self._backend.unload_model, model_id))
        self._gone[model_id] = reason
        if self._snapshots is not None:
            await self._snapshots.drop_model(model_id)

    @durable_boundary("recovery.replay")
    async def replay(self, operation: ops.Operation, record: OperationRecord) -> ops.Result:
        """Run an operation that has succeeded before, for what it does to the model alone."""
        match operation:
            case ops.CreateModel():
                state = None
                if operation.checkpoint is not None:
                    source, optimizer = operation.checkpoint, operation.load_optimizer
                    state = await self._files.state_at(source, load_optimizer=optimizer, by=record)
                    operation = replace(operation, lora=state.lora)
                await self._make(operation, state)
                return ops.ModelCreated(model_id=operation.model_id)
            case ops.LoadState():
                source, optimizer = operation.path, operation.load_optimizer
                state = await self._files.state_at(source, load_optimizer=optimizer, by=record)
                await self._call(partial(self._backend.restore_state, operation.model_id, state))
                return ops.WeightsLoaded(model_id=operation.model_id, path=operation.path)
            case ops.ForwardBackward() | ops.OptimStep():
                (result,) = await self.run_batch(record.kind, [operation])
                if isinstance(result, ops.Failed):
                    msg = f"its {record.kind} with seq_id {record.seq_id} went well, and fails now: {result.message}"
                    raise ServerError(msg)
                return result
            case _:
                msg = f"{record.kind} changes no training state"
                raise ServerError(msg)

    async def publish_again(self, operation: ops.SaveForSampler) -> None:
        """Bring back an ephemeral snapshot that was in memory only."""
        snapshot_id = operation.sampling_session_id
        if snapshot_id is None or self._snapshots is None or self._snapshots.holds(snapshot_id):
            return
        snapshot = await self._call(partial(self._backend.publish, operation.model_id, snapshot_id))
        await self._snapshots.add(snapshot, model_id=operation.model_id, persisted=False, base_model=self._base_model)

    async def _publish(self, operation: ops.SaveForSampler, record: OperationRecord) -> Outcome:
        ephemeral_id, effects, size = operation.sampling_session_id, list[Effect](), None
        if ephemeral_id is not None and self._snapshots is None:
            msg = "this base model cannot be sampled from: it has no sampler; save with a name instead"
            raise UserError(msg)
        snapshots = self._snapshots_of(operation.model_id)
        if ephemeral_id is not None and snapshots is None:
            msg = (
                "this base model's sampler takes LoRA adapters, and all weights of this model are trained (LoRA rank "
                "0); save with a name instead: the checkpoint is a Hugging Face directory, to be served as a model of "
                "its own"
            )
            raise UnsupportedError(msg)
        snapshot_id = ephemeral_id or operation.path
        assert snapshot_id is not None
        snapshot = await self._call(partial(self._backend.publish, operation.model_id, snapshot_id))
        if operation.path is not None:
            weights = await self._call(snapshot.adapter_weights)
            state = ModelState(lora=snapshot.lora, weights=weights)
            written = await self._files.write(
                operation.path,
                "sampler",
                state,
                record,
                ttl_seconds=operation.ttl_seconds,
                user_metadata=operation.user_metadata,
            )
            effects.append(CheckpointWritten(record=written))
            size = written.size_bytes
        found: ops.Consistency | None = None
        if snapshots is not None:
            await snapshots.add(
                snapshot, model_id=operation.model_id, persisted=ephemeral_id is None, base_model=self._base_model
            )
            found = await self._check(operation.model_id, snapshot)
            if found is not None and found.verdict == "inconsistent" and self._gate is not None and self._gate.refuses:
                await self._take_back(snapshot_id, operation.path)
                return Outcome(result=ops.Failed(message=refusal(found), category="server"), consistency=found)
        if ephemeral_id is not None:
            effects.append(
                SamplingSessionCreated(record=self._sampling_session(ephemeral_id, operation.model_id, record))
            )
        saved = ops.WeightsSaved(
            path=operation.path, sampling_session_id=ephemeral_id, size_bytes=size, consistency=found
        )
        return Outcome(result=saved, effects=tuple(effects), consistency=found)

    def _snapshots_of(self, model_id: str) -> Snapshots | None:
        """Return where the model's snapshots go to be sampled; None where the sampler cannot take them."""
        return self._snapshots if self._models[model_id].rank or self._samples_full_models else None

    async def _check(self, model_id: str, snapshot: Snapshot) -> ops.Consistency | None:
        """Compare trainer and sampler. The model is busy: it does not train meanwhile."""
        if self._gate is None or self._snapshots is None:
            return None
        async with self._snapshots.use(snapshot.snapshot_id, base_model=self._base_model):
            return await self._gate.check(model_id, snapshot.snapshot_id, snapshot.lora)

    async def _take_back(self, snapshot_id: str, path: str | None) -> None:
        """Nobody knows the snapshot yet: its result has not been recorded."""
        if self._snapshots is not None:
            await self._snapshots.discard(snapshot_id)
        if path is not None:
            await self._files.remove(path)

    def _sampling_session(
        self, sampling_session_id: str, model_id: str, record: OperationRecord
    ) -> SamplingSessionRecord:
        return SamplingSessionRecord(
            sampling_session_id=sampling_session_id,
            session_id=record.session_id,
            tenant=record.tenant,
            base_model=self._base_model,
            created_at=datetime.now(UTC),
            snapshot_id=sampling_session_id,
            model_id=model_id,
        )

    async def _unload(self, model_id: str) -> Outcome:
        if self._models.pop(model_id, None) is not None:
            await self._call(partial(self._backend.unload_model, model_id))
        if self._gate is not None:
            self._gate.forget(model_id)
        self._gone.pop(model_id, None)
        if self._snapshots is not None:
            await self._snapshots.drop_model(model_id)
        unloaded = RunStateChanged(model_id=model_id, state=RunState.UNLOADED)
        return Outcome(result=ops.ModelUnloaded(model_id=model_id), effects=(unloaded,))

    async def _call(self, call: Callable[[], T]) -> T:
        """Call the backend in its thread. A UserError passes; anything else it raises is its failure."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        except UserError:
            raise
        except Exception as error:
            msg = f"{type(error).__name__}: {error}"
            raise BackendFailedError(msg) from error


def _saved(written: CheckpointRecord) -> Outcome:
    result = ops.WeightsSaved(path=written.path, size_bytes=written.size_bytes)
    return Outcome(result=result, effects=(CheckpointWritten(record=written),))


def _describe(lora: ops.LoraConfig) -> str:
    flags = ("attn", lora.train_attn), ("mlp", lora.train_mlp), ("unembed", lora.train_unembed)
    return f"rank {lora.rank} on {', '.join(name for name, on in flags if on)}"
