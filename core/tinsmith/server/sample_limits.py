"""Limits the waiting samples of each tenant. The SDK takes a 429 as back-pressure and sends the sample again later."""

import time
from dataclasses import dataclass
from typing import Final

from tinsmith.errors import CapacityError
from tinsmith.store import RequestStore

_STALE_AFTER_S: Final = 1.0


@dataclass(slots=True)
class _Count:
    pending: int
    read_at: float


class SampleLimits:
    """Counts in the store once a second, and adds what this server accepts in between."""

    def __init__(self, store: RequestStore, max_pending: int) -> None:
        self._store = store
        self._max_pending = max_pending
        self._counts: dict[str, _Count] = {}

    async def admit(self, tenant: str) -> None:
        """Raises CapacityError if the tenant has reached its limit."""
        count = self._counts.get(tenant)
        if count is None or time.monotonic() - count.read_at > _STALE_AFTER_S:
            count = _Count(pending=await self._store.count_samples(tenant), read_at=time.monotonic())
            self._counts[tenant] = count
        if count.pending >= self._max_pending:
            msg = f"{count.pending} of your samples are waiting already, the limit of this server; send this one later"
            raise CapacityError(msg)
        count.pending += 1
