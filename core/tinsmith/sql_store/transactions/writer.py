"""Group commit: one task per process and durability, which puts everything that waits to be written into one commit."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

import sqlalchemy
from sqlalchemy import bindparam
from sqlalchemy.exc import IntegrityError
from sqlmodel import Session

from tinsmith.failpoints import durable_boundary
from tinsmith.sql_store.databases.database import Database
from tinsmith.sql_store.databases.wakeups import WakeUps
from tinsmith.sql_store.grouping import Failure, Grouping
from tinsmith.sql_store.tables import RUNS
from tinsmith.sql_store.transactions.finished_samples import Finished, announce

_MAX_GROUP = 256
_MAX_LOOKS = 4

T = TypeVar("T")

_LOCK = (
    sqlalchemy.select(RUNS.c.model_id)
    .where(RUNS.c.model_id.in_(bindparam("models", expanding=True)))
    .order_by(RUNS.c.model_id)
    .with_for_update()
)


@dataclass(frozen=True, slots=True)
class Transaction:
    """What a write works on. `wake` collects the topics to tell once it is committed, `finished` the samples."""

    session: Session
    now: datetime
    wake: list[str] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Write:
    run: Callable[[Transaction], Any]  # Any: writes of every result type share the queue
    models: Callable[[Session], Iterable[str]] | None


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

    async def write(
        self, run: Callable[[Transaction], T], *, models: Callable[[Session], Iterable[str]] | None = None
    ) -> T:
        """Run a synchronous function in a transaction; return its result once that is committed.

        `models` are those whose logs it changes: a database that writes for several at once locks those of a whole
        commit first, in one order, so that no two wait for each other. A caller that is cancelled while it waits does
        not undo the write.
        """
        result: T = await self._grouping.ask(_Write(run, models))
        return result

    async def scrub(self, *, deleted: bool) -> None:
        """Have the database's files hold nothing that was deleted, by this process where it says so."""
        await self._database.scrub(deleted=deleted)

    async def _commit(self, writes: list[_Write]) -> list[Any]:  # Any: results of every type
        results, wake = await self._database.run(partial(self._run_group, writes), commit=_commit)
        self._wakeups.tell(wake)
        return results

    def _run_group(self, writes: list[_Write], session: Session) -> tuple[list[Any], list[str]]:
        """Run all writes, as a rule without savepoints; where one raises, again with one each."""
        now = datetime.now(UTC)
        wake: list[str] = []
        finished: list[Finished] = []
        self._lock_models(writes, session)
        try:
            results = [_run_one(write, Transaction(session, now, wake, finished)) for write in writes]
        except Exception as error:
            if len(writes) == 1 or self._database.spoils(error):
                raise
            session.rollback()
            self._lock_models(writes, session)
            results, wake, finished = self._run_one_by_one(writes, session, now)
        wake += announce(session, finished, now)
        self._wakeups.enlist(session, wake)
        return results, wake

    def _run_one_by_one(
        self, writes: list[_Write], session: Session, now: datetime
    ) -> tuple[list[Any], list[str], list[Finished]]:  # Any: as above
        results: list[Any] = []  # Any: as above
        wake: list[str] = []
        finished: list[Finished] = []
        for write in writes:
            try:
                result, transaction = self._run_alone(write, session, now)
            except Exception as error:
                if self._database.spoils(error):
                    raise
                results.append(Failure(error))
            else:
                results.append(result)
                wake.extend(transaction.wake)
                finished.extend(transaction.finished)
        return results, wake, finished

    def _run_alone(self, write: _Write, session: Session, now: datetime) -> tuple[Any, Transaction]:  # Any: as above
        """Where another process took a unique key at this very moment, a second look finds it taken."""
        looks = _MAX_LOOKS if self._database.locks_rows else 1
        while True:
            transaction = Transaction(session, now)
            looks -= 1
            try:
                with session.begin_nested():
                    return _run_one(write, transaction), transaction
            except IntegrityError:
                if looks == 0:
                    raise

    def _lock_models(self, writes: list[_Write], session: Session) -> None:
        if self._database.locks_rows:
            models = {model for write in writes if write.models is not None for model in write.models(session)}
            if models:
                session.connection().execute(_LOCK, {"models": sorted(models)})


@durable_boundary("store.commit")
def _commit(session: Session) -> None:
    session.commit()


def _run_one(write: _Write, transaction: Transaction) -> Any:  # Any: as above
    """Leave no objects behind: the next write changes rows beside the session."""
    result = write.run(transaction)
    transaction.session.flush()
    transaction.session.expunge_all()
    return result
