"""What a server does by the clock: end sessions nobody keeps alive, drop old results, delete expired checkpoints."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tinsmith.checkpoints import delete_checkpoint
from tinsmith.errors import NotFoundError, TinsmithError
from tinsmith.settings import ServerSettings
from tinsmith.store import RequestStore

_log = logging.getLogger(__name__)


def _now() -> datetime:
    return datetime.now(UTC)


class Housekeeping:
    """`run` works until cancelled; a round that fails is logged, and the next one tries again."""

    def __init__(
        self,
        settings: ServerSettings,
        store: RequestStore,
        checkpoint_root: Path,
        *,
        now: Callable[[], datetime] = _now,
    ) -> None:
        self._settings = settings
        self._store = store
        self._checkpoint_root = checkpoint_root
        self._now = now
        self._started_at = now()

    @property
    def interval_s(self) -> float:
        return min(self._settings.session_timeout_s, self._settings.result_retention_s) / 10

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self.interval_s)
            try:
                await self.round()
            except (TinsmithError, OSError) as error:
                _log.error("housekeeping failed, trying again in %.0f s: %s", self.interval_s, error)

    async def round(self) -> None:
        """Do everything that is due."""
        now = self._now()
        await self._expire_sessions(now)
        num_pruned = await self._store.prune(now - timedelta(seconds=self._settings.result_retention_s))
        if num_pruned:
            _log.debug("dropped %d results past their retention", num_pruned)
        for record in await self._store.expired_checkpoints(now):
            await self._delete(record.path)

    async def _expire_sessions(self, now: datetime) -> None:
        timeout = timedelta(seconds=self._settings.session_timeout_s)
        if now - self._started_at < timeout:
            return  # clients could not send heartbeats while no server ran
        for session_id in await self._store.expire_sessions(now - timeout):
            _log.info("session %s expired: no heartbeat for %s", session_id, timeout)

    async def _delete(self, path: str) -> None:
        """Forget the checkpoint first, so that nobody finds one whose files are half gone."""
        try:
            record = await self._store.delete_checkpoint(path)
        except NotFoundError:
            return  # its owner was faster
        await asyncio.to_thread(delete_checkpoint, self._checkpoint_root, record.directory)
        _log.info("checkpoint %s deleted: its time to live is over", path)
