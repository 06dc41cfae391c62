"""Running many callers' functions in one transaction: calls that arrive during one transaction share the next."""

import asyncio
import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy.exc import SQLAlchemyError
from sqlmodel import Session

from tinsmith.errors import StoreError, StoreFullError
from tinsmith.sql_store.databases.database import Database

_CLOSED: Final = "the request store is closed"
_FULL: Final = (
    "the disk of the request store is full, so nothing of this was recorded; free space, then the same request succeeds"
)
_CHECK: Final = "check that its disk has free space and that no other program locks it"
_DISK_FULL: Final = "53100"  # the SQL state of PostgreSQL

Models = Iterable[str] | Callable[[Session], Iterable[str]]


@dataclass(frozen=True, slots=True)
class Call:
    """A function to run in a transaction; its first argument is the transaction. `models` are locked before it."""

    function: Callable[..., Any]  # Any, here and below: calls with results of every type share the queue
    args: tuple[Any, ...]
    options: dict[str, Any]
    models: Models = ()
    result: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass(frozen=True, slots=True)
class Failure:
    """Takes the place of the result of a call that raised."""

    error: Exception


class Grouping(ABC):
    """A queue of calls, and one task for each database that takes groups from it and runs them."""

    def __init__(self, databases: Sequence[Database], *, max_group: int) -> None:
        self._databases = databases
        self._max_group = max_group
        self._queue: asyncio.Queue[Call | None] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._is_open = False

    def open(self) -> None:
        self._is_open = True
        self._tasks = [asyncio.create_task(self._work(each), name=type(self).__name__) for each in self._databases]
        for task in self._tasks:
            task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Run the calls in the queue, then stop and close the databases."""
        self._is_open = False
        for _ in self._tasks:
            self._queue.put_nowait(None)
        await asyncio.gather(*self._tasks)
        self._tasks = []
        for database in self._databases:
            await database.close()

    @abstractmethod
    async def _run(self, database: Database, calls: list[Call]) -> list[Any]:
        """Run the calls in one transaction. Return a result or a Failure for each; an exception fails all of them."""

    def _queued(self, call: Call) -> asyncio.Future[Any]:
        """Put a call into the queue, and return its future result."""
        if not self._is_open:
            raise StoreError(_CLOSED)
        self._queue.put_nowait(call)
        return call.result

    async def _work(self, database: Database) -> None:
        group: list[Call] = []
        try:
            while (first := await self._queue.get()) is not None:
                group = [first, *self._more()]
                group = [call for call in group if not call.result.cancelled()] or [first]
                try:
                    results = await self._run(database, group)
                except Exception as error:  # noqa: BLE001 - every caller gets it
                    results = [Failure(error)] * len(group)
                for call, result in zip(group, results, strict=True):
                    _settle(call, result)
        finally:
            _refuse(group)  # calls with a result keep it

    def _more(self) -> list[Call]:
        more: list[Call] = []
        while len(more) + 1 < self._max_group and not self._queue.empty():
            call = self._queue.get_nowait()
            if call is None:  # the end, after this group
                self._queue.put_nowait(None)
                break
            more.append(call)
        return more

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Refuse pending and later calls if the event loop is ending, or they would wait for ever."""
        if task.cancelled():
            self._is_open = False
            while not self._queue.empty():
                call = self._queue.get_nowait()
                _refuse([] if call is None else [call])


def _refuse(calls: Sequence[Call]) -> None:
    for call in calls:
        _settle(call, Failure(StoreError(_CLOSED)))


def _settle(call: Call, result: Any) -> None:
    if call.result.done():
        return
    if isinstance(result, Failure):
        call.result.set_exception(_store_error(result.error))
    else:
        call.result.set_result(result)


def _store_error(error: Exception) -> Exception:
    """Wrap errors of the database in a StoreError; return any other error as it is."""
    if not isinstance(error, SQLAlchemyError | OSError):
        return error
    wrapped = StoreFullError(_FULL) if _is_full(error) else StoreError(f"the request store failed: {error}; {_CHECK}")
    wrapped.__cause__ = error
    return wrapped


def _is_full(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in {errno.ENOSPC, errno.EDQUOT}
    cause = getattr(error, "orig", None)  # the driver's
    return getattr(cause, "sqlite_errorname", None) == "SQLITE_FULL" or getattr(cause, "sqlstate", None) == _DISK_FULL
