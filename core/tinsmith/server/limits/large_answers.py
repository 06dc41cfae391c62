"""Answers that may hold a hundred thousand rows: built off the event loop, one at a time for each tenant.

So a tenant that asks for many of them occupies one of the store's readers and one thread at most.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar
from weakref import WeakValueDictionary

from fastapi import Response
from starlette.concurrency import run_in_threadpool

T = TypeVar("T")


class LargeAnswers:
    """One per app."""

    def __init__(self) -> None:
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def build(self, tenant: str, read: Callable[[], Awaitable[T]], to_json: Callable[[T], str]) -> Response:
        """Answer with what was read. `to_json` runs in a thread."""
        turn = self._turns.setdefault(tenant, asyncio.Lock())
        async with turn:
            body = await run_in_threadpool(to_json, await read())
        return Response(body, media_type="application/json")
