"""Work that a request to stop, or the end of other work, cuts short."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


async def unless_stopped(stopping: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Do the work and return its result, or None if `stopping` is set first. However this ends, the work has ended."""
    doing, stopped = asyncio.create_task(work), asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait([doing, stopped], return_when=asyncio.FIRST_COMPLETED)
        return doing.result() if doing.done() else None
    finally:
        stopped.cancel()
        if not doing.done():
            doing.cancel()
            await asyncio.wait([doing])


@asynccontextmanager
async def alongside(work: Coroutine[Any, Any, object], *, name: str) -> AsyncIterator[None]:
    """Do the work while the block runs, then cancel it and wait for its end. The event loop logs what it raises."""
    task = asyncio.create_task(work, name=name)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
