"""The log's rows: finding and finishing operations, and windows. The other modules build on these.

A window is the operations that a model has run since its pending gradient was cleared.
"""

import asyncio
import logging
from collections.abc import Collection, Sequence
from dataclasses import fields
from datetime import datetime
from typing import Final, NamedTuple

from sqlalchemy import Connection

from tinsmith.errors import NotFoundError, ResultExpiredError, StoreError
from tinsmith.operations import Failed, Result
from tinsmith.sql_store.connections import Connections
from tinsmith.sql_store.statements import Change, Query, chunks, insert_into
from tinsmith.sql_store.transaction import Sums, Transaction
from tinsmith.store import CLEARING, PASS, FailedPass, FinishedSample, OperationRecord, OperationState
from tinsmith.store.codec import decode_result, encode_result
from tinsmith.store.refusals import no_request
from tinsmith.store.wakeups import done_topic, request_of

SMALL_BYTES: Final = 1 << 14
"""Larger results are read by a reader."""
RECORD: Final = ", ".join(
    f"operations.{each.name}"
    for each in fields(OperationRecord)
    if each.name not in {"payload", "result_kind", "result"}
)
"""The columns of a record, but for its contents."""

PENDING: Final = Sums("pending_work", "number", "num_bytes", "stored_bytes", key=("tenant", "kind", "finished"))
"""How much each tenant has queued or running: the difference of what has arrived and what has finished.

They are counted in rows of their own, because servers do the one and engines the other: they need not wait for each
other. The last column is how much the log grows by payloads and results, or shrinks.
"""


class Operation(NamedTuple):
    """An operation's row, without its content."""

    id: int
    request_id: str
    tenant: str
    kind: str
    payload_bytes: int
    base_model: str
    subject_id: str
    seq_id: int
    ordered: bool
    arrival: int
    state: OperationState
    attempts: int
    interruptions: int


class Ended(NamedTuple):
    """An operation that was queued or running, and its end. `result` is encoded."""

    operation: Operation
    state: OperationState
    result_kind: str
    result: bytes
    ran_at: datetime | None = None
    run_s: float | None = None
    first_token_s: float | None = None


class _FailedPass(NamedTuple):
    seq_id: int
    request_id: str
    result_kind: str
    result: bytes


_GET = Query(
    f"SELECT {RECORD}, results.result_kind, results.result FROM operations "
    "LEFT JOIN results ON results.operation_id = operations.id WHERE operations.request_id = :request_id",
    OperationRecord,
)
_GLANCE = Query(f"{_GET.text} AND coalesce(length(results.result), 0) <= {SMALL_BYTES}", OperationRecord)
OPERATION: Final = "SELECT FIELDS FROM operations"
_FIND = Query(f"{OPERATION} WHERE request_id = :request_id", Operation)
_LOCK = Query(f"{OPERATION} WHERE request_id = :request_id FOR UPDATE", Operation)
_UNFINISHED = Query(
    "SELECT request_id FROM operations WHERE request_id IN :request_ids AND state IN ('queued', 'running')", str
)
_PENDING_OF = Query(
    f"{OPERATION} WHERE subject_id = :model AND state IN ('queued', 'running') ORDER BY seq_id", Operation
)
_END = "UPDATE operations SET state = :state, finished_at = :now WHERE id"
_FINISH, _FINISH_MANY = Change(f"{_END} = :key"), Change(f"{_END} IN :ids")
_CONTENT: Final = ("result_kind", "result", "ran_at", "run_s", "first_token_s")
_INSERT_RESULT = Change(insert_into("results", "operation_id", *_CONTENT))
_ADVISORY_LOCK = Change("SELECT pg_advisory_xact_lock(hashtextextended(:what, 0))")
_REMOVED = Query("SELECT finished_before FROM retention", datetime)

# or an operation that was failed behind a gap, which may have been a pass
_FAILED_PASS = f"operations.state = 'failed' AND (operations.kind = '{PASS}' OR operations.early)"
_CLEARED = f"operations.kind IN ({', '.join(map(repr, CLEARING))}) AND operations.state = 'succeeded'"
_LAST_CLEARING = Query(
    f"SELECT seq_id FROM operations WHERE subject_id = :model AND seq_id < :before AND {_CLEARED} "
    "ORDER BY seq_id DESC LIMIT 1",
    int,
)
_FIRST_FAILED = Query(
    "SELECT FIELDS FROM operations JOIN results ON results.operation_id = operations.id "
    f"WHERE subject_id = :model AND seq_id < :before AND seq_id > :after AND {_FAILED_PASS} ORDER BY seq_id LIMIT 1",
    _FailedPass,
)
IS_DONE_WITH: Final = (
    f"(NOT ({_FAILED_PASS}) OR EXISTS (SELECT 1 FROM operations AS later "
    "WHERE later.subject_id = operations.subject_id "
    f"AND later.seq_id > operations.seq_id AND {_CLEARED.replace('operations.', 'later.')}))"
)
"""No step depends on an operation any more, for all that it is a pass that failed."""

_log = logging.getLogger(__name__)


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


def get(connection: Connection, request_id: str) -> OperationRecord:
    found = _GET.first(connection, request_id=request_id)
    if found is None:
        raise _missing(connection, request_id)
    return found


def glance(connection: Connection, request_id: str) -> OperationRecord | None:
    """Return the operation as `get` does, unless it does not exist or its result is large."""
    return _GLANCE.first(connection, request_id=request_id)


def find(connection: Connection, request_id: str, *, lock: bool = False) -> Operation:
    found = (_LOCK if lock else _FIND).first(connection, request_id=request_id)
    if found is None:
        raise _missing(connection, request_id)
    return found


def finished(connection: Connection, request_ids: Collection[str]) -> list[str]:
    """Return those that are finished or no longer exist."""
    asked = sorted(request_ids)
    pending = {each for chunk in chunks(asked) for each in _UNFINISHED.all(connection, request_ids=chunk)}
    return [request_id for request_id in asked if request_id not in pending]


def finish(tx: Transaction, operation: Operation, result: Result, state: OperationState | None = None) -> None:
    """Record the result of an operation."""
    if state is None:
        state = OperationState.FAILED if isinstance(result, Failed) else OperationState.SUCCEEDED
    finish_many(tx, [Ended(operation, state, *encode_result(result))])


def fail(tx: Transaction, operations: Sequence[Operation], failed: Failed) -> None:
    """Record one failure for at most CHUNK operations."""
    kind, encoded = encode_result(failed)
    finish_many(tx, [Ended(each, OperationState.FAILED, kind, encoded) for each in operations])


def fail_pending(tx: Transaction, model_id: str, failed: Failed) -> None:
    """Fail everything that a model has queued or running."""
    for chunk in chunks(_PENDING_OF.all(tx.connection, model=model_id)):
        fail(tx, chunk, failed)


def finish_many(tx: Transaction, ended: Sequence[Ended]) -> None:
    """Record results of at most CHUNK operations, and wake who waits for them.

    In two statements if all end alike, because thousands may fail at once.
    """
    ids: dict[OperationState, list[int]] = {}
    for each in ended:
        operation, size = each.operation, len(each.result)
        ids.setdefault(each.state, []).append(operation.id)
        tx.count(PENDING, (operation.tenant, operation.kind, True), 1, operation.payload_bytes, size)
        tx.wake.append(done_topic(operation.request_id))
        if not operation.ordered:
            succeeded = each.state == OperationState.SUCCEEDED
            notice = FinishedSample(request_id=operation.request_id, succeeded=succeeded, size_bytes=size)
            tx.finished[operation.subject_id, operation.seq_id // FinishedSample.SEQ_IDS_PER_CLONE].append(notice)
    for state, of_state in ids.items():
        if len(of_state) == 1:  # psycopg takes longer to pass a list of one than for all the rest
            _FINISH.run(tx.connection, key=of_state[0], state=state, now=tx.now)
        else:
            _FINISH_MANY.run(tx.connection, ids=of_state, state=state, now=tx.now)
    results = [
        {"operation_id": each.operation.id, **{name: getattr(each, name) for name in _CONTENT}} for each in ended
    ]
    _INSERT_RESULT.run_each(tx.connection, results)


def one_at_a_time(connection: Connection, what: str) -> None:
    """Exclude other processes that do the same, for the rest of the transaction."""
    if locks_rows(connection):
        _ADVISORY_LOCK.run(connection, what=f"tinsmith {what}")


def locks_rows(connection: Connection) -> bool:
    """Return whether other processes may write at the same time. SQLite has one writer."""
    return connection.dialect.name == "postgresql"


def _missing(connection: Connection, request_id: str) -> NotFoundError | ResultExpiredError:
    return no_request(request_id, _REMOVED.first(connection))


def failed_pass(
    connection: Connection, model_id: str, *, after_seq_id: int | None, before_seq_id: int
) -> FailedPass | None:
    after = after_seq_id
    if after is None:
        after = _LAST_CLEARING.first(connection, model=model_id, before=before_seq_id)
    row = _FIRST_FAILED.first(connection, model=model_id, before=before_seq_id, after=-1 if after is None else after)
    if row is None:
        return None
    failure = decode_result(row.result_kind, row.result)
    assert isinstance(failure, Failed)
    return FailedPass(seq_id=row.seq_id, request_id=row.request_id, failure=failure)
