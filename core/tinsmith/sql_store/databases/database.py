"""Running work on a database connection, without a word about which database it is.

Work is a synchronous function over a session, so that the same code runs where the driver is synchronous (SQLite, in a
thread of its own: a hop to another thread per statement would cost more than the statement) and where it need not be.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Connection
from sqlmodel import Session

T = TypeVar("T")


class Database(ABC):
    """One connection, used by one task at a time. Creating it does no I/O."""

    locks_rows = False
    """Whether others may write at the same time, so that what a write builds on has to be locked."""

    def spoils(self, error: Exception) -> bool:
        """Say whether an error ends the whole transaction, not only the statement that raised it."""
        del error
        return False

    @abstractmethod
    async def run(self, work: Callable[[Session], T], *, commit: Callable[[Session], None] = Session.commit) -> T:
        """Run `work` in a transaction and commit it. Where it raises, nothing has changed. It may be run twice."""

    @abstractmethod
    async def migrate(self, work: Callable[[Connection], None]) -> None:
        """The same, over a plain connection, in a transaction that may change the schema."""

    async def scrub(self, *, deleted: bool) -> None:
        """Have the files hold nothing that was deleted, as far as this database can.

        `deleted`: whether this process has deleted something since the last call.
        """
        del deleted

    @abstractmethod
    async def close(self) -> None:
        """Give the connection back."""
