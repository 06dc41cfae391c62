"""Work on large bodies: in a thread, one at a time, by turns among tenants.

Unpacking and decoding hold Python's lock for long stretches, and need several times the memory of the body. One at a
time, they neither stop the event loop nor add up.
"""

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar
from weakref import WeakValueDictionary

from starlette.concurrency import run_in_threadpool

T = TypeVar("T")

LARGE_BYTES: Final = 1 << 18
"""Smaller bodies are decoded at once: it takes no longer than handing them to a thread and waiting for a turn."""


class HeavyWork:
    """One per app."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._queues: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def run(self, tenant: str, num_bytes: int, work: Callable[[], T]) -> T:
        """Return what the work returns. Only the first in each tenant's queue waits for the turn."""
        if num_bytes < LARGE_BYTES:
            return work()
        return await self.run_in_turn(tenant, work)

    async def run_in_turn(self, tenant: str, work: Callable[[], T]) -> T:
        """As `run`, for work whose size is not known yet."""
        queue = self._queues.setdefault(tenant, asyncio.Lock())
        async with queue, self._turn:
            return await run_in_threadpool(work)
