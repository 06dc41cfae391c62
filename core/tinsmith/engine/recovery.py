"""Rebuilding the models that an engine held: the newest good snapshot, then the operations after it once more.

Training state is a function of the log: creation, passes, optimizer steps and loads that succeeded, in seq_id order.
What replayed operations return is compared with what was recorded.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from tinsmith import operations as ops
from tinsmith.engine.execution import BackendFailedError, Execution
from tinsmith.engine.recovery_points import RecoveryPoints
from tinsmith.engine.replay import CHANGING, replay
from tinsmith.engine.sampling_snapshots import Snapshots
from tinsmith.engine.store_retries import insist
from tinsmith.errors import LeaseLostError, ModelLostError, StoreError, TinsmithError
from tinsmith.store import Lease, LiveModel, OperationRecord, RequestStore
from tinsmith.store.codec import decode_operation

_PAGE = 32  # operations in memory

RecoveryProgress = Callable[[str, float], None]
"""Called with what is being rebuilt, and the share of the models done, 0 to 1."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Rebuilding:
    """How far one model has come."""

    live: LiveModel
    number: int
    of: int
    seq_id: int = -1
    changes: int = 0
    differences: list[str] = field(default_factory=list)


class Recovery:
    """Runs once, before the engine claims anything."""

    def __init__(
        self,
        *,
        lease: Lease,
        store: RequestStore,
        execution: Execution,
        snapshots: Snapshots | None,
        recovery_points: RecoveryPoints,
        progress: RecoveryProgress,
        max_attempts: int,
        interrupted: bool,
    ) -> None:
        """`interrupted`: the engine before was killed from outside. `max_attempts` bounds the rebuilds of a model."""
        self._lease = lease
        self._store = store
        self._execution = execution
        self._snapshots = snapshots
        self._recovery_points = recovery_points
        self._progress = progress
        self._max_attempts = max_attempts
        self._interrupted = interrupted

    async def run(self) -> None:
        """Rebuild every live model; one that cannot be is lost alone, with the reason.

        Raise BackendFailedError where the backend failed: the model that it failed in is lost, the others are there
        for the next engine. Raise StoreError where the store fails for too long: that costs no model, and the next
        engine tries again.
        """
        models = await insist(lambda: self._store.live_models(self._lease.base_model))
        await self._recovery_points.keep_only({live.run.model_id for live in models})
        if self._snapshots is not None:
            await self._snapshots.adopt({name: live.run.model_id for live in models for name in live.ephemeral})
        for number, live in enumerate(models, start=1):
            await self._rebuild_or_lose(_Rebuilding(live, number, len(models)))

    async def _rebuild_or_lose(self, model: _Rebuilding) -> None:
        run = model.live.run
        try:
            await self._refuse_what_kills(run.model_id)
            await self._rebuild(model)
        except (StoreError, LeaseLostError):  # says nothing about the model
            raise
        except (TinsmithError, BackendFailedError) as error:
            reason = f"it could not be rebuilt after its engine had ended: {error}"
            _log.exception("model %s is lost: %s", run.model_id, reason)
            await insist(lambda: self._store.lose_run(self._lease, run.model_id, reason))
            if isinstance(error, BackendFailedError):
                raise
            await self._execution.discard(run.model_id, reason)
            await self._recovery_points.forget(run.model_id)
            return
        _log.info(
            "rebuilt %s: %d operations replayed, up to seq_id %d", run.model_id, model.changes, run.applied_seq_id
        )
        await insist(lambda: self._store.end_rebuild(self._lease, run.model_id))
        self._recovery_points.ran(run.model_id, run.applied_seq_id, operations=model.changes)
        if model.differences:
            note = (
                f"{len(model.differences)} operations replayed after a restart gave other results than they gave at "
                f"first, the first of them {model.differences[0]}"
            )
            await insist(lambda: self._store.note_run(self._lease, run.model_id, note))

    async def _refuse_what_kills(self, model_id: str) -> None:
        begin = self._store.begin_rebuild
        begun = await insist(lambda: begin(self._lease, model_id, interrupted=self._interrupted))
        if begun > self._max_attempts:
            msg = f"its engine ended {begun - 1} times while it was rebuilt"
            raise ModelLostError(msg)

    async def _rebuild(self, model: _Rebuilding) -> None:
        self._say(model)
        await self._restore_newest(model)
        while page := await self._page(model):
            for record in page:
                await self._replay(model, record)
                model.seq_id = record.seq_id
                self._say(model)

    async def _page(self, model: _Rebuilding) -> list[OperationRecord]:
        replayable = self._store.replayable
        return await insist(lambda: replayable(model.live.run.model_id, after_seq_id=model.seq_id, limit=_PAGE))

    async def _restore_newest(self, model: _Rebuilding) -> None:
        run = model.live.run
        for snapshot in model.live.recovery_points:
            try:
                state = await self._recovery_points.read(snapshot)
            except TinsmithError:
                _log.exception("snapshot %s is damaged; going back to the one before", snapshot.directory)
                await insist(partial(self._store.drop_recovery_point, self._lease, run.model_id, snapshot.seq_id))
                continue
            await self._execution.restore(run.model_id, run.lora, state)
            model.seq_id = snapshot.seq_id
            break
        if model.live.pruned_seq_id > model.seq_id:
            msg = (
                f"there is no good snapshot of it, and its log is incomplete: operations up to seq_id "
                f"{model.live.pruned_seq_id} are past their retention"
            )
            raise ModelLostError(msg)

    async def _replay(self, model: _Rebuilding, record: OperationRecord) -> None:
        if record.kind == "save_for_sampler" and record.payload is not None:
            operation = decode_operation(record.kind, record.payload)
            assert isinstance(operation, ops.SaveForSampler)
            await self._execution.publish_again(operation)
        if record.kind not in CHANGING:
            return
        which = await replay(self._execution, record)
        model.changes += 1
        if which is not None:
            _log.error("the replay of %s differs from the recorded result: %s", record.subject_id, which)
            model.differences.append(which)

    def _say(self, model: _Rebuilding) -> None:
        done, total = model.seq_id + 1, model.live.run.applied_seq_id + 1
        text = f"rebuilding model {model.number} of {model.of}, at operation {done} of {total}"
        self._progress(text, (model.number - 1 + min(done / max(total, 1), 1.0)) / model.of)
