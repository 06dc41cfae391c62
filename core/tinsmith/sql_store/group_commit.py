"""Group commit: calls that arrive during one transaction share the next.

It knows neither tables nor subjects: what a write works on is made by `begin`, and finished by itself.
"""

import asyncio
import errno
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Concatenate, Final, Generic, ParamSpec, Protocol, Self, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError, InterfaceError, InternalError, OperationalError, SQLAlchemyError

from tinsmith.errors import StoreError, StoreFullError
from tinsmith.failpoints import durable_boundary
from tinsmith.figures import COMMIT_SECONDS, COMMIT_WRITES, Figures
from tinsmith.lasting import start_lasting
from tinsmith.sql_store.databases.database import Channel, Database

_CLOSED: Final = "the request store is closed"
_FULL: Final = (
    "the disk of the request store is full, so nothing of this was recorded; free space, then the same request succeeds"
)
_CHECK: Final = "check that its disk has free space and that no other program locks it"
_DISK_FULL: Final = "53100"  # the SQL state of PostgreSQL
_MAX_READS: Final = 64  # in one transaction
_MAX_WRITES: Final = 256
_MAX_TRIES: Final = 4

C = TypeVar("C")
P = ParamSpec("P")
T = TypeVar("T")


def locks(names: Callable[..., Iterable[str]]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Have a write lock what `names` returns, given the connection and the write's other arguments.

    If several processes can write at once, everything that a commit locks is locked first and in one order, so that no
    two commits wait for each other.
    """

    def mark(write: Callable[P, T]) -> Callable[P, T]:
        vars(write)["locks"] = names
        return write

    return mark


@dataclass(frozen=True, slots=True)
class Call:
    """A function to run in a transaction; its first argument is the transaction."""

    function: Callable[..., Any]  # Any, here and below: calls with results of every type share the queue
    args: tuple[Any, ...]
    options: dict[str, Any]
    result: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass(frozen=True, slots=True)
class Failure:
    """Takes the place of the result of a call that raised."""

    error: Exception


class Grouping(ABC, Generic[C]):
    """A queue of calls, and one task for each connection that takes groups from it and runs them."""

    def __init__(self, connections: Sequence[C], *, max_group: int, pause_s: float = 0.0) -> None:
        """`pause_s`: after a group, calls gather for this long. One that comes alone does not wait."""
        self._connections = connections
        self._max_group = max_group
        self._pause_s = pause_s
        self._queue: asyncio.Queue[Call | None] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._is_open = False

    def open(self) -> None:
        self._is_open = True
        name = type(self).__name__
        self._tasks = [start_lasting(partial(self._work, each), name=name, pause_s=0.0) for each in self._connections]
        for task in self._tasks:
            task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Run the calls in the queue, then stop."""
        self._is_open = False
        for _ in self._tasks:
            self._queue.put_nowait(None)
        await asyncio.gather(*self._tasks)
        self._tasks = []

    @abstractmethod
    async def _run(self, connection: C, calls: list[Call]) -> list[Any]:
        """Run the calls in one transaction. Return a result or a Failure for each; an exception fails all of them."""

    def ask(self, call: Call) -> asyncio.Future[Any]:
        """Put a call into the queue, and return its future result. Cancelling that does not undo a write."""
        if not self._is_open:
            raise StoreError(_CLOSED)
        self._queue.put_nowait(call)
        return call.result

    async def _work(self, connection: C) -> None:
        group: list[Call] = []
        try:
            while (first := await self._queue.get()) is not None:
                group = [first, *self._more()]
                group = [call for call in group if not call.result.cancelled()] or [first]
                try:
                    results = await self._run(connection, group)
                except Exception as error:  # noqa: BLE001 - every caller gets it
                    results = [Failure(error)] * len(group)
                for call, result in zip(group, results, strict=True):
                    _settle(call, result)
                if self._pause_s:
                    await asyncio.sleep(self._pause_s)
        except Exception as error:
            for call in group:
                _settle(call, Failure(error))  # those with a result keep it
            raise
        finally:
            _refuse(group)  # if this was cancelled

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


class Reader(Grouping[Database]):
    """A few connections. Each answers all waiting reads in one transaction.

    A read sees everything that was committed before it was asked for.
    """

    def __init__(self, databases: Sequence[Database]) -> None:
        super().__init__(databases, max_group=_MAX_READS)

    async def read(self, function: Callable[Concatenate[Connection, P], T], *args: P.args, **options: P.kwargs) -> T:
        """Run a synchronous function that only reads."""
        result: T = await self.ask(Call(function, args, options))
        return result

    async def _run(self, database: Database, calls: list[Call]) -> list[Any]:
        return await database.run(lambda connection: [_attempt(call, connection, database) for call in calls])


class Work(Protocol):
    """A transaction for writes, and a record of their changes."""

    def lock(self, names: Iterable[str]) -> None:
        """Lock what the writes change, in one order."""

    def add(self, other: Self) -> None:
        """Add what a write has changed that ran in a savepoint of its own."""

    def finish(self) -> list[str]:
        """Do what comes last in the transaction. Return the topics to tell after its commit."""


W = TypeVar("W", bound=Work)


class Writer(Grouping[Database], Generic[W]):
    """One connection, which runs writes in the order in which they arrive.

    A write that raises is undone alone; any may run twice.
    """

    def __init__(
        self, database: Database, wakeups: Channel, begin: Callable[[Connection, datetime], W], figures: Figures
    ) -> None:
        super().__init__([database], max_group=_MAX_WRITES)
        self._database = database
        self._wakeups = wakeups
        self._begin = begin
        self._figures = figures
        self.failed = False
        """Whether the database could not be written when it was written last."""

    async def write(self, function: Callable[Concatenate[W, P], T], *args: P.args, **options: P.kwargs) -> T:
        """Run a synchronous function in a transaction. Return its result once the transaction is committed.

        Cancelling the caller does not undo the write.
        """
        result: T = await self.ask(Call(function, args, options))
        return result

    async def scrub(self) -> None:
        """Remove deleted content from the database's files, if it can."""
        await self._database.scrub()

    async def _run(self, database: Database, calls: list[Call]) -> list[Any]:
        """Other processes are woken from the database's thread, so they do not wait for this one's event loop."""
        topics: list[str] = []
        started = time.perf_counter()

        def commit(connection: Connection) -> None:
            commit_durably(connection)
            self._wakeups.send(topics)

        try:
            results = await database.run(partial(self._run_group, calls, topics), commit=commit)
        except (OperationalError, InterfaceError, InternalError, OSError):
            self.failed = True
            raise
        self.failed = False
        self._figures.observe(COMMIT_SECONDS, time.perf_counter() - started)
        self._figures.observe(COMMIT_WRITES, len(calls))
        self._wakeups.wake(topics)
        return results

    def _run_group(self, calls: list[Call], topics: list[str], connection: Connection) -> list[Any]:
        """Run all writes without savepoints. If one raises, run them again, each in a savepoint of its own.

        Set `topics` to those to tell.
        """
        now = datetime.now(UTC)
        work = self._begin(connection, now)
        self._lock(calls, work, connection)
        try:
            results: list[Any] = []
            for call in calls:  # a comprehension would be one more frame in each traceback and profile
                results.append(call.function(work, *call.args, **call.options))  # noqa: PERF401
        except Exception as error:
            if len(calls) == 1 or self._database.spoils(error):
                raise
            connection.rollback()
            connection.begin()
            work = self._begin(connection, now)
            self._lock(calls, work, connection)
            results = [self._run_alone(call, work, connection, now) for call in calls]
        topics[:] = work.finish()
        self._wakeups.enlist(connection, topics)
        return results

    def _run_alone(self, call: Call, work: W, connection: Connection, now: datetime) -> Any:
        """If another process has just taken a unique key, a second try finds it taken."""
        tries = _MAX_TRIES if self._database.locks_rows else 1
        while True:
            tries -= 1
            own = self._begin(connection, now)
            try:
                with connection.begin_nested():
                    result = call.function(own, *call.args, **call.options)
            except Exception as error:
                if self._database.spoils(error):
                    raise
                if tries == 0 or not isinstance(error, IntegrityError):
                    return Failure(error)
            else:
                work.add(own)
                return result

    def _lock(self, calls: list[Call], work: W, connection: Connection) -> None:
        if self._database.locks_rows:
            asked = [(locked, call) for call in calls if (locked := getattr(call.function, "locks", None)) is not None]
            if names := {name for locked, call in asked for name in locked(connection, *call.args, **call.options)}:
                work.lock(names)


@durable_boundary("store.commit")
def commit_durably(connection: Connection) -> None:
    connection.commit()


def _attempt(call: Call, connection: Connection, database: Database) -> Any:
    try:
        return call.function(connection, *call.args, **call.options)
    except Exception as error:
        if database.spoils(error):
            raise
        return Failure(error)  # for this caller alone


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
    """Wrap errors of the database in a StoreError; return any other error unchanged."""
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
