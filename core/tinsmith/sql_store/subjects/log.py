"""The log's rows: finding, finishing and counting operations. The other modules build on these."""

import asyncio
import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields
from typing import Any, Final

import sqlalchemy
from sqlalchemy import Connection, bindparam, func
from sqlmodel import Session, col, select

from tinsmith.errors import NotFoundError, ResultExpiredError, StoreError
from tinsmith.operations import Failed, Result
from tinsmith.sql_store.prepared import Prepared
from tinsmith.sql_store.subjects.finished_samples import Finished
from tinsmith.sql_store.subjects.request_ids import created_at
from tinsmith.sql_store.subjects.transaction import Connections, Transaction
from tinsmith.sql_store.tables import (
    OPERATIONS,
    RESULTS,
    OperationRow,
    ResultRow,
    RetentionRow,
    RunRow,
)
from tinsmith.store import OperationRecord, OperationState, RunState
from tinsmith.store.codec import encode_result

SMALL_BYTES: Final = 1 << 14
"""Larger results are read by a reader."""
RECORD_COLUMNS = tuple(
    OPERATIONS.c[field.name]
    for field in fields(OperationRecord)
    if field.name not in {"payload", "result_kind", "result"}
)
_FIND = (
    sqlalchemy.select(*RECORD_COLUMNS, RESULTS.c.result_kind, RESULTS.c.result)
    .join_from(OPERATIONS, RESULTS, OPERATIONS.c.id == RESULTS.c.operation_id, isouter=True)
    .where(OPERATIONS.c.request_id == bindparam("request_id"))
)
_GET = Prepared(_FIND)
_GLANCE = Prepared(_FIND.where(func.coalesce(func.length(RESULTS.c.result), 0) <= SMALL_BYTES))
_ADVISORY_LOCK = sqlalchemy.text("SELECT pg_advisory_xact_lock(hashtextextended(:what, 0))")
PART: Final = 500  # values of one IN list
COUNTED = (
    OPERATIONS.c.id,
    OPERATIONS.c.request_id,
    OPERATIONS.c.tenant,
    OPERATIONS.c.kind,
    OPERATIONS.c.payload_bytes,
)
_PENDING_OF = (
    sqlalchemy.select(*COUNTED)
    .where(
        OPERATIONS.c.subject_id == bindparam("model"),
        OPERATIONS.c.state.in_((OperationState.QUEUED, OperationState.RUNNING)),
    )
    .order_by(OPERATIONS.c.seq_id)
)
_FAIL = (
    OPERATIONS.update()
    .where(OPERATIONS.c.id.in_(bindparam("ids", expanding=True)))
    .values(state=OperationState.FAILED, finished_at=bindparam("now"))
)
_INSERT_RESULT = RESULTS.insert()
FINISHED = (OperationState.SUCCEEDED, OperationState.FAILED, OperationState.CANCELLED)
LIVE = (RunState.CREATING, RunState.READY)
_DONE = "done "

_log = logging.getLogger(__name__)


def work_topic(base_model: str) -> str:
    return f"work {base_model}"


def places_topic(base_model: str) -> str:
    """Told when a place for a model may have become free, and when a model begins to wait for one."""
    return f"places {base_model}"


def done_topic(request_id: str) -> str:
    return _DONE + request_id


def request_of(topic: str) -> str | None:
    """Return the request_id of a `done_topic`, None for any other."""
    return topic.removeprefix(_DONE) if topic.startswith(_DONE) else None


async def sweep(connections: Connections, every_s: float) -> None:
    """Now and then, wake calls that could have missed a wake-up."""
    while True:
        await asyncio.sleep(every_s)
        topics = connections.wakeups.topics()
        waited_for = [request_id for topic in topics if (request_id := request_of(topic)) is not None]
        try:
            done = await connections.reader.read(finished, waited_for) if waited_for else []
        except StoreError:
            _log.exception("the database could not be read; trying again in %s s", every_s)
            continue
        connections.wakeups.wake(done_topic(request_id) for request_id in done)
        connections.wakeups.wake(topic for topic in topics if request_of(topic) is None)


def get(session: Session, request_id: str) -> OperationRecord:
    found = _GET.first(session.connection(), {"request_id": request_id})
    if found is None:
        raise _missing(session, request_id)
    return OperationRecord(**found._asdict())


def glance(connection: Connection, request_id: str) -> OperationRecord | None:
    """Return the operation as `get` does, unless it does not exist or its result is large."""
    found = _GLANCE.first(connection, {"request_id": request_id})
    return None if found is None else OperationRecord(**found._asdict())


def find(session: Session, request_id: str, *, lock: bool = False) -> OperationRow:
    query = select(OperationRow).where(OperationRow.request_id == request_id)
    row = session.exec(query.with_for_update() if lock else query).first()
    if row is None:
        raise _missing(session, request_id)
    return row


def finished(session: Session, request_ids: Collection[str]) -> list[str]:
    """Return those that are finished or no longer exist."""
    asked = sorted(request_ids)
    pending: set[str] = set()
    for start in range(0, len(asked), 500):
        part = asked[start : start + 500]
        query = select(OperationRow.request_id).where(
            col(OperationRow.request_id).in_(part), col(OperationRow.state).not_in(FINISHED)
        )
        pending.update(session.exec(query))
    return [request_id for request_id in asked if request_id not in pending]


def finish(tx: Transaction, rows: Iterable[OperationRow], result: Result, state: OperationState | None = None) -> None:
    """Record one result for operations that were queued or running, and wake the calls that wait for them."""
    kind, encoded = encode_result(result)
    succeeded_or_failed = OperationState.FAILED if isinstance(result, Failed) else OperationState.SUCCEEDED
    for row in rows:
        assert row.id is not None
        tx.pending.finished([row], result_bytes=len(encoded))
        row.state = state or succeeded_or_failed
        row.finished_at = tx.now
        tx.session.add(ResultRow(operation_id=row.id, result_kind=kind, result=encoded))
        tx.wake.append(done_topic(row.request_id))
        if not row.ordered:
            succeeded = row.state == OperationState.SUCCEEDED
            tx.finished.append(Finished(row.subject_id, row.seq_id, row.request_id, succeeded, len(encoded)))


def fail_pending(tx: Transaction, model_id: str, failed: Failed) -> None:
    """Fail everything that a model has queued or running."""
    tx.session.flush()
    rows = tx.session.connection().execute(_PENDING_OF, {"model": model_id}).all()
    for start in range(0, len(rows), PART):
        fail(tx, rows[start : start + PART], failed)
    tx.session.expire_all()


def fail(tx: Transaction, operations: Sequence[sqlalchemy.Row[*tuple[Any, ...]]], failed: Failed) -> None:
    """Record one failure for at most PART operations, given their COUNTED columns. Wake who waits for them.

    The caller notes which of them are finished samples.

    In two statements, because thousands may fail at once.
    """
    if not operations:
        return
    kind, encoded = encode_result(failed)
    connection = tx.session.connection()
    connection.execute(_FAIL, {"ids": [row.id for row in operations], "now": tx.now})
    results = [{"operation_id": row.id, "result_kind": kind, "result": encoded} for row in operations]
    connection.execute(_INSERT_RESULT, results)
    tx.pending.finished(operations, result_bytes=len(encoded))
    tx.wake.extend(done_topic(row.request_id) for row in operations)


def locked_run(session: Session, model_id: str) -> RunRow | None:
    """Lock the model's row for this transaction. Every change of a model's log starts with it."""
    return session.exec(select(RunRow).where(RunRow.model_id == model_id).with_for_update()).first()


def one_at_a_time(session: Session, what: str) -> None:
    """Exclude other processes that do the same, for the rest of the transaction."""
    if locks_rows(session):
        session.connection().execute(_ADVISORY_LOCK, {"what": f"tinsmith {what}"})


def locks_rows(session: Session) -> bool:
    """Return whether other processes may write at the same time. SQLite has one writer."""
    return session.connection().dialect.name == "postgresql"


def _missing(session: Session, request_id: str) -> NotFoundError | ResultExpiredError:
    made_at = created_at(request_id)
    retention = session.get(RetentionRow, 1)
    if made_at is not None and retention is not None and made_at < retention.finished_before:
        return ResultExpiredError(f"the result of request {request_id!r} is past its retention; send the request again")
    return NotFoundError(f"no request {request_id!r}")
