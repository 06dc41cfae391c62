"""Work on long texts: beside the event loop, one piece at a time for each tenant, and on few threads.

Rendering and building answers hold Python's lock, in whatever thread. So at most two threads do it, each piece is
bounded before it begins, and a tenant with many requests occupies one of them.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")

SMALL: Final = 1 << 12
"""Of characters, or of values in an answer: less is done at once, in less time than a thread takes to answer."""

_THREADS: Final = 2


class NobodyWaitsError(Exception):
    """Ends work whose asker has gone."""


class Asker:
    """Whoever waits for a piece of work."""

    def __init__(self) -> None:
        self._gone = threading.Event()

    def leave(self) -> None:
        self._gone.set()

    def check(self) -> None:
        """Call this between long steps. Raise NobodyWaitsError if the result is of no use any more."""
        if self._gone.is_set():
            raise NobodyWaitsError


class TextWork:
    """One per server."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tinsmith-text")
        self._free = asyncio.Semaphore(_THREADS)
        self._queues: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def run(self, tenant: str, size: int, work: Callable[[Asker], T]) -> T:
        """Return what the work returns. If the caller is cancelled, the work ends at its next check."""
        asker = Asker()
        if size < SMALL:
            return work(asker)
        queue = self._queues.setdefault(tenant, asyncio.Lock())
        async with queue, self._free:
            working = asyncio.wrap_future(self._threads.submit(work, asker))
            try:
                return await asyncio.shield(working)
            except asyncio.CancelledError:
                asker.leave()
                await _end_of(working)  # the turn is over when the thread is free
                raise


async def _end_of(working: asyncio.Future[T]) -> None:
    while not working.done():
        try:
            await asyncio.wait([working])
        except asyncio.CancelledError:
            continue
    working.cancelled() or working.exception()
