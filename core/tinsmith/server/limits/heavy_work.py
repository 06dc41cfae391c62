"""Work on large bodies: in a separate thread, one at a time, alternating between tenants. And work on large answers.

Unpacking and decoding hold Python's lock for long stretches, and need several times the memory of the body. One at a
time, they do not add up, and a tenant that fills the thread gets a quarter of it: in the rest of the time nobody waits
for the lock. It is always the same thread, because the allocator keeps some freed memory for each thread that has used
it.
"""

import asyncio
import time
import traceback
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar
from weakref import WeakValueDictionary

from fastapi import Response
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

T = TypeVar("T")

LARGE_BYTES: Final = 1 << 18
"""Smaller bodies are decoded at once: it takes no longer than handing them to a thread and waiting for it."""

_FREE_S: Final = 1.0
_SHARE: Final = 0.25
_MOST_TENANTS: Final = 10_000


@dataclass(slots=True)
class Budget:
    """Seconds of the thread that a tenant has used: a second at once is free, beyond it a quarter of the time."""

    clock: Callable[[], float] = time.monotonic
    _used_s: float = 0.0
    _at_s: float = field(default=0.0)

    def use(self, seconds: float) -> None:
        now_s = self.clock()
        self._used_s = max(0.0, self._used_s - _SHARE * (now_s - self._at_s)) + seconds
        self._at_s = now_s

    def wait_s(self) -> float:
        """Return after how many seconds the tenant may use the thread again."""
        self.use(0.0)
        return max(0.0, self._used_s - _FREE_S) / _SHARE


@dataclass(slots=True)
class _Tenant:
    queue: asyncio.Lock = field(default_factory=asyncio.Lock)
    budget: Budget = field(default_factory=Budget)


class HeavyWork:
    """One per app."""

    def __init__(self) -> None:
        self._thread_is_free = asyncio.Lock()
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tinsmith-heavy")

    async def run(self, tenant: str, num_bytes: int, work: Callable[[], T]) -> T:
        """Return what the work returns. Only the first in each tenant's queue waits for the thread."""
        if num_bytes < LARGE_BYTES:
            return work()
        return await self.run_queued(tenant, work)

    async def run_queued(self, tenant: str, work: Callable[[], T]) -> T:
        """As `run`, for work whose size is not known yet."""
        mine = self._tenants.setdefault(tenant, _Tenant())
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > _MOST_TENANTS:
            self._tenants.popitem(last=False)
        async with mine.queue:
            await asyncio.sleep(mine.budget.wait_s())
            async with self._thread_is_free:
                began_s = time.monotonic()
                try:
                    return await asyncio.get_running_loop().run_in_executor(self._thread, partial(_freed, work))
                finally:
                    mine.budget.use(time.monotonic() - began_s)


def _freed(work: Callable[[], T]) -> T:
    """Do the work. If it fails, free what it had in memory: its error may live for as long as the request does."""
    try:
        return work()
    except Exception as error:
        failed: BaseException | None = error
        while failed is not None:
            traceback.clear_frames(failed.__traceback__)
            failed = failed.__cause__ or failed.__context__
        raise


class LargeAnswers:
    """One per app."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def build(self, tenant: str, read: Callable[[], Awaitable[T]], make: Callable[[T], BaseModel]) -> Response:
        """Answer with the value read, without what is None. `make` runs in a thread."""

        def to_json(found: T) -> str:
            return make(found).model_dump_json(exclude_none=True)

        async with self._locks.setdefault(tenant, asyncio.Lock()):
            body = await run_in_threadpool(to_json, await read())
        return Response(body, media_type="application/json")
