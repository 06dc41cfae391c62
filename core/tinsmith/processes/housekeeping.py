"""The periodic work of a server: it ends abandoned sessions, and deletes old results and expired checkpoints."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

from tinsmith.checkpoints import uploads
from tinsmith.checkpoints.atomic_directory import sweep
from tinsmith.checkpoints.saved import delete_checkpoint
from tinsmith.checkpoints.tinker_path import TinkerPath, versions_on_disk
from tinsmith.errors import NotFoundError, TinsmithError, UserError
from tinsmith.server.hearing import Hearing
from tinsmith.settings import RecoverySettings, ServerSettings
from tinsmith.steady_clock import SteadyClock
from tinsmith.store import CheckpointRecord, RequestStore, RunState

_OTHERS_LATER: Final = timedelta(hours=1)
"""How much later a server ends sessions that another one heard last: until then, that one may have been unable to."""

_BACK_S: Final = 60.0
"""After a start or a break, how long results are kept in any case: until then, clients may not have come back."""

_log = logging.getLogger(__name__)

_ORPHANS_EVERY_S: Final = 1800.0

_WRITING_S: Final = 3600.0
"""A command that imports a checkpoint, or writes one from a replay, records it within this time."""

_PART: Final = 1000  # directories whose records are read together


class Housekeeping:
    """`run` works until it is cancelled. A round that fails is logged, and the next one tries again."""

    def __init__(
        self,
        settings: ServerSettings,
        store: RequestStore,
        checkpoint_root: Path,
        *,
        recovery: RecoverySettings | None = None,
        clock: SteadyClock | None = None,
        hearing: Hearing | None = None,
        server_id: str | None = None,
        uploads_root: Path | None = None,
    ) -> None:
        """`hearing` tells when silence counts: by default, always. Without a `server_id`, this is the only server."""
        self._settings = settings
        self._keep_log_s = (recovery or RecoverySettings()).keep_log_s
        self._store = store
        self._checkpoint_root = checkpoint_root
        self._uploads_root = uploads_root
        self._clock = clock or SteadyClock()
        self._hearing = hearing
        self._server_id = server_id
        self._next_orphans_s = -math.inf
        self._reached_at: datetime | None = None  # in the last round in which clients could reach this server
        self._breaks: deque[tuple[datetime, timedelta]] = deque()  # their ends and lengths, oldest first

    @property
    def interval_s(self) -> float:
        return min(self._settings.session_timeout_s, self._settings.result_retention_s) / 10

    async def run(self) -> None:
        while True:  # the first round is at once, because a server that restarts often must get to it, too
            try:
                await self.round()
            except (TinsmithError, OSError) as error:
                _log.error("housekeeping failed, trying again in %.0f s: %s", self.interval_s, error)
            await asyncio.sleep(self.interval_s)

    async def round(self) -> None:
        """Do everything that is due. After a jump of the clock, nothing expires until the clock has been steady."""
        now, steady_s = self._clock.read()
        heard_s = steady_s if self._hearing is None else min(steady_s, self._hearing.lasts_s())
        if steady_s >= self._settings.session_timeout_s:  # otherwise clients may have had no time for heartbeats
            await self._expire_sessions(now, heard_s=heard_s)
            await self._forget_sessions(now)
        elif self._clock.jumped:
            return
        if self._hearing is None or heard_s >= _BACK_S:
            await self._prune(now, now - self._out_of_reach(now, heard_s=heard_s))
        for record in await self._store.expired_checkpoints(now):
            await self._delete(record)
        await asyncio.to_thread(sweep, self._checkpoint_root)
        if self._uploads_root is not None:
            await asyncio.to_thread(uploads.sweep, self._uploads_root, now)
        await self._remove_orphans()

    async def _prune(self, now: datetime, reached: datetime) -> None:
        """Delete what is past its retention. `reached`: now, less the time in which clients could fetch nothing."""
        finished_before = reached - timedelta(seconds=self._settings.result_retention_s)
        idle_since = min(finished_before, now - timedelta(seconds=self._keep_log_s))
        num_pruned = await self._store.prune(finished_before, idle_since=idle_since)
        if num_pruned:
            _log.debug("deleted %d operations past their retention", num_pruned)
        await self._store.prune_audit(now - timedelta(seconds=self._settings.audit_retention_s))

    def _out_of_reach(self, now: datetime, *, heard_s: float) -> timedelta:
        """Return for how long this server was out of reach since the oldest results finished that are still kept."""
        if self._hearing is None:
            return timedelta()
        heard_since = now - timedelta(seconds=heard_s)
        if self._reached_at is not None and heard_since > self._reached_at:
            self._breaks.append((heard_since, heard_since - self._reached_at))
        self._reached_at = now
        total, retention = timedelta(), timedelta(seconds=self._settings.result_retention_s)
        for number, (end, length) in enumerate(reversed(self._breaks)):
            if now - end - total >= retention:  # what finished before it has been within reach for long enough
                for _ in range(len(self._breaks) - number):
                    self._breaks.popleft()
                break
            total += length
        return total

    async def _expire_sessions(self, now: datetime, *, heard_s: float) -> None:
        """End sessions that were silent although this server could hear them, for all of `heard_s`."""
        timeout, heard = timedelta(seconds=self._settings.session_timeout_s), timedelta(seconds=heard_s)
        if heard < timeout:
            return
        expired = await self._store.expire_sessions(now - timeout, heard_by=self._server_id)
        if self._server_id is not None and heard >= timeout + _OTHERS_LATER:
            expired += await self._store.expire_sessions(now - timeout - _OTHERS_LATER)
        for session_id in expired:
            _log.info("session %s expired: no heartbeat for %s", session_id, timeout)

    async def _forget_sessions(self, now: datetime) -> None:
        if (retention_s := self._settings.session_retention_s) is not None:
            num_forgotten = await self._store.forget_sessions(now - timedelta(seconds=retention_s))
            if num_forgotten:
                _log.debug("deleted %d sessions, models and sampling sessions past their retention", num_forgotten)

    async def _delete(self, expired: CheckpointRecord) -> None:
        """Delete the record first, so that nobody finds a checkpoint whose files are partly deleted."""
        try:
            record = await self._store.delete_version(expired)
        except NotFoundError:
            return  # a save has replaced it meanwhile, or its owner has deleted it or given it more time
        await asyncio.to_thread(delete_checkpoint, self._checkpoint_root, record.directory)
        _log.info("checkpoint %s deleted: it has expired", record.path)

    async def _remove_orphans(self) -> None:
        """Look for them seldom: every record is read for it."""
        now_s = time.monotonic()
        if self._next_orphans_s <= now_s:
            for directory in await remove_orphans(self._store, self._checkpoint_root):
                _log.info("files in %s deleted: no checkpoint refers to them", directory)
            self._next_orphans_s = now_s + _ORPHANS_EVERY_S


async def remove_orphans(store: RequestStore, root: Path, *, older_than_s: float = _WRITING_S) -> list[str]:
    """Remove the files of checkpoints that no record refers to. Return their directories.

    They are left by an engine or command that died before its save was recorded, by an engine that was paused and
    finished its save after another had taken over, and by deletions that were cut short. What this store knows nothing
    of is left: it may be another's.
    """
    removed = []
    found = await asyncio.to_thread(lambda: list(_paths_on_disk(root, older_than_s)))
    for start in range(0, len(found), _PART):
        part = found[start : start + _PART]
        # Almost all are recorded. Only the others are looked at one by one, in an order that matters.
        recorded = await store.recorded_directories({str(path) for _, path in part})
        for directory, path in part:
            if directory not in recorded and await _is_orphan(store, directory, path):
                await asyncio.to_thread(delete_checkpoint, root, directory)
                removed.append(directory)
    return removed


def _paths_on_disk(root: Path, older_than_s: float) -> Iterator[tuple[str, TinkerPath]]:
    for directory in versions_on_disk(root, older_than_s=older_than_s):
        with suppress(UserError):  # no directory of a checkpoint
            yield directory, TinkerPath.of_directory(directory)


async def _is_orphan(store: RequestStore, directory: str, path: TinkerPath) -> bool:
    # First the model, then the record: a save that is recorded in between is found by the second look.
    known = await _is_idle(store, path.model_id)
    if known is False:
        return False
    try:
        return (await store.get_checkpoint(str(path))).directory != directory
    except NotFoundError:
        return known is True or await _was_deleted(store, str(path))


async def _is_idle(store: RequestStore, model_id: str) -> bool | None:
    """Return whether no engine can be writing a checkpoint of this model; None if the store does not know the model."""
    try:
        run = await store.get_run(model_id)
    except NotFoundError:
        return None
    ended = run.state in {RunState.LOST, RunState.UNLOADED}
    return ended or run.next_seq_id <= run.applied_seq_id + 1


async def _was_deleted(store: RequestStore, path: str) -> bool:
    try:
        await store.deleted_checkpoint(path)
    except NotFoundError:
        return False
    return True
