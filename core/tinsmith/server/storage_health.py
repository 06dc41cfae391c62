"""Checks that requests can be recorded: the store accepts writes, and the disk has more than the reserve free."""

import asyncio
import logging
from typing import Final

from tinsmith.errors import StoreError, StoreFullError
from tinsmith.references import Told
from tinsmith.server.limits.disk_quota import DiskQuota
from tinsmith.store import RequestStore

_LOOK_S: Final = 5.0  # how often, if nobody asks
_PATIENCE_S: Final = 1.0  # an orchestrator does not wait longer for an answer
_FULL: Final = "the disk of the request store is full: sessions stay alive, but nothing is recorded until space is free"

_log = logging.getLogger(__name__)


class StorageHealth:
    """One per app. What begins and what ends is logged."""

    def __init__(self, store: RequestStore, disk: DiskQuota) -> None:
        self._store = store
        self._disk = disk
        self._writes: asyncio.Task[Told | None] | None = None
        self._trouble: Told | None = None

    async def trouble(self) -> Told | None:
        """Return why requests cannot be recorded now, or None if they can."""
        found = await self._why_no_writes() or await self._why_no_room()
        if found is not None and self._trouble is None:
            _log.error("not ready: %s", found.to(operator=True))
        elif found is None and self._trouble is not None:
            _log.warning("ready again: the store takes writes, and the disk has room")
        self._trouble = found
        return found

    async def watch(self) -> None:
        """Look until cancelled."""
        while True:
            await self.trouble()
            await asyncio.sleep(_LOOK_S)

    async def _why_no_room(self) -> Told | None:
        try:
            full = await self._disk.why_full()
        except OSError as error:
            return Told("the server's disk cannot be read now", str(error))
        return None if full is None else Told(full)

    async def _why_no_writes(self) -> Told | None:
        """A database that is away holds a write for long: look whether the last try has come back."""
        if self._writes is None:
            self._writes = asyncio.create_task(self._try_writing(), name="try-writing")
        tried = self._writes
        await asyncio.wait([tried], timeout=_PATIENCE_S)
        if not tried.done():
            return Told(f"the request store has not taken a write for more than {_PATIENCE_S:g} s")
        if self._writes is tried:  # else somebody who waited as well has begun the next
            self._writes = None
        return tried.result()

    async def _try_writing(self) -> Told | None:
        try:
            await self._store.expect_writes()
        except StoreFullError:
            return Told(_FULL)
        except StoreError as error:
            return Told("the request store cannot be written now", str(error))
        return None
