"""The operation save_for_sampler: publish a model's weights, write them if they have a name, have them sampled.

A persisted snapshot is compared with its model before its save is answered; a refused one leaves nothing behind. The
save of an ephemeral one is answered at once: `snapshot_checks.py` compares it, and holds its samples until then.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from tinsmith import operations as ops
from tinsmith.backend import Snapshot
from tinsmith.checkpoints.tinker_path import TinkerPath
from tinsmith.engine.checkpoint_files import CheckpointWriter
from tinsmith.engine.claimed import Outcome
from tinsmith.engine.consistency_gate import ConsistencyGate, refusal
from tinsmith.engine.disk_room import DiskRoom
from tinsmith.engine.failures import with_retries
from tinsmith.engine.models import Models
from tinsmith.engine.sampling_snapshots import Snapshots, persisted_id
from tinsmith.engine.snapshot_checks import SnapshotChecks
from tinsmith.errors import NotFoundError
from tinsmith.store import (
    CheckpointRecord,
    CheckpointWritten,
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
        checks: SnapshotChecks,
        *,
        checkpoints: CheckpointWriter,
        room: DiskRoom,
    ) -> None:
        self._store = store
        self._models = models
        self._snapshots = snapshots
        self._gate = gate
        self._checks = checks
        self._checkpoints = checkpoints
        self._room = room
        self._saving: set[str] = set()  # ids of sampling sessions

    async def run(self, operation: ops.SaveForSampler, record: OperationRecord) -> Outcome:
        """Raise UserError if an ephemeral snapshot is asked for and its id is taken or the model has no sampler."""
        if operation.path is not None:
            return await self._persisted(operation, operation.path, record)
        assert operation.sampling_session_id is not None
        with self._reserved(operation.sampling_session_id):
            await self._refuse_recorded(operation.sampling_session_id)
            return await self._ephemeral(operation, operation.sampling_session_id, record)

    async def _persisted(self, operation: ops.SaveForSampler, path: str, record: OperationRecord) -> Outcome:
        directory = TinkerPath.parse(path).new_directory()
        snapshot = await self._models.publish(operation.model_id, persisted_id(directory))
        written = await self._write(operation, path, directory, snapshot, record)
        sampled = self._snapshots.why_not(snapshot.lora) is None
        found = await self._load(snapshot, operation.model_id) if sampled else None
        if found is not None and self._gate.refuses(found):
            await self._snapshots.discard(snapshot.snapshot_id)
            await self._checkpoints.remove(written)
            return Outcome(result=ops.Failed(message=refusal(found), category="server"), consistency=found)
        saved = ops.WeightsSaved(path=path, size_bytes=written.size_bytes, consistency=found)
        return Outcome(result=saved, effects=(CheckpointWritten(record=written),), consistency=found)

    async def _ephemeral(self, operation: ops.SaveForSampler, session_id: str, record: OperationRecord) -> Outcome:
        why_not = self._snapshots.why_not(self._models.lora(operation.model_id))
        if why_not is not None:
            raise why_not
        snapshot = await self._models.publish(operation.model_id, session_id)
        num_bytes = snapshot.num_bytes
        await self._room.expect(record.tenant, num_bytes)
        scoring = self._gate.scoring(operation.model_id)
        if scoring is not None and self._checks.at_once:
            scoring.begin()
        await self._snapshots.add(snapshot, model_id=operation.model_id)
        comparing = self._checks.start(operation.model_id, snapshot, scoring)
        saved = ops.WeightsSaved(sampling_session_id=session_id)
        return Outcome(
            result=saved, effects=(_session(session_id, num_bytes, operation.model_id, record),), comparing=comparing
        )

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
            first = await with_retries(self._store.get_sampling_session, sampling_session_id)
        except NotFoundError:
            return
        raise taken(sampling_session_id, first.snapshot_id or first.base_model)

    async def _write(
        self, operation: ops.SaveForSampler, path: str, directory: str, snapshot: Snapshot, record: OperationRecord
    ) -> CheckpointRecord:
        return await self._checkpoints.write(
            path,
            "sampler",
            await self._models.weights_of(snapshot),
            record,
            directory=directory,
            ttl_seconds=operation.ttl_seconds,
            user_metadata=operation.user_metadata,
        )

    async def _load(self, snapshot: Snapshot, model_id: str) -> ops.Consistency | None:
        """Load the snapshot into the sampler, and compare it with the model, which does not train meanwhile."""
        if (scoring := self._gate.scoring(model_id)) is not None:
            scoring.begin()  # while the trainer has the devices, before the sampler loads the snapshot
        await self._snapshots.add(snapshot, model_id=model_id)
        async with self._snapshots.use(snapshot.snapshot_id):
            return await self._gate.check(model_id, snapshot.snapshot_id, snapshot.lora, scoring)


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
