"""Whether an engine may write so much more to the disk: within its tenant's share, and without using the reserve."""

import asyncio
import time
from dataclasses import dataclass
from typing import Final

from tinsmith.engine.failures import with_retries
from tinsmith.errors import UserError
from tinsmith.settings import QuotaSettings
from tinsmith.store import KeptBytes, RequestStore
from tinsmith.store.disk_room import DiskSpace, ReadSpace, why_in_reserve, why_over_share

_STALE_AFTER_S: Final = 1.0


@dataclass(slots=True)
class _Known:
    """What a tenant kept when the store was asked, and what it was granted since."""

    kept: KeptBytes
    asked_at_s: float
    granted: int = 0

    @property
    def is_fresh(self) -> bool:
        return time.monotonic() - self.asked_at_s <= _STALE_AFTER_S


class DiskRoom:
    """Remembers for a second what a tenant keeps. Before it refuses something, it asks again."""

    def __init__(self, store: RequestStore, settings: QuotaSettings, read_space: ReadSpace) -> None:
        self._store = store
        self._settings = settings
        self._read_space = read_space
        self._known: dict[str, _Known] = {}  # by tenant

    async def expect(self, tenant: str, num_bytes: int) -> None:
        """Raise UserError, with the reason and the remedy, if the tenant may not write so many bytes more."""
        space = await self._space()
        why = why_in_reserve(self._settings, space, more=num_bytes)
        if why is not None:
            raise UserError(why)
        known = self._known.get(tenant)
        if known is None or not known.is_fresh or self._why_over_share(known, space, num_bytes) is not None:
            known = await self._ask(tenant)
            if (why := self._why_over_share(known, space, num_bytes)) is not None:
                raise UserError(why)
        known.granted += num_bytes

    async def why_not(self, num_bytes: int) -> str | None:
        """Return why so many bytes more would use the reserve, or None if they would not."""
        return why_in_reserve(self._settings, await self._space(), more=num_bytes)

    def _why_over_share(self, known: _Known, space: DiskSpace, num_bytes: int) -> str | None:
        return why_over_share(self._settings, known.kept, space, more=known.granted + num_bytes)

    async def _ask(self, tenant: str) -> _Known:
        asked_at_s = time.monotonic()
        found = await with_retries(self._store.kept_bytes, tenant)
        self._known = {name: each for name, each in self._known.items() if each.is_fresh}
        known = self._known[tenant] = _Known(found[0] if found else KeptBytes(tenant=tenant), asked_at_s)
        return known

    async def _space(self) -> DiskSpace:
        return await asyncio.to_thread(self._read_space)
