"""Work that a request to stop may cut short."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def unless_stopped(stopping: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Do the work and return its result. Cancel it and return None if `stopping` is set first."""
    doing, stopped = asyncio.create_task(work), asyncio.create_task(stopping.wait())
    await asyncio.wait([doing, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if doing.done():
        return await doing
    doing.cancel()
    await asyncio.wait([doing])
    return None
