"""Group commit: one task per process and durability, which puts everything that waits to be written into one commit."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlmodel import Session
from sqlmodel.ext.asyncio.session import AsyncSession

from tinsmith.errors import ServerError, TinsmithError
from tinsmith.sql_store.wakeups import WakeUps

_MAX_GROUP = 256

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Transaction:
    """What a write works on. `wake` collects the topics to tell once it is committed."""

    session: Session
    now: datetime
    wake: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Write:
    run: Callable[[Transaction], Any]  # Any: writes of every result type share the queue
    future: asyncio.Future[Any]


class Writer:
    """Runs writes in the order in which they were asked for. One that raises is undone alone."""

    def __init__(self, engine: AsyncEngine, wakeups: WakeUps) -> None:
        self._engine = engine
        self._wakeups = wakeups
        self._queue: asyncio.Queue[_Write | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        self._task = asyncio.create_task(self._run(), name="sql-writer")

    async def close(self) -> None:
        """Write what is queued, then stop."""
        if self._task is not None:
            self._queue.put_nowait(None)
            await self._task
            self._task = None
        await self._engine.dispose()

    async def write(self, run: Callable[[Transaction], T]) -> T:
        """Run a synchronous function in a transaction; return its result once that is committed.

        A caller that is cancelled while it waits does not undo the write.
        """
        if self._task is None or self._task.done():
            msg = "the request store is closed"
            raise ServerError(msg)
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(_Write(run, future))
        return await future

    async def _run(self) -> None:
        while (first := await self._queue.get()) is not None:
            group, more = self._gather(first)
            try:
                await self._commit(group)
            except SQLAlchemyError as error:
                for write in group:
                    _fail(write.future, store_error(error))
            if not more:
                return

    def _gather(self, first: _Write) -> tuple[list[_Write], bool]:
        group = [first]
        while len(group) < _MAX_GROUP:
            with contextlib.suppress(asyncio.QueueEmpty):
                write = self._queue.get_nowait()
                if write is None:
                    return group, False
                group.append(write)
                continue
            break
        return group, True

    async def _commit(self, group: list[_Write]) -> None:
        transactions: list[Transaction] = []
        done: list[tuple[_Write, Any]] = []  # Any: as in _Write

        def run(session: Session) -> None:
            now = datetime.now(UTC)
            for write in group:
                transaction = Transaction(session, now)
                try:
                    with session.begin_nested():
                        result = write.run(transaction)
                except Exception as error:  # noqa: BLE001 - it belongs to the one who asked, and to nobody else
                    _fail(write.future, store_error(error))
                    continue
                transactions.append(transaction)
                done.append((write, result))

        async with AsyncSession(self._engine, expire_on_commit=False) as session:
            await session.run_sync(run)  # type: ignore[arg-type]  # AsyncSession's inner session is sqlmodel's
            await session.commit()
        self._wakeups.tell(topic for transaction in transactions for topic in transaction.wake)
        for write, result in done:
            if not write.future.done():
                write.future.set_result(result)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


def store_error(error: BaseException) -> BaseException:
    """Turn what the database raised into a ServerError, and leave everything else as it is."""
    if isinstance(error, SQLAlchemyError) and not isinstance(error, TinsmithError):
        wrapped = ServerError(f"the request store failed: {error}; see that its disk has space and is not locked")
        wrapped.__cause__ = error
        return wrapped
    return error
