"""Rebuilding a model as it was after an earlier operation. The log is only read."""

import logging
from collections.abc import Callable

from tinsmith.engine.replay import REPLAY_PAGE, History, Rebuilt, Replayer
from tinsmith.errors import ServerError, TinsmithError, UserError
from tinsmith.store import OperationRecord, RecoveryPointRecord, RequestStore, RunLog

ReplayProgress = Callable[[int], None]
"""Called with the seq_id up to which the model has been rebuilt."""

_log = logging.getLogger(__name__)


def check_reachable(log: RunLog, seq_id: int) -> None:
    """Raise UserError if an operation is out of reach of the log and the recovery points; say what is in reach."""
    run, oldest = log.run, oldest_reachable(log)
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


def oldest_reachable(log: RunLog) -> int | None:
    """Return the lowest seq_id that can be rebuilt. None if there is nothing to start from."""
    if log.pruned_seq_id < 0:
        return 0
    return min((each.seq_id for each in log.recovery_points if each.seq_id >= log.pruned_seq_id), default=None)


async def rebuild_at(
    model_id: str,
    until: int,
    *,
    store: RequestStore,
    replayer: Replayer,
    progress: ReplayProgress,
) -> Rebuilt:
    """Rebuild one model as it was after the operation `until`, on a backend that holds nothing else.

    Raise UserError if it cannot be reached; ServerError if something that is needed is damaged, or is pruned meanwhile.
    """
    log = await store.run_log(model_id)
    check_reachable(log, until)
    rebuilt = await replayer.rebuild(_PastHistory(log, until, store, progress))
    if rebuilt.point_seq_id is None and rebuilt.num_replayed == 0:
        msg = f"{model_id!r} was never created: its creation failed, or is not in the log"
        raise UserError(msg)
    return rebuilt


class _PastHistory(History):
    """What is recorded of a model up to an operation, while the server may be running on."""

    def __init__(self, log: RunLog, until: int, store: RequestStore, progress: ReplayProgress) -> None:
        usable = [each for each in log.recovery_points if log.pruned_seq_id <= each.seq_id <= until]
        super().__init__(log.run, usable, log.pruned_seq_id)
        self._until = until
        self._store = store
        self._progress = progress
        self._complete = False  # everything up to `until` has been read

    async def page(self, *, after_seq_id: int) -> list[OperationRecord]:
        self._progress(after_seq_id)
        if self._complete:
            return []
        page = await self._store.replayable(self.run.model_id, after_seq_id=after_seq_id, limit=REPLAY_PAGE)
        await self._refuse_pruned(after_seq_id)  # asked after the page: what is not pruned now was in it
        self._complete = not page or page[-1].seq_id >= self._until
        return [record for record in page if record.seq_id <= self._until]

    async def _refuse_pruned(self, after_seq_id: int) -> None:
        if (await self._store.run_log(self.run.model_id)).pruned_seq_id > after_seq_id:
            msg = (
                f"the log of {self.run.model_id!r} was pruned beyond seq_id {after_seq_id} while it was replayed, "
                "because the server is running; try again with a later --until, or set recovery.keep_log_s"
            )
            raise ServerError(msg)

    async def unreadable(self, point: RecoveryPointRecord, error: TinsmithError) -> None:
        """It is damaged, or was removed in favour of a newer one."""
        _log.warning("the recovery point of seq_id %d cannot be read: %s", point.seq_id, error)

    async def replayed(self, record: OperationRecord) -> None:
        self._progress(record.seq_id)
