"""Rebuilding the models that the previous engine held."""

import logging
from collections.abc import Awaitable, Callable
from functools import partial

from tinsmith import operations as ops
from tinsmith.engine.consistency_gate import ConsistencyGate
from tinsmith.engine.context import EngineContext
from tinsmith.engine.failures import BackendFailedError, EngineFailedError, with_retries
from tinsmith.engine.models import Models
from tinsmith.engine.recovery_points import RecoveryPoints
from tinsmith.engine.replay import REPLAY_PAGE, History, Rebuilt, Replayer
from tinsmith.engine.snapshots import Snapshots
from tinsmith.engine.steps import Steps
from tinsmith.errors import LeaseLostError, ModelLostError, StoreError, TinsmithError
from tinsmith.references import told
from tinsmith.store import Lease, LiveModel, OperationRecord, RecoveryPointRecord, RequestStore, RunRecord
from tinsmith.store.codec import decode_operation

RecoveryProgress = Callable[[str, float], None]
"""Called with what is being rebuilt, and the share of the models done, 0 to 1."""

_log = logging.getLogger(__name__)


class Recovery:
    """Runs once, before the engine claims anything."""

    def __init__(
        self,
        engine: EngineContext,
        models: Models,
        replayer: Replayer,
        snapshots: Snapshots,
        gate: ConsistencyGate,
        recovery_points: RecoveryPoints,
        steps: Steps,
    ) -> None:
        self._store = engine.store
        self._lease = engine.lease
        self._models = models
        self._replayer = replayer
        self._snapshots = snapshots
        self._gate = gate
        self._recovery_points = recovery_points
        self._steps = steps
        self._max_attempts = engine.options.recovery.max_retries + 1

    async def run(self, progress: RecoveryProgress, *, interrupted: bool) -> None:
        """Rebuild every live model. A model that cannot be rebuilt is lost by itself, with the reason.

        `interrupted` means that the previous engine was killed from outside. Raise EngineFailedError if the backend
        fails, and StoreError if the store fails for too long: no model is lost, the next engine tries again. A model in
        whose rebuild too many engines have ended is lost.
        """
        try:
            await self._run(progress, interrupted=interrupted)
        except BackendFailedError as error:
            msg = f"the engine of {self._lease.base_model!r} failed while it rebuilt a model: {error}"
            raise EngineFailedError(msg) from error

    async def _run(self, progress: RecoveryProgress, *, interrupted: bool) -> None:
        live_models = await with_retries(self._store.live_models, self._lease.base_model)
        await self._recovery_points.keep_only({live.run.model_id for live in live_models})
        await self._snapshots.adopt({name: live.run.model_id for live in live_models for name in live.ephemeral})
        for number, live in enumerate(live_models, start=1):
            tell = partial(_tell, progress, live.run, number, len(live_models))
            await self._rebuild_or_lose(live, tell, interrupted=interrupted)

    async def _rebuild_or_lose(self, live: LiveModel, tell: Callable[[int], None], *, interrupted: bool) -> None:
        history = _LiveHistory(live, self._store, self._lease, publish_again=self._publish_again, tell=tell)
        try:
            await self._begin(live.run.model_id, interrupted=interrupted)
            tell(-1)
            rebuilt = await self._replayer.rebuild(history)
        except (StoreError, LeaseLostError):  # the model is not at fault
            raise
        except TinsmithError as error:  # others are the backend's, one of whose workers may have been killed
            await self._lose(live.run.model_id, error)
        else:
            await self._end(live.run, rebuilt)

    async def _begin(self, model_id: str, *, interrupted: bool) -> None:
        begun = await with_retries(self._store.begin_rebuild, self._lease, model_id, interrupted=interrupted)
        if begun > self._max_attempts:
            msg = f"its engine ended {begun - 1} times while it was rebuilt"
            raise ModelLostError(msg)

    async def _lose(self, model_id: str, error: TinsmithError) -> None:
        why = told(error, _log, during=f"the rebuild of {model_id}").public
        reason = f"it could not be rebuilt after its engine had ended: {why}"
        _log.error("model %s is lost: %s", model_id, reason, exc_info=error)
        await with_retries(self._store.lose_run, self._lease, model_id, reason)
        await self._models.discard(model_id, reason)
        await self._gate.drop_model(model_id)
        await self._recovery_points.forget(model_id)

    async def _end(self, run: RunRecord, rebuilt: Rebuilt) -> None:
        model_id, differences = run.model_id, rebuilt.differences
        _log.info(
            "rebuilt %s: %d operations replayed, up to seq_id %d", model_id, rebuilt.num_replayed, run.applied_seq_id
        )
        await with_retries(self._store.end_rebuild, self._lease, model_id)
        self._steps.rebuilt(model_id, run.steps)
        self._recovery_points.ran(model_id, run.applied_seq_id, operations=rebuilt.num_replayed)
        if differences:
            for which in differences:
                _log.error("the replay of %s differs from the recorded result: %s", model_id, which)
            note = (
                f"{len(differences)} operations that were replayed after a restart gave other results than at first; "
                f"the first is {differences[0]}"
            )
            await with_retries(self._store.note_run, self._lease, model_id, note)

    async def _publish_again(self, operation: ops.SaveForSampler) -> None:
        """Bring back an ephemeral snapshot that was only in memory."""
        snapshot_id, model_id = operation.sampling_session_id, operation.model_id
        if snapshot_id is None or self._snapshots.holds(snapshot_id):
            return
        if self._snapshots.why_not(self._models.lora(model_id)) is None:
            snapshot = await self._models.publish(model_id, snapshot_id)
            await self._gate.admit_again(model_id, snapshot)


class _LiveHistory(History):
    """Everything that is recorded of a live model."""

    def __init__(
        self,
        live: LiveModel,
        store: RequestStore,
        lease: Lease,
        *,
        publish_again: Callable[[ops.SaveForSampler], Awaitable[None]],
        tell: Callable[[int], None],
    ) -> None:
        super().__init__(live.run, live.recovery_points, live.pruned_seq_id)
        self._store = store
        self._lease = lease
        self._publish_again = publish_again
        self._tell = tell

    async def page(self, *, after_seq_id: int) -> list[OperationRecord]:
        return await with_retries(
            self._store.replayable, self.run.model_id, after_seq_id=after_seq_id, limit=REPLAY_PAGE
        )

    async def unreadable(self, point: RecoveryPointRecord, error: TinsmithError) -> None:
        _log.error("recovery point %s is damaged; trying the previous one", point.directory, exc_info=error)
        await with_retries(self._store.drop_recovery_point, self._lease, self.run.model_id, point.seq_id)

    async def replayed(self, record: OperationRecord) -> None:
        if record.kind == "save_for_sampler" and record.payload is not None:
            operation = decode_operation(record.kind, record.payload)
            assert isinstance(operation, ops.SaveForSampler)
            await self._publish_again(operation)
        self._tell(record.seq_id)


def _tell(progress: RecoveryProgress, run: RunRecord, number: int, of: int, seq_id: int) -> None:
    """Report that this model, one of so many, has been rebuilt up to `seq_id`."""
    done, total = seq_id + 1, run.applied_seq_id + 1
    text = f"rebuilding model {number} of {of}, at operation {done} of {total}"
    progress(text, (number - 1 + min(done / max(total, 1), 1.0)) / of)
