"""Running work on a database connection, without a word about which database it is.

Work is a synchronous function over a session, so that the same code runs where the driver is synchronous (SQLite, in a
thread of its own: a hop to another thread per statement would cost more than the statement) and where it is not
(PostgreSQL, over an AsyncSession's `run_sync`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Connection
from sqlmodel import Session

T = TypeVar("T")


class Database(ABC):
    """One connection, used by one task at a time. Creating it does no I/O."""

    @abstractmethod
    async def run(self, work: Callable[[Session], T]) -> T:
        """Run `work` in a transaction and commit it. Where it raises, nothing has changed."""

    @abstractmethod
    async def migrate(self, work: Callable[[Connection], None]) -> None:
        """The same, over a plain connection, in a transaction that may change the schema."""

    @abstractmethod
    async def close(self) -> None:
        """Give the connection back."""
