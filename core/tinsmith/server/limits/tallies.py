"""Counts of tenants' objects, read from the store once a second, and added to in between."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

STALE_AFTER_S: Final = 1.0
_TIDY_EVERY: Final = 1000  # tallies, after which stale ones are dropped


@dataclass(slots=True)
class _Tally:
    """A tenant's counts, by setting, without the requests that other servers have accepted since they were read."""

    counts: Counter[str]
    read_at_s: float


class Tallies:
    """One tally per tenant, read again after a second."""

    def __init__(self, read: Callable[[str], Awaitable[Counter[str]]], clock: Callable[[], float]) -> None:
        self._read = read
        self._clock = clock
        self._tallies: dict[str, _Tally] = {}
        self._reading: dict[str, asyncio.Task[Counter[str]]] = {}
        self._tidy_at = _TIDY_EVERY

    async def of(self, tenant: str) -> Counter[str]:
        """Return the tally, to which the caller adds what it accepts."""
        tally = self._tallies.get(tenant)
        if tally is None or self._clock() - tally.read_at_s > STALE_AFTER_S:
            reading = self._reading.get(tenant)
            if reading is None:
                reading = self._reading[tenant] = asyncio.create_task(self._read_again(tenant))
            return await asyncio.shield(reading)
        return tally.counts

    def forget(self, tenant: str) -> None:
        """Read the tally of this tenant again when it is needed."""
        self._tallies.pop(tenant, None)

    async def _read_again(self, tenant: str) -> Counter[str]:
        try:
            counts = await self._read(tenant)
        finally:
            del self._reading[tenant]
        self._tidy()
        self._tallies[tenant] = _Tally(counts, self._clock())
        return counts

    def _tidy(self) -> None:
        if len(self._tallies) >= self._tidy_at:
            since = self._clock() - STALE_AFTER_S
            self._tallies = {tenant: each for tenant, each in self._tallies.items() if each.read_at_s > since}
            self._tidy_at = len(self._tallies) + _TIDY_EVERY
