"""Rebuilding a model as it was after any operation that its log still reaches. Changes nothing in the log."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tinsmith.backend import ModelState
from tinsmith.checkpoints.format import read_checkpoint
from tinsmith.engine.execution import Execution
from tinsmith.engine.replay import CHANGING, replay
from tinsmith.errors import ServerError, TinsmithError, UserError
from tinsmith.store import RecoveryPointRecord, RequestStore, RunLog

_PAGE = 32  # operations in memory
_CREATION = -1  # before the first operation

ReplayProgress = Callable[[int], None]
"""Called with the seq_id up to which the model has been rebuilt."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    state: ModelState
    point_seq_id: int | None  # of the recovery point that it was rebuilt from; None: from its creation
    num_replayed: int
    differences: tuple[str, ...]  # results that came out otherwise than they were recorded


@dataclass(slots=True)
class _Journey:
    replayed: int = 0
    differences: list[str] = field(default_factory=list)


def check_reachable(log: RunLog, seq_id: int) -> None:
    """Raise UserError where the log and the recovery points do not reach this operation, saying what they reach."""
    run, oldest = log.run, oldest_reachable(log)
    if run.applied_seq_id < 0:
        msg = f"nothing of {run.model_id!r} has been run yet, so there is no state to rebuild"
        raise UserError(msg)
    if oldest is None:
        msg = (
            f"{run.model_id!r} cannot be rebuilt any more: its operations up to seq_id {log.pruned_seq_id} are past "
            f"their retention, and it has no recovery point ({run.state}); recovery.keep_log_s keeps the logs of later "
            "runs"
        )
        raise UserError(msg)
    reach = f"--until may be {oldest} to {run.applied_seq_id}"
    if seq_id > run.applied_seq_id:
        msg = f"seq_id {seq_id} of {run.model_id!r} has not been run, the last one is {run.applied_seq_id}; {reach}"
        raise UserError(msg)
    if seq_id < max(oldest, 0):
        recovery_points = ", ".join(str(each.seq_id) for each in reversed(log.recovery_points)) or "none"
        msg = (
            f"seq_id {seq_id} of {run.model_id!r} is out of reach: operations up to {log.pruned_seq_id} are past their "
            f"retention, and its recovery points are at seq_id {recovery_points}; {reach}. To go back further another "
            "time set recovery.keep_log_s or recovery.keep_points"
        )
        raise UserError(msg)


def oldest_reachable(log: RunLog) -> int | None:
    """Return the lowest seq_id that can be rebuilt; None where there is nothing to start from."""
    if log.pruned_seq_id < 0:
        return 0
    return min((each.seq_id for each in log.recovery_points if each.seq_id >= log.pruned_seq_id), default=None)


async def rebuild(
    model_id: str,
    until: int,
    *,
    store: RequestStore,
    execution: Execution,
    recovery_root: Path,
    progress: ReplayProgress,
) -> Rebuilt:
    """Rebuild one model on a backend that holds nothing else, and return its state after the operation `until`.

    Raise UserError where it is out of reach; ServerError where what is needed is damaged, or was pruned meanwhile.
    """
    log = await store.run_log(model_id)
    check_reachable(log, until)
    point = await _restore(log, until, execution, recovery_root)
    reached, journey = _CREATION if point is None else point.seq_id, _Journey()
    progress(reached)
    while page := await store.replayable(model_id, after_seq_id=reached, limit=_PAGE):
        # looked at after the page: what is not pruned now was in it
        if (await store.run_log(model_id)).pruned_seq_id > reached:
            msg = (
                f"the log of {model_id!r} was pruned up to seq_id {until} and beyond while it was replayed: the server "
                "goes on meanwhile; try again with a later one, or set recovery.keep_log_s"
            )
            raise ServerError(msg)
        for record in page:
            if record.seq_id > until:
                break
            if record.kind in CHANGING:
                differs = await replay(execution, record)
                journey.replayed += 1
                if differs is not None:
                    journey.differences.append(differs)
            progress(record.seq_id)
        reached = page[-1].seq_id
        if reached >= until:
            break
    if point is None and journey.replayed == 0:
        msg = f"{model_id!r} was never created: its creation failed, or is not in the log"
        raise UserError(msg)
    return Rebuilt(
        state=await execution.capture(model_id),
        point_seq_id=None if point is None else point.seq_id,
        num_replayed=journey.replayed,
        differences=tuple(journey.differences),
    )


async def _restore(log: RunLog, until: int, execution: Execution, recovery_root: Path) -> RecoveryPointRecord | None:
    """Start from the newest good recovery point that is not too late; None: from the creation."""
    for point in log.recovery_points:
        if not log.pruned_seq_id <= point.seq_id <= until:
            continue
        try:
            checkpoint = await asyncio.to_thread(read_checkpoint, recovery_root, point.directory)
        except TinsmithError as error:  # damaged, or replaced by a newer one meanwhile
            _log.warning("the recovery point of seq_id %d cannot be used: %s", point.seq_id, error)
            continue
        await execution.restore(log.run.model_id, log.run.lora, checkpoint.state)
        return point
    if log.pruned_seq_id >= 0:
        msg = (
            f"no recovery point of {log.run.model_id!r} at or before seq_id {until} can be read, and its log is "
            "incomplete"
        )
        raise ServerError(msg)
    return None
