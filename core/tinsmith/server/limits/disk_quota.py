"""Decides whether a tenant may write more to the disk. Writes that must happen are not asked about.

That is heartbeats, results, and what frees space: the ends of models and sessions, and deletions.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Final

from tinsmith.errors import CapacityError, UserError
from tinsmith.server.limits.counts import Tallies
from tinsmith.settings import QuotaSettings
from tinsmith.store import DiskUse, KeptBytes, RequestStore
from tinsmith.store.disk_room import DiskSpace, ReadSpace, allowed_bytes, reserve_bytes, why_in_reserve, why_over_share

_RETRY_AFTER_S: Final = 10.0  # only a tenant, or the operator, can make room
_FOR_AWAITED: Final = 0.5  # the part of the reserve that stays closed to requests that others wait for
_LEAST_SAVE_BYTES: Final = 4096  # the files of the smallest save take as much, and its request less
_LITTLE_BYTES: Final = 1024
_LOG: Final = "log"
_KEPT_S: Final = 1.0


class DiskQuota:
    """One per app. Space and tallies are read once a second; what is accepted in between is added."""

    def __init__(
        self, store: RequestStore, settings: QuotaSettings, read_space: ReadSpace | None, clock: Callable[[], float]
    ) -> None:
        """`read_space` None: there is no limit."""
        self._store = store
        self._settings = settings
        self._read_space = read_space
        self._clock = clock
        self._kept = Tallies(self._read_kept, clock)
        # for requests that come while it is read anew
        self._space = DiskSpace(0, 0) if read_space is None else read_space()
        self._read_at_s = float("-inf")
        self._accepted_bytes = 0  # since then

    async def admit(self, tenant: str, more: int, *, awaited: bool = False) -> None:
        """Count `num_bytes` of the tenant. Raise CapacityError if they exceed its share, or use the reserve.

        With `awaited`, other requests wait for this one: it may exceed the share, and use some of the reserve.
        """
        if self._read_space is None:
            return
        space = await self.space()
        if (
            why := why_in_reserve(self._settings, space, more=more, share=_FOR_AWAITED if awaited else 1.0)
        ) is not None:
            raise CapacityError(why, retry_after_s=_RETRY_AFTER_S, queue_state="paused_capacity")
        counts = await self._kept.of(tenant)
        if not awaited and (why := self._why_over_share(tenant, counts, space, more)) is not None:
            raise CapacityError(why, retry_after_s=_RETRY_AFTER_S)
        counts[_LOG] += more
        self._accepted_bytes += more

    async def admit_described(self, tenant: str, more: int) -> None:
        """Admit a row with what a client says of it. If that is little, it counts, but needs no room.

        So a tenant that is over its share can still begin a session, in which it deletes something.
        """
        if more > _LITTLE_BYTES:
            await self.admit(tenant, more)
        else:
            await self.admit_unowned()

    async def admit_unowned(self) -> None:
        """Admit something small that counts towards no share. Raise CapacityError if only the reserve is left."""
        if (why := await self.why_full()) is not None:
            raise CapacityError(why, retry_after_s=_RETRY_AFTER_S, queue_state="paused_capacity")

    async def why_full(self) -> str | None:
        """Return that only the reserve is left, or None if there is more."""
        if self._read_space is None:
            return None
        return why_in_reserve(self._settings, await self.space(), more=0)

    async def why_no_save(self, tenant: str, num_bytes: int = _LEAST_SAVE_BYTES) -> UserError | None:
        """Return why a tenant may save no more, or None if it may. An engine knows the size of a save, and asks again.

        A save without room for its own request would otherwise be refused with a 429, again and again.
        """
        if self._read_space is None:
            return None
        space = await self.space()
        why = why_in_reserve(self._settings, space, more=num_bytes)
        why = why or self._why_over_share(tenant, await self._kept.of(tenant), space, num_bytes)
        return None if why is None else UserError(why)

    def freed(self, tenant: str) -> None:
        """Something of the tenant was deleted: the next request sees it."""
        self._kept.forget(tenant)
        self._read_at_s = float("-inf")

    async def space(self) -> DiskSpace:
        """Return what is free, less what was accepted since that was read."""
        if self._read_space is not None and self._clock() - self._read_at_s > _KEPT_S:
            self._read_at_s = self._clock()  # at once, so that others do not ask as well
            self._space, self._accepted_bytes = await asyncio.to_thread(self._read_space), 0
        return DiskSpace(self._space.total_bytes, self._space.free_bytes - self._accepted_bytes)

    async def reserve_bytes(self) -> int:
        return reserve_bytes(self._settings, await self.space())

    async def uses(self, tenant: str | None) -> list[DiskUse]:
        """Return what a tenant keeps, or what each of them keeps."""
        space, kept = await self.space(), await self._store.kept_bytes(tenant)
        if tenant is not None and not kept:
            kept = [KeptBytes(tenant=tenant)]
        return [DiskUse(kept=each, allowed_bytes=allowed_bytes(self._settings, each, space)) for each in kept]

    def _why_over_share(self, tenant: str, counts: Counter[str], space: DiskSpace, more: int) -> str | None:
        return why_over_share(self._settings, KeptBytes(tenant=tenant, **counts), space, more=more)

    async def _read_kept(self, tenant: str) -> Counter[str]:
        found = await self._store.kept_bytes(tenant)
        return Counter(found[0].by_kind if found else {})
