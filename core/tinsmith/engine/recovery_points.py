"""The recovery points of one engine: when one is due, taking it while training goes on, removing what nobody needs.

A recovery point is a training checkpoint below the recovery root. It is registered in the store once it is complete.
Its directory is named after its seq_id and its engine: a superseded engine may go on writing for a moment, but never
to a directory of its successor.
"""

import asyncio
import logging
import secrets
import shutil
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from tinsmith import operations as ops
from tinsmith.backend import ModelState
from tinsmith.checkpoints.atomic_directory import directories_in
from tinsmith.checkpoints.saved import delete_checkpoint
from tinsmith.engine.budgets import Reservation
from tinsmith.engine.consistency_gate import ConsistencyGate
from tinsmith.engine.context import EngineContext
from tinsmith.engine.failures import EngineFailedError, ending_the_engine
from tinsmith.engine.models import Models
from tinsmith.errors import LeaseLostError, TinsmithError
from tinsmith.failpoints import durable_boundary
from tinsmith.store import OperationRecord, RecoveryPointRecord, RecoveryPointTaken
from tinsmith_checkpoints.sizes import size_of

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Progress:
    """How far a model is."""

    seq_id: int = -1  # the last operation that has run
    operations: int = 0  # since the last recovery point
    taken_at_s: float = field(default_factory=time.monotonic)
    taking: int | None = None  # the seq_id of the recovery point that is being written in the background
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)


class RecoveryPoints:
    """Copies a model's state to the host between two batches, and writes it in the background."""

    def __init__(self, engine: EngineContext, models: Models, gate: ConsistencyGate) -> None:
        self._engine = engine
        self._models = models
        self._gate = gate
        self._root = engine.data_dir.recovery_points(engine.base_model)
        self._settings = engine.settings.recovery
        self._version = secrets.token_hex(4)
        self._progress: dict[str, _Progress] = {}  # by model_id

    def ran(self, model_id: str, seq_id: int, *, operations: int = 1) -> None:
        """Note that operations up to this one have run on the backend.

        Operations that change nothing count too, so that the log before the oldest recovery point can be pruned.
        """
        model = self._of(model_id)
        model.seq_id = seq_id
        model.operations += operations

    def _of(self, model_id: str) -> _Progress:
        return self._progress.setdefault(model_id, _Progress())

    async def keep(self, model_id: str, state: ModelState, record: OperationRecord) -> RecoveryPointTaken:
        """Keep what is about to be loaded: a recovery cannot rely on the checkpoint, which may be deleted by then."""
        taken = await self._write_if_room(model_id, record.tenant, record.seq_id, state)
        return RecoveryPointTaken(record=taken, keep=self._settings.keep_points)

    async def take_due(self, records: Sequence[OperationRecord], recorded: asyncio.Task[None]) -> None:
        """Capture those models of a batch whose recovery point is due. Call before the next batch.

        `recorded` ends when the results of the batch are in the store.
        """
        for model_id, tenant in {record.subject_id: record.tenant for record in records}.items():
            model = self._progress[model_id]
            if not self._is_due(model):
                continue
            reservation = self._engine.waiting.reserve_at_once(self._models.lora(model_id))
            if reservation is None:
                continue  # until the disk has taken others; it stays due
            seq_id = model.seq_id
            model.operations, model.taken_at_s, model.taking = 0, time.monotonic(), seq_id
            with ending_the_engine(self._engine.base_model, "in capture_state"):
                state = await self._models.capture(model_id)
            reservation.holds(state)
            take = self._take(model_id, tenant, seq_id, state, reservation, recorded)
            self._engine.tasks.create_task(take, name=f"recovery point of {model_id}")

    async def for_parking(self, model_id: str, tenant: str, seq_id: int) -> RecoveryPointRecord | None:
        """Write what an idle model goes on from, which is not registered yet. `seq_id` is its last operation.

        Return None if another of its recovery points is being written, or states of others wait for the disk.
        """
        if self._of(model_id).taking is not None:
            return None
        registered = await self._engine.store.list_recovery_points(model_id)
        if registered and registered[0].seq_id == seq_id:
            await self._gate.persist(model_id)
            return registered[0]
        reservation = self._engine.waiting.reserve_at_once(self._models.lora(model_id))
        if reservation is None:
            return None
        try:
            state = await self._models.capture(model_id)
            reservation.holds(state)
            return await self._write_if_room(model_id, tenant, seq_id, state)
        finally:
            reservation.release()

    async def parked(self, model_id: str) -> None:
        """A model has been parked, and its last recovery point registered."""
        try:
            await self.tidy(model_id)
        except TinsmithError as error:  # it is tidied again when the model is back
            _log.warning("old recovery points of %s could not be removed yet: %s", model_id, error)
        del self._progress[model_id]

    def _is_due(self, model: _Progress) -> bool:
        if model.taking is not None or model.operations == 0:
            return False
        late = time.monotonic() - model.taken_at_s >= self._settings.point_every_s
        return late or model.operations >= self._settings.point_every_operations

    async def _take(
        self,
        model_id: str,
        tenant: str,
        seq_id: int,
        state: ModelState,
        reservation: Reservation,
        recorded: asyncio.Task[None],
    ) -> None:
        try:
            with ending_the_engine(self._engine.base_model, "in capture_state"):
                written = await self._write_if_room(model_id, tenant, seq_id, state)
            del state
            reservation.release()
            await asyncio.wait([recorded])  # a recovery point must never be ahead of the recorded results
            await self.register(written)
        except (LeaseLostError, EngineFailedError):
            raise
        except TinsmithError as error:
            _log.warning("no recovery point of %s was taken; the next one may succeed: %s", model_id, error)
        finally:
            reservation.release()
            if (model := self._progress.get(model_id)) is not None:
                model.taking = None

    async def _write_if_room(self, model_id: str, tenant: str, seq_id: int, state: ModelState) -> RecoveryPointRecord:
        """Write it if the disk has room for its growth over the one that it replaces."""
        registered = await self._engine.store.list_recovery_points(model_id)
        replaced = registered[-1].size_bytes if len(registered) >= self._settings.keep_points else 0
        await self._engine.room.expect(tenant, max(0, size_of(state, "training") - replaced))
        await self._gate.persist(model_id)
        return await self.write(model_id, seq_id, state)

    @durable_boundary("recovery_point.write")
    async def write(self, model_id: str, seq_id: int, state: ModelState) -> RecoveryPointRecord:
        """Make it durable. It is not used before it is registered. Raise ServerError if the disk fails."""
        directory = f"{model_id}/{seq_id}-{self._version}"
        now = datetime.now(UTC)
        async with self._of(model_id).writing:
            size = await self._engine.write_state(
                self._root, directory, "training", lambda: state, num_bytes=size_of(state, "training"), created_at=now
            )
        return RecoveryPointRecord(
            model_id=model_id, seq_id=seq_id, directory=directory, size_bytes=size, created_at=now
        )

    @durable_boundary("recovery_point.register")
    async def register(self, record: RecoveryPointRecord) -> None:
        """Raise ServerError if the results up to it are not recorded, or the model has ended."""
        await self._engine.store.add_recovery_point(self._engine.lease, record, keep=self._settings.keep_points)
        await self.tidy(record.model_id)

    async def tidy(self, model_id: str) -> None:
        """Remove files that are not registered, except those that may be registered soon: newer ones, and our own."""
        async with self._of(model_id).writing:
            registered = await self._engine.store.list_recovery_points(model_id)
            if registered:
                kept = {Path(record.directory).name for record in registered}
                await asyncio.to_thread(self._remove_older, model_id, registered[0].seq_id, kept)

    def _remove_older(self, model_id: str, newest: int, kept: Collection[str]) -> None:
        taking = self._progress.get(model_id, _Progress()).taking
        for name in directories_in(self._root / model_id) - set(kept):
            seq_id = int(name.split("-")[0])
            if seq_id <= newest and seq_id != taking:
                delete_checkpoint(self._root, f"{model_id}/{name}")

    async def forget(self, model_id: str) -> None:
        """Remove all recovery points of a model that has ended."""
        async with self._progress.pop(model_id, _Progress()).writing:
            await asyncio.to_thread(shutil.rmtree, self._root / model_id, ignore_errors=True)

    async def keep_only(self, model_ids: Collection[str]) -> None:
        """Remove earlier engines' recovery points of models that have since ended."""
        found = await asyncio.to_thread(directories_in, self._root)
        for model_id in found - set(model_ids):
            await self.forget(model_id)

    async def tidy_after(self, record: OperationRecord, result: ops.Result) -> None:
        """Remove the recovery points that an operation has made useless."""
        never_created = record.kind == "create_model" and isinstance(result, ops.Failed)
        try:
            if record.kind == "unload_model" or never_created:
                await self.forget(record.subject_id)
            elif record.kind == "load_state":
                await self.tidy(record.subject_id)
        except TinsmithError as error:  # the next start removes them
            _log.warning("old recovery points of %s could not be removed yet: %s", record.subject_id, error)
