"""What differs between databases: connections, durability, and the channel for wake-ups.

Work is a synchronous function over a connection, and runs in the connection's own thread: a hop to another thread for
each statement would cost more than the statement itself.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

from sqlalchemy import Connection, Engine

from tinsmith.store.wakeups import WakeUps

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Dialect(ABC):
    """One database. Creating it does no I/O."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The database's name in messages, without a password."""

    @abstractmethod
    def visitor(self) -> Engine | None:
        """Return what connects without changing or waiting for anything; None if the database is yet to be made.

        Raise ConfigError if it can never be used.
        """

    @abstractmethod
    def version(self, connection: Connection) -> str:
        """Return the database's name and version."""

    @abstractmethod
    def reader(self) -> "Database":
        """Make a connection for reading."""

    def glances(self) -> Connection | None:
        """Open a connection whose reads of a few rows never wait, so that they need no thread; None if they may."""
        return None

    @abstractmethod
    def writer(self, *, durable: bool) -> "Database":
        """Make a connection whose commits are durable, or else only visible to every process at once.

        A durable commit also makes every commit before it durable. A commit that is not durable may be lost only
        together with every process that has seen it.
        """

    @abstractmethod
    def wakeups(self) -> "Channel":
        """Make the channel to the other processes on this database."""


def _commit(connection: Connection) -> None:
    connection.commit()


class Database(ABC):
    """One connection and its thread, used by one task at a time. Creating it does no I/O."""

    locks_rows = False
    """Whether other processes may write at the same time, so that rows must be locked before they are changed."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=engine.dialect.name)

    def run(
        self, work: Callable[[Connection], T], *, commit: Callable[[Connection], None] = _commit
    ) -> asyncio.Future[T]:
        """Run `work` in a transaction and commit it. If it raises, nothing has changed. It may run twice."""
        return asyncio.get_running_loop().run_in_executor(self._thread, self._transact, work, commit)

    async def migrate(self, work: Callable[[Connection], None]) -> None:
        """Run `work` over a plain connection, in a transaction that may change the schema."""
        await self._in_thread(self._migrate, work)

    async def close(self) -> None:
        """Close the connection, and end its thread."""
        await self._in_thread(self._engine.dispose)
        self._thread.shutdown()

    def spoils(self, error: Exception) -> bool:
        """Return whether an error ends the whole transaction, not only the statement that raised it."""
        del error
        return False

    async def scrub(self) -> None:
        """Remove deleted content from the files, if this database can do so beside its work."""

    @abstractmethod
    def _transact(self, work: Callable[[Connection], T], commit: Callable[[Connection], None]) -> T:
        """Do what `run` promises, in the connection's thread."""

    @abstractmethod
    def _migrate(self, work: Callable[[Connection], None]) -> None:
        """Do what `migrate` promises, in the connection's thread."""

    async def _in_thread(self, call: Callable[[*Ts], T], *args: *Ts) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *args)


class Channel(WakeUps, ABC):
    """Wakes calls in this process, and in the other processes on the database."""

    def enlist(self, connection: Connection, topics: list[str]) -> None:
        """Have the transaction itself tell the other processes when it commits, if the database can do that."""

    @abstractmethod
    async def open(self) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    def send(self, topics: Sequence[str]) -> None:
        """Wake the calls that wait in other processes, after the commit. From any thread; does not block.

        Messages that cannot be sent at once are dropped.
        """
