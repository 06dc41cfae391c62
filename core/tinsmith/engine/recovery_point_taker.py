"""Taking recovery points while training goes on."""

import asyncio
import logging
from collections.abc import Sequence

from tinsmith import operations as ops
from tinsmith.backend import ModelState
from tinsmith.checkpoints.sizes import size_of
from tinsmith.engine.disk_room import DiskRoom
from tinsmith.engine.failures import EngineFailedError, ending_the_engine
from tinsmith.engine.models import Models
from tinsmith.engine.recovery_points import RecoveryPoints
from tinsmith.engine.snapshot_checks import SnapshotChecks
from tinsmith.engine.waiting_states import Place, WaitingStates
from tinsmith.errors import LeaseLostError, TinsmithError
from tinsmith.store import OperationRecord, RecoveryPointTaken

_log = logging.getLogger(__name__)


class RecoveryPointTaker:
    """Copies a model's state to the host between two batches, and writes it in the background."""

    def __init__(
        self,
        recovery_points: RecoveryPoints,
        models: Models,
        checks: SnapshotChecks,
        waiting: WaitingStates,
        room: DiskRoom,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._recovery_points = recovery_points
        self._models = models
        self._checks = checks
        self._waiting = waiting
        self._room = room
        self._tasks = tasks

    def ran(self, records: Sequence[OperationRecord]) -> None:
        """Note that these operations have run on the backend."""
        for record in records:
            self._recovery_points.ran(record.subject_id, record.seq_id)

    async def keep(self, model_id: str, state: ModelState, record: OperationRecord) -> RecoveryPointTaken:
        """Keep what is about to be loaded: a recovery cannot rely on the checkpoint, which may be deleted by then."""
        replaced = await self._recovery_points.replaced_bytes(model_id)
        await self._room.expect(record.tenant, max(0, size_of(state, "training") - replaced))
        await self._checks.persist(model_id)
        taken = await self._recovery_points.write(model_id, record.seq_id, state)
        return RecoveryPointTaken(record=taken, keep=self._recovery_points.keep)

    async def take_due(self, records: Sequence[OperationRecord], recorded: asyncio.Task[None]) -> None:
        """Capture those models of a batch whose recovery point is due. Call before the next batch.

        `recorded` ends when the results of the batch are in the store.
        """
        base_model = records[0].base_model
        for model_id, tenant in {record.subject_id: record.tenant for record in records}.items():
            if not self._recovery_points.due(model_id):
                continue
            place = self._waiting.place_at_once(self._models.lora(model_id))
            if place is None:
                continue  # until the disk has taken others; it stays due
            seq_id = self._recovery_points.begin(model_id)
            with ending_the_engine(base_model, "capture_state"):
                state = await self._models.capture(model_id)
            place.holds(state)
            write = self._write(model_id, tenant, seq_id, state, place, recorded, base_model)
            self._tasks.create_task(write, name=f"recovery point of {model_id}")

    async def _write(
        self,
        model_id: str,
        tenant: str,
        seq_id: int,
        state: ModelState,
        place: Place,
        recorded: asyncio.Task[None],
        base_model: str,
    ) -> None:
        try:
            with ending_the_engine(base_model, "capture_state"):
                replaced = await self._recovery_points.replaced_bytes(model_id)
                await self._room.expect(tenant, max(0, size_of(state, "training") - replaced))
                await self._checks.persist(model_id)
                written = await self._recovery_points.write(model_id, seq_id, state)
            del state
            place.release()
            await asyncio.wait([recorded])  # a recovery point must never be ahead of the recorded results
            await self._recovery_points.register(written)
        except (LeaseLostError, EngineFailedError):
            raise
        except TinsmithError as error:
            _log.warning("no recovery point of %s was taken; the next one may succeed: %s", model_id, error)
        finally:
            place.release()
            self._recovery_points.end(model_id)

    async def tidy_after(self, record: OperationRecord, result: ops.Result) -> None:
        """Remove the recovery points that an operation has made useless."""
        never_created = record.kind == "create_model" and isinstance(result, ops.Failed)
        try:
            if record.kind == "unload_model" or never_created:
                await self._recovery_points.forget(record.subject_id)
            elif record.kind == "load_state":
                await self._recovery_points.tidy(record.subject_id)
        except TinsmithError as error:  # the next start removes them
            _log.warning("old recovery points of %s could not be removed yet: %s", record.subject_id, error)
