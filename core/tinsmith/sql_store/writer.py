"""Group commit: one task per process and durability, which puts everything that waits to be written into one commit."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

from sqlmodel import Session

from tinsmith.sql_store.database import Database
from tinsmith.sql_store.grouping import Failure, Grouping
from tinsmith.sql_store.wakeups import WakeUps

_MAX_GROUP = 256

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Transaction:
    """What a write works on. `wake` collects the topics to tell once it is committed."""

    session: Session
    now: datetime
    wake: list[str] = field(default_factory=list)


_Write = Callable[[Transaction], Any]  # Any: writes of every result type share the queue


class Writer:
    """Runs writes in the order in which they were asked for. One that raises is undone alone; any may run twice."""

    def __init__(self, database: Database, wakeups: WakeUps) -> None:
        self._database = database
        self._wakeups = wakeups
        self._grouping: Grouping[_Write] = Grouping(self._commit, max_group=_MAX_GROUP)

    def open(self) -> None:
        self._grouping.open("sql-writer")

    async def close(self) -> None:
        """Write what is queued, then stop."""
        await self._grouping.close()
        await self._database.close()

    async def write(self, run: Callable[[Transaction], T]) -> T:
        """Run a synchronous function in a transaction; return its result once that is committed.

        A caller that is cancelled while it waits does not undo the write.
        """
        result: T = await self._grouping.ask(run)
        return result

    async def _commit(self, writes: list[_Write]) -> list[Any]:  # Any: results of every type
        results, wake = await self._database.run(partial(_run_group, writes))
        self._wakeups.tell(wake)
        return results


def _run_group(writes: list[_Write], session: Session) -> tuple[list[Any], list[str]]:
    """Run all writes, as a rule without savepoints; where one raises, again with one each."""
    now = datetime.now(UTC)
    wake: list[str] = []
    try:
        results = [_run_one(write, Transaction(session, now, wake)) for write in writes]
    except Exception:
        if len(writes) == 1:
            raise
        session.rollback()
    else:
        return results, wake
    wake, results = [], []
    for write in writes:
        transaction = Transaction(session, now)
        try:
            with session.begin_nested():
                results.append(_run_one(write, transaction))
        except Exception as error:  # noqa: BLE001 - it belongs to the one who asked, and to nobody else
            results.append(Failure(error))
        else:
            wake.extend(transaction.wake)
    return results, wake


def _run_one(write: _Write, transaction: Transaction) -> Any:  # Any: as above
    """Leave no objects behind: the next write changes rows beside the session."""
    result = write(transaction)
    transaction.session.flush()
    transaction.session.expunge_all()
    return result
