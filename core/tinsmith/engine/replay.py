"""Rebuilding a model: restore its newest readable recovery point, then replay the operations after it.

Training state is a function of the log: creation, passes, optimizer steps and loads that succeeded, in seq_id order.
A step that was refused for its gradient is one of them: what it did was to drop it. The results of replayed operations
are compared with the recorded ones.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tinsmith import operations as ops
from tinsmith.backend import ModelState
from tinsmith.checkpoints.saved import read_checkpoint
from tinsmith.engine.checkpoint_files import CheckpointReader
from tinsmith.engine.models import Models
from tinsmith.errors import ModelLostError, ServerError, TinsmithError, UserError
from tinsmith.failpoints import durable_boundary
from tinsmith.operations import Array
from tinsmith.store import OperationRecord, RecoveryPointRecord, RequestStore, RunLog, RunRecord
from tinsmith.store.codec import decode_operation, decode_result

REPLAY_PAGE = 32
"""How many operations of a log are in memory at a time."""

ReplayProgress = Callable[[int], None]
"""Called with the seq_id up to which the model has been rebuilt."""

_log = logging.getLogger(__name__)

_CHANGING = frozenset({"create_model", "forward_backward", "optim_step", "load_state"})  # the training state
_CREATION = -1  # the seq_id before the first operation


@dataclass(slots=True)
class History(ABC):
    """The sources of a model's rebuild. Told how far the rebuild is."""

    run: RunRecord
    recovery_points: Sequence[RecoveryPointRecord]  # newest first
    pruned_seq_id: int  # operations up to this one may be gone from the log

    @abstractmethod
    async def page(self, *, after_seq_id: int) -> Sequence[OperationRecord]:
        """Return the next succeeded operations in order, with payloads and results; none at the end."""

    @abstractmethod
    async def unreadable(self, point: RecoveryPointRecord, error: TinsmithError) -> None:
        """A recovery point is missing or damaged; the one before is tried next."""

    @abstractmethod
    async def replayed(self, record: OperationRecord) -> None:
        """The model is as it was after this operation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    """How a model was rebuilt."""

    point_seq_id: int | None  # of the recovery point it started from; None: its creation
    num_replayed: int
    differences: tuple[str, ...]  # the results that were not as recorded


@dataclass(frozen=True, slots=True)
class Replayer:
    models: Models
    checkpoints: CheckpointReader
    recovery_root: Path

    async def rebuild(self, history: History) -> Rebuilt:
        """Raise TinsmithError if something that is needed is gone, BackendFailedError if the backend fails."""
        point = await self._restore_newest(history)
        seq_id = _CREATION if point is None else point.seq_id
        if history.pruned_seq_id > seq_id:
            msg = (
                f"none of its recovery points can be read, and its log is incomplete: operations up to seq_id "
                f"{history.pruned_seq_id} are past their retention"
            )
            raise ModelLostError(msg)
        num_replayed, differences = 0, list[str]()
        while page := await history.page(after_seq_id=seq_id):
            for record in page:
                if record.kind in _CHANGING:
                    num_replayed += 1
                    differences += await self._replay(record)
                await history.replayed(record)
            seq_id = page[-1].seq_id
        return Rebuilt(
            point_seq_id=None if point is None else point.seq_id,
            num_replayed=num_replayed,
            differences=tuple(differences),
        )

    async def _restore_newest(self, history: History) -> RecoveryPointRecord | None:
        for point in history.recovery_points:
            try:
                checkpoint = await asyncio.to_thread(read_checkpoint, self.recovery_root, point.directory)
            except TinsmithError as error:
                await history.unreadable(point, error)
                continue
            await self._restore(history.run, checkpoint.state)
            return point
        return None

    @durable_boundary("recovery.restore")
    async def _restore(self, run: RunRecord, state: ModelState) -> None:
        await self.models.create(ops.CreateModel(model_id=run.model_id, lora=run.lora), state)

    async def _replay(self, record: OperationRecord) -> list[str]:
        """Replay an operation. Return how its result differs from the recorded one, if it does."""
        if record.payload is None:
            msg = f"its log is incomplete: the content of the {record.kind} with seq_id {record.seq_id} is gone"
            raise ModelLostError(msg)
        recorded = _recorded(record)
        if isinstance(recorded, ops.Failed) and recorded.gradient_dropped:
            await self.models.drop_gradient(record.subject_id)
            return []
        result = await self._run_again(decode_operation(record.kind, record.payload), record)
        differs = None if recorded is None else difference(recorded, result)
        return [] if differs is None else [f"{record.kind} with seq_id {record.seq_id}, {differs}"]

    @durable_boundary("recovery.replay")
    async def _run_again(self, operation: ops.Operation, record: OperationRecord) -> ops.Result:
        """Run an operation that has succeeded before, only for its effect on the model."""
        match operation:
            case ops.CreateModel():
                state = None
                if operation.checkpoint is not None:
                    state = await self._loaded(operation.checkpoint, operation, record)
                    operation = replace(operation, lora=state.lora)
                await self.models.create(operation, state)
                return ops.ModelCreated(model_id=operation.model_id)
            case ops.LoadState():
                await self.models.restore(operation.model_id, await self._loaded(operation.path, operation, record))
                return ops.WeightsLoaded(model_id=operation.model_id, path=operation.path)
            case ops.ForwardBackward() | ops.OptimStep():
                unknown = self.models.why_not(operation.model_id, operation)
                (result,) = [unknown] if unknown is not None else await self.models.run_batch([operation])
                if isinstance(result, ops.Failed):
                    msg = f"its {record.kind} with seq_id {record.seq_id} succeeded before but fails now: "
                    raise ServerError(msg + result.message)
                return result
            case _:
                msg = f"{record.kind} does not change a training state"
                raise ServerError(msg)

    async def _loaded(
        self, path: str, operation: ops.CreateModel | ops.LoadState, record: OperationRecord
    ) -> ModelState:
        return await self.checkpoints.state_at_replay(path, load_optimizer=operation.load_optimizer, of=record)


def check_reachable(log: RunLog, seq_id: int) -> None:
    """Raise UserError if an operation is out of reach of the log and the recovery points; say what is in reach."""
    run, oldest = log.run, log.oldest_reachable
    if run.applied_seq_id < 0:
        msg = f"{run.model_id!r} has not run any operation yet, so there is no state to rebuild"
        raise UserError(msg)
    if oldest is None:
        msg = (
            f"{run.model_id!r} can no longer be rebuilt: its operations up to seq_id {log.pruned_seq_id} are past "
            f"their retention, and it has no recovery point ({run.state}); set recovery.keep_log_s to keep the logs of "
            "future runs"
        )
        raise UserError(msg)
    reach = f"--until may be {oldest} to {run.applied_seq_id}"
    if seq_id > run.applied_seq_id:
        msg = f"seq_id {seq_id} of {run.model_id!r} has not run yet, the last is {run.applied_seq_id}; {reach}"
        raise UserError(msg)
    if seq_id < max(oldest, 0):
        recovery_points = ", ".join(str(each.seq_id) for each in reversed(log.recovery_points)) or "none"
        msg = (
            f"seq_id {seq_id} of {run.model_id!r} is out of reach: operations up to {log.pruned_seq_id} are past their "
            f"retention, and its recovery points are at seq_id {recovery_points}; {reach}. To reach further back in "
            "future runs, set recovery.keep_log_s or recovery.keep_points"
        )
        raise UserError(msg)


async def rebuild_at(
    model_id: str, until: int, *, store: RequestStore, replayer: Replayer, progress: ReplayProgress
) -> Rebuilt:
    """Rebuild one model as it was after the operation `until`, on a backend that holds nothing else.

    Raise UserError if it cannot be reached; ServerError if something that is needed is damaged, or is pruned meanwhile.
    """
    log = await store.run_log(model_id)
    check_reachable(log, until)
    usable = [each for each in log.recovery_points if log.pruned_seq_id <= each.seq_id <= until]
    rebuilt = await replayer.rebuild(_PastHistory(log.run, usable, log.pruned_seq_id, until, store, progress))
    if rebuilt.point_seq_id is None and rebuilt.num_replayed == 0:
        msg = f"{model_id!r} was never created: its creation failed, or is not in the log"
        raise UserError(msg)
    return rebuilt


@dataclass(slots=True)
class _PastHistory(History):
    """A model's records up to an operation; the server may run on meanwhile."""

    until: int
    store: RequestStore
    progress: ReplayProgress
    complete: bool = False  # everything up to `until` has been read

    async def page(self, *, after_seq_id: int) -> list[OperationRecord]:
        self.progress(after_seq_id)
        if self.complete:
            return []
        page = await self.store.replayable(self.run.model_id, after_seq_id=after_seq_id, limit=REPLAY_PAGE)
        await self._refuse_pruned(after_seq_id)  # asked after the page: what is not pruned now was in it
        self.complete = not page or page[-1].seq_id >= self.until
        return [record for record in page if record.seq_id <= self.until]

    async def _refuse_pruned(self, after_seq_id: int) -> None:
        if (await self.store.run_log(self.run.model_id)).pruned_seq_id > after_seq_id:
            msg = (
                f"the log of {self.run.model_id!r} was pruned beyond seq_id {after_seq_id} while it was replayed, "
                "because the server is running; try again with a later --until, or set recovery.keep_log_s"
            )
            raise ServerError(msg)

    async def unreadable(self, point: RecoveryPointRecord, error: TinsmithError) -> None:
        """It is damaged, or was removed in favour of a newer one."""
        _log.warning("the recovery point of seq_id %d cannot be read: %s", point.seq_id, error)

    async def replayed(self, record: OperationRecord) -> None:
        self.progress(record.seq_id)


def _recorded(record: OperationRecord) -> ops.Result | None:
    if record.result_kind is None or record.result is None:
        return None
    return decode_result(record.result_kind, record.result)


def difference(recorded: ops.Result, replayed: ops.Result) -> str | None:
    """Describe how the two differ. Return None if every bit agrees.

    An older version may have recorded fewer outputs and metrics than are computed now.
    """
    match recorded, replayed:
        case ops.Failed(), _:
            return None  # its result was too large to record
        case ops.ForwardBackwardOutput(), ops.ForwardBackwardOutput():
            return _outputs(recorded, replayed)
        case ops.OptimStepOutput(), ops.OptimStepOutput():
            return _largest(_metrics(recorded.metrics), _metrics(replayed.metrics))
        case _:
            return None if recorded == replayed else f"recorded {recorded}, now {replayed}"


def _outputs(recorded: ops.ForwardBackwardOutput, replayed: ops.ForwardBackwardOutput) -> str | None:
    if len(recorded.loss_fn_outputs) != len(replayed.loss_fn_outputs):
        return f"recorded {len(recorded.loss_fn_outputs)} outputs, now {len(replayed.loss_fn_outputs)}"
    return _largest(_arrays(recorded), _arrays(replayed))


def _arrays(output: ops.ForwardBackwardOutput) -> dict[str, Array]:
    named = {
        f"{name} of datum {index}": array
        for index, datum in enumerate(output.loss_fn_outputs)
        for name, array in datum.items()
    }
    return named | _metrics(output.metrics)


def _metrics(metrics: Mapping[str, float]) -> dict[str, Array]:
    return {f"metric {name!r}": np.array(value, np.float64) for name, value in metrics.items()}


def _largest(recorded: Mapping[str, Array], replayed: Mapping[str, Array]) -> str | None:
    if missing := sorted(recorded.keys() - replayed.keys()):
        return f"only what was recorded has {', '.join(missing[:5])}"
    worst: tuple[float, str] | None = None
    for name, before in recorded.items():
        after = replayed[name]
        if before.shape != after.shape or before.dtype != after.dtype:
            return f"{name} was {before.dtype}{before.shape}, now {after.dtype}{after.shape}"
        if before.tobytes() != after.tobytes():
            size = _distance(before, after)
            if worst is None or not size <= worst[0]:  # NaN counts as the largest
                worst = size, name
    return None if worst is None else f"by {worst[0]:.3g} in {worst[1]}"


def _distance(before: Array, after: Array) -> float:
    with np.errstate(all="ignore"):
        return float(np.max(np.abs(before.astype(np.float64) - after.astype(np.float64))))
