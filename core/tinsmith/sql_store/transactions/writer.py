"""Group commit: one task per process and durability puts all waiting writes into one commit."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import sqlalchemy
from sqlalchemy import bindparam
from sqlalchemy.exc import IntegrityError, InterfaceError, InternalError, OperationalError
from sqlmodel import Session

from tinsmith.failpoints import durable_boundary
from tinsmith.sql_store.databases.database import Database
from tinsmith.sql_store.databases.wakeups import WakeUps
from tinsmith.sql_store.grouping import Call, Failure, Grouping, Models
from tinsmith.sql_store.tables import RUNS
from tinsmith.sql_store.transactions.finished_samples import Finished, announce
from tinsmith.sql_store.transactions.pending_work import PendingChanges

_MAX_GROUP: Final = 256
_MAX_TRIES: Final = 4

P = ParamSpec("P")
T = TypeVar("T")

_LOCK = (
    sqlalchemy.select(RUNS.c.model_id)
    .where(RUNS.c.model_id.in_(bindparam("models", expanding=True)))
    .order_by(RUNS.c.model_id)
    .with_for_update()
)


@dataclass(frozen=True, slots=True)
class Transaction:
    """What a write works on. It adds to `wake` the topics to tell after the commit, to `finished` the samples.

    What becomes pending or finishes is counted in `pending`.
    """

    session: Session
    now: datetime
    wake: list[str] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    pending: PendingChanges = field(default_factory=PendingChanges)


class Writer(Grouping):
    """Runs writes in the order in which they arrive. A write that raises is undone alone; any may run twice."""

    def __init__(self, database: Database, wakeups: WakeUps) -> None:
        super().__init__([database], max_group=_MAX_GROUP)
        self._database = database
        self._wakeups = wakeups
        self.failed = False
        """Whether the database could not be written when it was written last."""

    async def write(self, function: Callable[Concatenate[Transaction, P], T], *args: P.args, **options: P.kwargs) -> T:
        """Run a synchronous function in a transaction. Return its result once the transaction is committed.

        Cancelling the caller does not undo the write.
        """
        result: T = await self._queued(Call(function, args, options))
        return result

    async def write_locking(
        self, models: Models, function: Callable[Concatenate[Transaction, P], T], *args: P.args, **options: P.kwargs
    ) -> T:
        """Run a function as `write` does, after locking `models`: those whose logs it changes.

        If several processes can write at once, all models of a commit are locked first and in one order, so that no
        two commits wait for each other.
        """
        result: T = await self._queued(Call(function, args, options, models))
        return result

    async def scrub(self, *, deleted: bool) -> None:
        """Remove deleted content from the database's files. `deleted`: this process has just deleted something."""
        await self._database.scrub(deleted=deleted)

    async def _run(self, database: Database, calls: list[Call]) -> list[Any]:  # Any: results of every type
        """Other processes are woken from the database's thread, so they do not wait for this one's event loop."""
        topics: list[str] = []

        def work(session: Session) -> list[Any]:  # Any: as above
            results, topics[:] = self._run_group(calls, session)
            return results

        def commit(session: Session) -> None:
            _commit(session)
            self._wakeups.send(topics)

        try:
            results = await database.run(work, commit=commit)
        except (OperationalError, InterfaceError, InternalError, OSError):
            self.failed = True
            raise
        self.failed = False
        self._wakeups.wake(topics)
        return results

    def _run_group(self, calls: list[Call], session: Session) -> tuple[list[Any], list[str]]:  # Any: as above
        """Run all writes without savepoints. If one raises, run them again, each in a savepoint of its own.

        Return their results, and the topics to tell.
        """
        tx = Transaction(session, datetime.now(UTC))
        self._lock_models(calls, session)
        try:
            results = []
            for call in calls:
                results.append(call.function(tx, *call.args, **call.options))
                _forget_objects(session)
        except Exception as error:
            if len(calls) == 1 or self._database.spoils(error):
                raise
            session.rollback()
            tx = Transaction(session, tx.now)
            self._lock_models(calls, session)
            results = [self._run_alone(call, tx) for call in calls]
        topics = list(dict.fromkeys(tx.wake + announce(session, tx.finished, tx.now)))
        tx.pending.write(session)
        self._wakeups.enlist(session, topics)
        return results, topics

    def _run_alone(self, call: Call, tx: Transaction) -> Any:  # Any: as above
        """If another process has just taken a unique key, a second try finds it taken."""
        tries = _MAX_TRIES if self._database.locks_rows else 1
        while True:
            tries -= 1
            own = Transaction(tx.session, tx.now)
            try:
                with tx.session.begin_nested():
                    result = call.function(own, *call.args, **call.options)
                    _forget_objects(own.session)
            except Exception as error:
                if self._database.spoils(error):
                    raise
                if tries == 0 or not isinstance(error, IntegrityError):
                    return Failure(error)
            else:
                tx.wake.extend(own.wake)
                tx.finished.extend(own.finished)
                tx.pending.add(own.pending)
                return result

    def _lock_models(self, calls: list[Call], session: Session) -> None:
        if self._database.locks_rows:
            each = (call.models(session) if callable(call.models) else call.models for call in calls)
            if models := {model for models in each for model in models}:
                session.connection().execute(_LOCK, {"models": sorted(models)})


@durable_boundary("store.commit")
def _commit(session: Session) -> None:
    session.commit()


def _forget_objects(session: Session) -> None:
    """Leave no objects in the session: the next write may change their rows without it."""
    if session.in_transaction():  # else it has none
        session.flush()
        session.expunge_all()
