"""Reading: a few connections, each of which answers whatever has queued up in one transaction."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlmodel import Session
from sqlmodel.ext.asyncio.session import AsyncSession

from tinsmith.errors import ServerError
from tinsmith.sql_store.writer import store_error

_MAX_GROUP = 64

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Read:
    run: Callable[[Session], Any]  # Any: reads of every result type share the queue
    future: asyncio.Future[Any]


class Reader:
    """Everything that is asked of it sees what was committed before it was asked."""

    def __init__(self, engine: AsyncEngine, num_connections: int) -> None:
        self._engine = engine
        self._num_connections = num_connections
        self._queue: asyncio.Queue[_Read | None] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    def open(self) -> None:
        self._tasks = [
            asyncio.create_task(self._run(), name=f"sql-reader-{number}") for number in range(self._num_connections)
        ]

    async def close(self) -> None:
        """Answer what is queued, then stop."""
        for _ in self._tasks:
            self._queue.put_nowait(None)
        await asyncio.gather(*self._tasks)
        self._tasks = []
        await self._engine.dispose()

    async def read(self, run: Callable[[Session], T]) -> T:
        """Run a synchronous function that only reads."""
        if not self._tasks:
            msg = "the request store is closed"
            raise ServerError(msg)
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(_Read(run, future))
        return await future

    async def _run(self) -> None:
        while (first := await self._queue.get()) is not None:
            group = [first]
            while len(group) < _MAX_GROUP and not self._queue.empty():
                read = self._queue.get_nowait()
                if read is None:
                    self._queue.put_nowait(None)
                    break
                group.append(read)
            await self._answer(group)

    async def _answer(self, group: list[_Read]) -> None:
        def run(session: Session) -> None:
            for read in group:
                if read.future.done():  # its caller has given up
                    continue
                try:
                    read.future.set_result(read.run(session))
                except Exception as error:  # noqa: BLE001 - it belongs to the one who asked
                    read.future.set_exception(store_error(error))

        try:
            async with AsyncSession(self._engine) as session:
                await session.run_sync(run)  # type: ignore[arg-type]  # AsyncSession's inner session is sqlmodel's
        except SQLAlchemyError as error:
            for read in group:
                if not read.future.done():
                    read.future.set_exception(store_error(error))
