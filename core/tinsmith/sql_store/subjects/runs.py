"""Models, which the REST API calls training runs: their creation, their loss, and their log."""

from dataclasses import replace
from datetime import datetime

from sqlalchemy import Connection

from tinsmith.operations import Failed
from tinsmith.sql_store.group_commit import locks
from tinsmith.sql_store.statements import Change, Query, fields_of, insert_into, query, total, values_of, wanted
from tinsmith.sql_store.subjects import engines, log, models, origins, submitting
from tinsmith.sql_store.subjects.models import Run
from tinsmith.sql_store.transaction import Transaction
from tinsmith.store import (
    Lease,
    LoggedOperation,
    LogTotals,
    NewOperation,
    Origin,
    RunLog,
    RunRecord,
    RunState,
    TimedOperation,
)
from tinsmith.store.refusals import described_bytes, lost, missing, refuse_large_metadata
from tinsmith.store.wakeups import places_topic

_GET = Query("SELECT FIELDS FROM runs WHERE model_id = :model", RunRecord)
PRUNED = Query("SELECT pruned_seq_id FROM runs WHERE model_id = :model", int)
_COLUMNS = (*fields_of(RunRecord), "arrived_seq_id", "pruned_seq_id", "rebuilds", "described_bytes")
_INSERT = Change(insert_into("runs", *_COLUMNS))
_INSERT_UNLOADED = Change(insert_into("runs", *_COLUMNS, "unload_seq_id"))
NUM_LIVE = Query(f"SELECT count(*) FROM runs WHERE tenant = :tenant AND {models.IS_LIVE}", int)


@locks(lambda _, run, _operation: [run.model_id])
def create(tx: Transaction, run: RunRecord, operation: NewOperation) -> str:
    refuse_large_metadata(run.user_metadata)
    if models.find(tx.connection, run.model_id) is None:
        submitting.refuse_ended_session(tx.connection, run.session_id, lock=True)
        _INSERT.run(tx.connection, **values_of(run), **_beside(run))
        tx.wake.append(places_topic(run.base_model))
    return submitting.submit(tx, operation)


def add_unloaded(tx: Transaction, run: RunRecord, origin: Origin | None = None) -> RunRecord:
    """Its UnloadModel counts as queued, so all operations are refused."""
    first = _GET.first(tx.connection, model=run.model_id)
    if first is not None:
        return first
    _INSERT_UNLOADED.run(tx.connection, **values_of(run), **_beside(run), unload_seq_id=run.next_seq_id)
    if origin is not None:
        origins.keep(tx.connection, origin)
    return run


def _beside(run: RunRecord) -> dict[str, int]:
    """Return the first values of the columns that no record has."""
    size = described_bytes(run.user_metadata)
    return {"arrived_seq_id": run.next_seq_id - 1, "pruned_seq_id": -1, "rebuilds": 0, "described_bytes": size}


def get(connection: Connection, model_id: str) -> RunRecord:
    found = _GET.first(connection, model=model_id)
    if found is None:
        raise missing("model", model_id)
    return found


def list_all(
    connection: Connection, tenant: str | None, *, session_id: str | None = None, limit: int, offset: int
) -> tuple[list[RunRecord], int]:
    conditions, values = wanted(tenant=tenant, session_id=session_id)
    where = f"FROM runs WHERE TRUE{conditions}"
    page = f"SELECT FIELDS {where} ORDER BY created_at DESC, model_id DESC LIMIT :at_most OFFSET :offset"
    found = query(page, RunRecord).all(connection, **values, at_most=limit, offset=offset)
    return found, query(f"SELECT count(*) {where}", int).one(connection, **values)


def lose(tx: Transaction, lease: Lease, model_id: str, reason: str) -> None:
    engines.fence(tx, lease)
    run = models.locked(tx.connection, model_id)
    if run is not None and run.is_live:
        mark_lost(tx, run, reason)


def mark_lost(tx: Transaction, run: Run, reason: str, failure: Failed | None = None) -> None:
    """Fail its pending operations as well; the caller has locked the run."""
    models.write(tx.connection, replace(run, state=RunState.LOST, state_reason=reason))
    models.DELETE_POINTS.run(tx.connection, model_id=run.model_id)
    tx.wake.append(places_topic(run.base_model))
    log.fail_pending(tx, run.model_id, failure or lost(run.model_id, reason))


def note(tx: Transaction, lease: Lease, model_id: str, note: str) -> None:
    engines.fence(tx, lease)
    run = models.locked(tx.connection, model_id)
    if run is not None and run.is_live:
        models.write(tx.connection, replace(run, state_reason=note))


# a model's log, for people: nothing here is on a hot path


_PAYLOAD_BYTES = "coalesce(length(payloads.payload), 0)"
_RESULT_BYTES = "coalesce(length(results.result), 0)"
_WITH_CONTENT = (
    "FROM operations LEFT JOIN payloads ON payloads.operation_id = operations.id "
    "LEFT JOIN results ON results.operation_id = operations.id WHERE subject_id = :model_id"
)
_LIST = (
    "SELECT seq_id, request_id, kind, state, num_tokens, created_at, started_at, finished_at, attempts, interruptions, "
    f"{_PAYLOAD_BYTES} AS payload_bytes, {_RESULT_BYTES} AS result_bytes, result_kind, result {_WITH_CONTENT}"
)


_TIMES = (
    "SELECT FIELDS FROM operations LEFT JOIN results ON results.operation_id = operations.id WHERE subject_id IN "
    "(SELECT model_id FROM runs WHERE session_id = :session_id{of_model} UNION ALL SELECT sampling_session_id "
    "FROM sampling_sessions WHERE session_id = :session_id{of_sampler}){recent} "
    "ORDER BY operations.id DESC LIMIT :at_most"
)


def _seconds(start: str, end: str) -> str:
    return f"CAST({total(f'{end} - {start}')} AS DOUBLE PRECISION) / 1000000"


TOTALS = Query(
    f"SELECT kind, state, count(*) AS number, {total('num_tokens')} AS num_tokens, "
    f"{total(_PAYLOAD_BYTES)} AS payload_bytes, {total(_RESULT_BYTES)} AS result_bytes, "
    f"{_seconds('created_at', 'started_at')} AS queued_s, {_seconds('started_at', 'finished_at')} AS run_s, "
    f"{total('CASE WHEN attempts > 1 OR interruptions > 0 THEN 1 ELSE 0 END')} AS retried "
    f"{_WITH_CONTENT} GROUP BY kind, state ORDER BY kind, state",
    LogTotals,
)


def run_log(connection: Connection, model_id: str) -> RunLog:
    run, points = get(connection, model_id), models.POINTS.all(connection, model_id=model_id)
    pruned_seq_id = PRUNED.one(connection, model=model_id)
    return RunLog(run=run, pruned_seq_id=pruned_seq_id, recovery_points=tuple(points))


def list_log(connection: Connection, model_id: str, *, from_seq_id: int | None, limit: int) -> list[LoggedOperation]:
    values = {} if from_seq_id is None else {"first": from_seq_id}
    which = "ORDER BY seq_id DESC" if from_seq_id is None else "AND seq_id >= :first ORDER BY seq_id"
    found = query(f"{_LIST} {which} LIMIT :at_most", LoggedOperation)
    return sorted(found.all(connection, model_id=model_id, at_most=limit, **values), key=lambda each: each.seq_id)


def list_times(
    connection: Connection, session_id: str, *, model_id: str | None = None, after: datetime | None = None, limit: int
) -> list[TimedOperation]:
    of_one, recent = model_id is not None, after is not None
    text = _TIMES.format(
        of_model=" AND model_id = :model_id" if of_one else "",
        of_sampler=" AND (model_id = :model_id OR model_id IS NULL)" if of_one else "",
        recent=" AND (finished_at IS NULL OR finished_at >= :after)" if recent else "",
    )
    values = {**({"model_id": model_id} if of_one else {}), **({"after": after} if recent else {})}
    found = query(text, TimedOperation).all(connection, session_id=session_id, at_most=limit, **values)
    return found[::-1]
