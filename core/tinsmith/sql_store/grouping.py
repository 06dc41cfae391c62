"""Answering many callers at once: what has queued up while one group was worked on becomes the next group."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from tinsmith.errors import StoreError

_CLOSED: Final = "the request store is closed"

Q = TypeVar("Q")


@dataclass(frozen=True, slots=True)
class Failure:
    """In place of a result: what one question of a group raised."""

    error: Exception


@dataclass(frozen=True, slots=True)
class _Asked(Generic[Q]):
    question: Q
    future: asyncio.Future[Any]  # Any: results of every type


class Grouping(Generic[Q]):
    """Several may share one queue: `answer` functions run at the same time then, each on its own group."""

    def __init__(self, *answers: Callable[[list[Q]], Awaitable[list[Any]]], max_group: int) -> None:
        """`answers` return one result, or Failure, per question; what they raise is every question's."""
        self._answers = answers
        self._max_group = max_group
        self._queue: asyncio.Queue[_Asked[Q] | None] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._is_open = False

    def open(self, name: str) -> None:
        self._is_open = True
        self._tasks = [asyncio.create_task(self._work(answer), name=name) for answer in self._answers]
        for task in self._tasks:
            task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Answer what is queued, then stop."""
        self._is_open = False
        for _ in self._tasks:
            self._queue.put_nowait(None)
        await asyncio.gather(*self._tasks)
        self._tasks = []

    async def ask(self, question: Q) -> Any:  # Any: results of every type
        if not self._is_open:
            raise StoreError(_CLOSED)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(_Asked(question, future))
        return await future

    async def _work(self, answer: Callable[[list[Q]], Awaitable[list[Any]]]) -> None:
        group: list[_Asked[Q]] = []
        try:
            while (first := await self._queue.get()) is not None:
                group = [first, *self._more()]
                group = [asked for asked in group if not asked.future.cancelled()] or [first]
                try:
                    results = await answer([asked.question for asked in group])
                except Exception as error:  # noqa: BLE001 - it is told to everybody who asked
                    results = [Failure(error)] * len(group)
                for asked, result in zip(group, results, strict=True):
                    _settle(asked.future, result)
        finally:
            _refuse(group)  # those that have been answered stay so

    def _ended(self, task: asyncio.Task[None]) -> None:
        """The event loop ends: who asks while it does must not wait for ever."""
        if task.cancelled():
            self._is_open = False
            while not self._queue.empty():
                asked = self._queue.get_nowait()
                _refuse([] if asked is None else [asked])

    def _more(self) -> list[_Asked[Q]]:
        more: list[_Asked[Q]] = []
        while len(more) + 1 < self._max_group and not self._queue.empty():
            asked = self._queue.get_nowait()
            if asked is None:  # the end, for after this group
                self._queue.put_nowait(None)
                break
            more.append(asked)
        return more


def _refuse(group: Sequence[_Asked[Any]]) -> None:
    for asked in group:
        _settle(asked.future, Failure(StoreError(_CLOSED)))


def _settle(future: asyncio.Future[Any], result: Any) -> None:
    if future.done():
        return
    if isinstance(result, Failure):
        future.set_exception(_store_error(result.error))
    else:
        future.set_result(result)


def _store_error(error: Exception) -> Exception:
    """Turn what the database raised into a StoreError, and leave everything else as it is."""
    if not isinstance(error, SQLAlchemyError | OSError):
        return error
    wrapped = StoreError(f"the request store failed: {error}; see that its disk has space and is not locked")
    wrapped.__cause__ = error
    return wrapped
