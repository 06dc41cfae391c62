"""A model's log, for people: what is there, what it cost, and its results. Nothing here is on a hot path."""

from sqlalchemy import Connection

from tinsmith.sql_store.statements import Query, query, total
from tinsmith.sql_store.subjects import models, runs
from tinsmith.store import LoggedOperation, LogTotals, RunLog

_PAYLOAD_BYTES = "coalesce(length(payloads.payload), 0)"
_RESULT_BYTES = "coalesce(length(results.result), 0)"
_WITH_CONTENT = (
    "FROM operations LEFT JOIN payloads ON payloads.operation_id = operations.id "
    "LEFT JOIN results ON results.operation_id = operations.id WHERE subject_id = :model"
)
_LIST = (
    "SELECT seq_id, request_id, kind, state, num_tokens, created_at, started_at, finished_at, attempts, interruptions, "
    f"{_PAYLOAD_BYTES} AS payload_bytes, {_RESULT_BYTES} AS result_bytes, result_kind, result {_WITH_CONTENT}"
)


def _seconds(start: str, end: str) -> str:
    return f"CAST({total(f'{end} - {start}')} AS DOUBLE PRECISION) / 1000000"


_TOTALS = Query(
    f"SELECT kind, state, count(*) AS number, {total('num_tokens')} AS num_tokens, "
    f"{total(_PAYLOAD_BYTES)} AS payload_bytes, {total(_RESULT_BYTES)} AS result_bytes, "
    f"{_seconds('created_at', 'started_at')} AS queued_s, {_seconds('started_at', 'finished_at')} AS run_s, "
    f"{total('CASE WHEN attempts > 1 OR interruptions > 0 THEN 1 ELSE 0 END')} AS retried "
    f"{_WITH_CONTENT} GROUP BY kind, state ORDER BY kind, state",
    LogTotals,
)


def run_log(connection: Connection, model_id: str) -> RunLog:
    run, points = runs.get(connection, model_id), models.recovery_points_of(connection, model_id)
    pruned_seq_id = runs.PRUNED.one(connection, model=model_id)
    return RunLog(run=run, pruned_seq_id=pruned_seq_id, recovery_points=tuple(points))


def list_log(connection: Connection, model_id: str, *, from_seq_id: int | None, limit: int) -> list[LoggedOperation]:
    values = {} if from_seq_id is None else {"first": from_seq_id}
    which = "ORDER BY seq_id DESC" if from_seq_id is None else "AND seq_id >= :first ORDER BY seq_id"
    found = query(f"{_LIST} {which} LIMIT :at_most", LoggedOperation)
    return sorted(found.all(connection, model=model_id, at_most=limit, **values), key=lambda each: each.seq_id)


def totals(connection: Connection, model_id: str) -> list[LogTotals]:
    return _TOTALS.all(connection, model=model_id)
