"""The operations that run by themselves: they create and unload models, and read and write checkpoints.

`replay.py` defines what the same operations mean to a model that is rebuilt.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import assert_never

from tinsmith import operations as ops
from tinsmith.backend import ModelState
from tinsmith.engine.checkpoint_files import CheckpointReader, CheckpointWriter
from tinsmith.engine.claimed import Outcome, failed
from tinsmith.engine.consistency_gate import ConsistencyGate
from tinsmith.engine.context import EngineContext
from tinsmith.engine.models import Models
from tinsmith.engine.recovery_points import RecoveryPoints
from tinsmith.engine.save_for_sampler import SaveForSampler
from tinsmith.engine.windows import Windows
from tinsmith.errors import TinsmithError, UserError
from tinsmith.store import (
    CheckpointRecord,
    CheckpointWritten,
    Effect,
    LoraResolved,
    OperationRecord,
    RunState,
    RunStateChanged,
)

ModelOperation = (
    ops.CreateModel | ops.SaveState | ops.LoadState | ops.SaveForSampler | ops.ExportAdapter | ops.UnloadModel
)


class ModelOperations:
    def __init__(
        self,
        engine: EngineContext,
        models: Models,
        windows: Windows,
        reader: CheckpointReader,
        writer: CheckpointWriter,
        gate: ConsistencyGate,
        save_for_sampler: SaveForSampler,
        recovery_points: RecoveryPoints,
    ) -> None:
        self._engine = engine
        self._models = models
        self._windows = windows
        self._reader = reader
        self._writer = writer
        self._gate = gate
        self._save_for_sampler = save_for_sampler
        self._recovery_points = recovery_points

    async def run(self, operation: ModelOperation, record: OperationRecord) -> Outcome:
        """Run one. If the request or the disk is at fault, the outcome says so."""
        try:
            return await self._run(operation, record)
        except TinsmithError as error:
            return self.refuse(operation, failed(error, during=f"{record.kind} {record.request_id}"))

    async def tidy_after(self, operation: ops.Operation | None) -> None:
        """Call this when the operation's result is recorded."""
        if isinstance(operation, ops.SaveState | ops.SaveForSampler | ops.ExportAdapter) and operation.path is not None:
            await self._writer.tidy(operation.path)

    def refuse(self, operation: ops.Operation | None, failure: ops.Failed) -> Outcome:
        """Return the outcome of an operation that failed. A model whose creation failed is lost."""
        if not isinstance(operation, ops.CreateModel):
            return Outcome(result=failure)
        reason = f"it could not be created: {failure.message}"
        self._models.mark_gone(operation.model_id, reason)
        lost = RunStateChanged(model_id=operation.model_id, state=RunState.LOST, reason=reason)
        return Outcome(result=failure, effects=(lost,))

    async def _run(self, operation: ModelOperation, record: OperationRecord) -> Outcome:
        match operation:
            case ops.CreateModel():
                return await self._create(operation, record)
            case ops.SaveState():
                return await self._save_state(operation, record)
            case ops.LoadState():
                return await self._load_state(operation, record)
            case ops.SaveForSampler():
                return await self._save_for_sampler.run(operation, record)
            case ops.ExportAdapter():
                return await self._export(operation, record)
            case ops.UnloadModel():
                return await self._unload(operation.model_id)
            case _:
                assert_never(operation)

    async def _create(self, operation: ops.CreateModel, record: OperationRecord) -> Outcome:
        effects: tuple[Effect, ...] = ()
        state, version = None, None
        if operation.checkpoint is not None:
            loaded = await self._reader.state_at(
                operation.checkpoint,
                load_optimizer=operation.load_optimizer,
                right=operation.right,
                tenant=record.tenant,
            )
            state, version = loaded.state, loaded.version
            operation = replace(operation, lora=state.lora)
            taken = await self._recovery_points.keep(operation.model_id, state, record)
            effects = (LoraResolved(model_id=operation.model_id, lora=state.lora), taken)
        await self._models.create(operation, state)
        ready = RunStateChanged(model_id=operation.model_id, state=RunState.READY)
        created = ops.ModelCreated(model_id=operation.model_id, version=version)
        return Outcome(result=created, effects=(*effects, ready))

    async def _save_state(self, operation: ops.SaveState, record: OperationRecord) -> Outcome:
        spoilt = await self._windows.failed_pass(record) is not None
        async with self._captured(operation.model_id) as state:
            written = await self._writer.write(
                operation.path,
                "training",
                replace(state, gradients={}) if spoilt else state,  # which no step will apply
                record,
                overwrite=operation.overwrite,
                ttl_seconds=operation.ttl_seconds,
                user_metadata=operation.user_metadata,
            )
        return _saved(written)

    @asynccontextmanager
    async def _captured(self, model_id: str) -> AsyncIterator[ModelState]:
        """Capture a state when there is room for it, which is kept until the block ends."""
        async with self._engine.waiting.place(self._models.lora(model_id)) as place:
            state = await self._models.capture(model_id)
            place.holds(state)
            yield state

    async def _export(self, operation: ops.ExportAdapter, record: OperationRecord) -> Outcome:
        ttl_seconds = operation.ttl_seconds
        async with self._captured(operation.model_id) as state:
            return _saved(await self._writer.write(operation.path, "external", state, record, ttl_seconds=ttl_seconds))

    async def _load_state(self, operation: ops.LoadState, record: OperationRecord) -> Outcome:
        loaded = await self._reader.state_at(
            operation.path, load_optimizer=operation.load_optimizer, right=operation.right, tenant=record.tenant
        )
        state, own = loaded.state, self._models.lora(operation.model_id)
        if replace(state.lora, seed=own.seed) != own:
            msg = (
                f"{operation.path!r} has {_describe(state.lora)}, but model {operation.model_id!r} has "
                f"{_describe(own)}; create a new model from the checkpoint instead"
            )
            raise UserError(msg)
        taken = await self._recovery_points.keep(operation.model_id, state, record)
        await self._models.restore(operation.model_id, state)
        result = ops.WeightsLoaded(model_id=operation.model_id, path=operation.path, version=loaded.version)
        return Outcome(result=result, effects=(taken,))

    async def _unload(self, model_id: str) -> Outcome:
        await self._models.unload(model_id)
        await self._gate.drop_model(model_id)
        unloaded = RunStateChanged(model_id=model_id, state=RunState.UNLOADED)
        return Outcome(result=ops.ModelUnloaded(model_id=model_id), effects=(unloaded,))


def _saved(written: CheckpointRecord) -> Outcome:
    result = ops.WeightsSaved(path=written.path, size_bytes=written.size_bytes)
    return Outcome(result=result, effects=(CheckpointWritten(record=written),))


def _describe(lora: ops.LoraConfig) -> str:
    flags = ("attn", lora.train_attn), ("mlp", lora.train_mlp), ("unembed", lora.train_unembed)
    return f"rank {lora.rank} on {', '.join(name for name, on in flags if on)}"
