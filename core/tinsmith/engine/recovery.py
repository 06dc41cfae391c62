"""Rebuilding models: those that the previous engine held, and parked ones that come back."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from tinsmith import operations as ops
from tinsmith.engine.consistency_gate import ConsistencyGate
from tinsmith.engine.context import EngineContext
from tinsmith.engine.failures import ending_the_engine, with_retries
from tinsmith.engine.models import Models
from tinsmith.engine.recovery_points import RecoveryPoints
from tinsmith.engine.replay import REPLAY_PAGE, History, Rebuilt, Replayer
from tinsmith.engine.snapshots import Snapshots
from tinsmith.engine.steps import Steps
from tinsmith.errors import LeaseLostError, ModelLostError, StoreError, TinsmithError
from tinsmith.references import told
from tinsmith.store import LiveModel, OperationRecord, RecoveryPointRecord, RunLog, RunRecord, RunState
from tinsmith.store.codec import decode_operation

RecoveryProgress = Callable[[str, float], None]
"""Called with a description of the rebuild, and the share of the models done, 0 to 1."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Recovery:
    """Runs once, before the engine claims anything; then it brings parked models back, one at a time."""

    engine: EngineContext
    models: Models
    replayer: Replayer
    snapshots: Snapshots
    gate: ConsistencyGate
    recovery_points: RecoveryPoints
    steps: Steps
    interrupted: bool = False  # the previous engine was killed from outside

    async def run(self, progress: RecoveryProgress, *, interrupted: bool) -> None:
        """Rebuild every model that has a place, or was coming back to one.

        A model that cannot be rebuilt is lost by itself, with the reason.
        `interrupted` means that the previous engine was killed from outside. Raise EngineFailedError if the backend
        fails, and StoreError if the store fails for too long: no model is lost, the next engine tries again. A model in
        whose rebuild too many engines have ended is lost.
        """
        self.interrupted = interrupted
        live_models = await with_retries(self.engine.store.live_models, self.engine.lease.base_model)
        await self.recovery_points.keep_only({live.run.model_id for live in live_models})
        await self.snapshots.adopt({name: live.run.model_id for live in live_models for name in live.ephemeral})
        with_place = [live for live in live_models if live.run.state is not RunState.PARKED]
        for number, live in enumerate(with_place, start=1):
            tell = partial(_tell, progress, live.run, number, len(with_place))
            await self._rebuild_or_lose(live, tell, after="its engine had ended")
        for live in live_models:
            # An engine has ended while this one came back. It tries again alone, so that the next end is its own fault.
            if live.run.state is RunState.PARKED and live.rebuilds and self.models.has_room(live.run.lora):
                await self._return(live)

    async def bring_back(self, model_id: str) -> bool:
        """Rebuild a parked model, of which nothing runs meanwhile. Return False if it is lost, or has ended meanwhile.

        Raise as `run` does.
        """
        return await self._return(await with_retries(self.engine.store.run_log, model_id))

    async def _return(self, parked: LiveModel | RunLog) -> bool:
        model_id = parked.run.model_id
        if not await self._rebuild_or_lose(parked, lambda _seq_id: None, after="it had been parked"):
            return False
        if await with_retries(self.engine.store.return_model, self.engine.lease, model_id):
            return True
        with ending_the_engine(self.engine.base_model, "in unload_model"):
            await self.models.unload(model_id)
        return False

    async def _rebuild_or_lose(self, recorded: LiveModel | RunLog, tell: Callable[[int], None], *, after: str) -> bool:
        with ending_the_engine(self.engine.lease.base_model, "while it rebuilt a model"):
            return await self._rebuild(recorded, tell, after=after)

    async def _rebuild(self, recorded: LiveModel | RunLog, tell: Callable[[int], None], *, after: str) -> bool:
        run = recorded.run
        history = _LiveHistory(
            run, recorded.recovery_points, recorded.pruned_seq_id, self.engine, self._publish_again, tell
        )
        try:
            await self._begin(run.model_id)
            tell(-1)
            rebuilt = await self.replayer.rebuild(history)
        except (StoreError, LeaseLostError):  # the model is not at fault
            raise
        except TinsmithError as error:  # others are the backend's, one of whose workers may have been killed
            await self._lose(run.model_id, error, after)
            return False
        await self._end(run, rebuilt)
        return True

    async def _begin(self, model_id: str) -> None:
        begun = await with_retries(
            self.engine.store.begin_rebuild, self.engine.lease, model_id, interrupted=self.interrupted
        )
        if begun > self.engine.settings.recovery.max_retries + 1:
            msg = f"its engine ended {begun - 1} times while it was rebuilt"
            raise ModelLostError(msg)

    async def _lose(self, model_id: str, error: TinsmithError, after: str) -> None:
        why = told(error, _log, during=f"the rebuild of {model_id}").public
        reason = f"it could not be rebuilt after {after}: {why}"
        _log.error("model %s is lost: %s", model_id, reason, exc_info=error)
        await with_retries(self.engine.store.lose_run, self.engine.lease, model_id, reason)
        await self.models.discard(model_id, reason)
        await self.gate.drop_model(model_id)
        await self.recovery_points.forget(model_id)

    async def _end(self, run: RunRecord, rebuilt: Rebuilt) -> None:
        model_id, differences = run.model_id, rebuilt.differences
        _log.info(
            "rebuilt %s: %d operations replayed, up to seq_id %d", model_id, rebuilt.num_replayed, run.applied_seq_id
        )
        await with_retries(self.engine.store.end_rebuild, self.engine.lease, model_id)
        self.steps.rebuilt(model_id, run.steps)
        self.recovery_points.ran(model_id, run.applied_seq_id, operations=rebuilt.num_replayed)
        if differences:
            for which in differences:
                _log.error("the replay of %s differs from the recorded result: %s", model_id, which)
            note = (
                f"{len(differences)} operations that were replayed after a restart gave other results than at first; "
                f"the first is {differences[0]}"
            )
            await with_retries(self.engine.store.note_run, self.engine.lease, model_id, note)

    async def _publish_again(self, operation: ops.SaveForSampler) -> None:
        """Bring back an ephemeral snapshot that was only in memory."""
        snapshot_id, model_id = operation.snapshot_id, operation.model_id
        if snapshot_id is None or self.snapshots.holds(snapshot_id):
            return
        if self.snapshots.why_not(self.models.lora(model_id)) is None:
            snapshot = await self.models.publish(model_id, snapshot_id)
            await self.gate.admit_again(model_id, snapshot)


@dataclass(slots=True)
class _LiveHistory(History):
    """Everything that is recorded of a live model."""

    engine: EngineContext
    publish_again: Callable[[ops.SaveForSampler], Awaitable[None]]
    tell: Callable[[int], None]

    async def page(self, *, after_seq_id: int) -> list[OperationRecord]:
        return await with_retries(
            self.engine.store.replayable, self.run.model_id, after_seq_id=after_seq_id, limit=REPLAY_PAGE
        )

    async def unreadable(self, point: RecoveryPointRecord, error: TinsmithError) -> None:
        _log.error("recovery point %s is damaged; trying the previous one", point.directory, exc_info=error)
        await with_retries(self.engine.store.drop_recovery_point, self.engine.lease, self.run.model_id, point.seq_id)

    async def replayed(self, record: OperationRecord) -> None:
        if record.kind == "save_for_sampler" and record.payload is not None:
            operation = decode_operation(record.kind, record.payload)
            assert isinstance(operation, ops.SaveForSampler)
            await self.publish_again(operation)
        self.tell(record.seq_id)


def _tell(progress: RecoveryProgress, run: RunRecord, number: int, of: int, seq_id: int) -> None:
    """Report that this model, one of `number`, has been rebuilt up to `seq_id`."""
    done, total = seq_id + 1, run.applied_seq_id + 1
    text = f"rebuilding model {number} of {of}, at operation {done} of {total}"
    progress(text, (number - 1 + min(done / max(total, 1), 1.0)) / of)
