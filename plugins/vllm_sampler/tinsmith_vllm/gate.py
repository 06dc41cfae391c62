"""Who may draw on a replica: many samples together, or a suspect alone."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """A lock that many share or one has. Used on one event loop.

    Who waits to be alone goes first, in the order of arrival, and those who would share wait meanwhile.
    """

    def __init__(self) -> None:
        self._inside = 0
        self._has_one = False
        self._alone: deque[asyncio.Future[None]] = deque()
        self._sharing: deque[asyncio.Future[None]] = deque()

    @property
    def is_reserved(self) -> bool:
        """Whether somebody is alone inside, or waits to be."""
        return self._has_one or bool(self._alone)

    @asynccontextmanager
    async def entered(self, *, alone: bool) -> AsyncIterator[None]:
        if self.is_reserved or (alone and self._inside):
            await self._wait(self._alone if alone else self._sharing)
        else:
            self._enter(alone=alone)
        try:
            yield
        finally:
            self._leave()

    async def _wait(self, queue: deque[asyncio.Future[None]]) -> None:
        """Return inside: `_let_in` has counted this one already."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled():
                self._leave()  # it was let in just before
            elif waiter in queue:
                queue.remove(waiter)
                self._let_in()
            raise

    def _enter(self, *, alone: bool) -> None:
        self._inside += 1
        self._has_one = alone

    def _leave(self) -> None:
        self._inside -= 1
        self._has_one = False
        self._let_in()

    def _let_in(self) -> None:
        if self._has_one:
            return
        while self._alone and self._alone[0].cancelled():
            self._alone.popleft()
        if self._alone:
            if not self._inside:
                self._enter(alone=True)
                self._alone.popleft().set_result(None)
            return
        while self._sharing:
            waiter = self._sharing.popleft()
            if not waiter.cancelled():
                self._enter(alone=False)
                waiter.set_result(None)
