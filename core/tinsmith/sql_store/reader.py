"""Reading: a few connections, each of which answers whatever has queued up in one transaction."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from sqlmodel import Session

from tinsmith.sql_store.databases.database import Database
from tinsmith.sql_store.grouping import Failure, Grouping

_MAX_GROUP = 64

T = TypeVar("T")
_Read = Callable[[Session], Any]  # Any: reads of every result type share the queue


class Reader:
    """Everything that is asked of it sees what was committed before it was asked."""

    def __init__(self, databases: Sequence[Database]) -> None:
        self._databases = databases
        self._grouping: Grouping[_Read] = Grouping(
            *(partial(_answer, database) for database in databases), max_group=_MAX_GROUP
        )

    def open(self) -> None:
        self._grouping.open("sql-reader")

    async def close(self) -> None:
        """Answer what is queued, then stop."""
        await self._grouping.close()
        for database in self._databases:
            await database.close()

    async def read(self, run: Callable[[Session], T]) -> T:
        """Run a synchronous function that only reads."""
        result: T = await self._grouping.ask(run)
        return result


async def _answer(database: Database, reads: list[_Read]) -> list[Any]:
    def run(session: Session) -> list[Any]:
        return [_attempt(read, session, database) for read in reads]

    return await database.run(run)


def _attempt(read: _Read, session: Session, database: Database) -> Any:
    try:
        return read(session)
    except Exception as error:
        if database.spoils(error):
            raise
        return Failure(error)  # it belongs to the one who asked
