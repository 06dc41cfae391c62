"""Reading: a few connections, each of which answers all waiting reads in one transaction."""

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from sqlmodel import Session

from tinsmith.sql_store.databases.database import Database
from tinsmith.sql_store.grouping import Call, Failure, Grouping

_MAX_GROUP: Final = 64

P = ParamSpec("P")
T = TypeVar("T")


class Reader(Grouping):
    """A read sees everything that was committed before it was asked for."""

    def __init__(self, databases: Sequence[Database]) -> None:
        super().__init__(databases, max_group=_MAX_GROUP)

    async def read(self, function: Callable[Concatenate[Session, P], T], *args: P.args, **options: P.kwargs) -> T:
        """Run a synchronous function that only reads."""
        result: T = await self._queued(Call(function, args, options))
        return result

    async def _run(self, database: Database, calls: list[Call]) -> list[Any]:  # Any: results of every type
        return await database.run(lambda session: [_attempt(call, session, database) for call in calls])


def _attempt(call: Call, session: Session, database: Database) -> Any:  # Any: as above
    try:
        return call.function(session, *call.args, **call.options)
    except Exception as error:
        if database.spoils(error):
            raise
        return Failure(error)  # for this caller alone
