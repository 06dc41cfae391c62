"""Work that a request to stop cuts short."""

import asyncio
from collections.abc import Coroutine
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
