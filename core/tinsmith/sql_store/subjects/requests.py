"""Clients' calls on submitted operations: wait for them, ask why one is pending, cancel samples.

The cost of saying why one is pending does not depend on the rest of the queue.
"""

from collections import Counter
from datetime import datetime
from functools import partial
from typing import NamedTuple

from sqlalchemy import Connection

from tinsmith.sql_store import transaction
from tinsmith.sql_store.connections import Connections
from tinsmith.sql_store.statements import Change, Query, chunks
from tinsmith.sql_store.subjects import engines, log, models, places
from tinsmith.sql_store.subjects.models import Run
from tinsmith.sql_store.transaction import Transaction
from tinsmith.store import (
    EngineRecord,
    FinishedSample,
    FinishedSamples,
    Lease,
    OperationRecord,
    OperationState,
    PendingCounts,
    PendingWork,
    Waiting,
)
from tinsmith.store.refusals import CANCELLED, cursor_ahead
from tinsmith.store.wakeups import done_topic, samples_topic, work_topic


class _Finished(NamedTuple):
    number: int
    request_id: str
    succeeded: bool
    size_bytes: int


class _Counted(NamedTuple):
    kind: str
    finished: bool
    number: int
    num_bytes: int


class _Next(NamedTuple):
    model_id: str
    request_id: str | None
    last_request_at: datetime
    finished_at: datetime | None  # None: its last operation is past its retention
    sampled_at: datetime | None


class _Sample(NamedTuple):
    model_id: str
    id: int


class _Name(NamedTuple):
    id: int
    request_id: str


_AFTER = Query(
    f"SELECT FIELDS FROM finished_samples WHERE {transaction.OF_CLIENT} AND number > :cursor ORDER BY number "
    "LIMIT :at_most",
    _Finished,
)
_PENDING = Query("SELECT FIELDS FROM pending_work WHERE tenant = :tenant", _Counted)
_OURS = "SELECT id FROM operations WHERE base_model = :base_model AND tenant = :tenant"
_NUM_QUEUED, _NUM_RUNNING = (
    Query(f"SELECT count(*) AS number FROM ({_OURS} AND {ahead} LIMIT {Waiting.MANY_AHEAD}) AS ahead", int)
    for ahead in (
        "early = FALSE AND ordered = :ordered AND (arrival, seq_id) < (:arrival, :seq_id) "
        "AND operations.state = 'queued'",
        "id < :id AND operations.state = 'running'",
    )
)
_LIST_PENDING = Query(
    " UNION ALL ".join(  # each state has an index
        "SELECT base_model, tenant, kind, state, count(*) AS number, min(created_at) AS oldest_at FROM operations "
        f"WHERE operations.state = '{state}' GROUP BY base_model, tenant, kind, state"
        for state in (OperationState.QUEUED, OperationState.RUNNING)
    ),
    PendingWork,
)
_NEXT = Query(
    "SELECT runs.model_id, runs.last_request_at, "
    "(SELECT operations.request_id FROM operations WHERE operations.subject_id = runs.model_id "
    "AND operations.seq_id > runs.applied_seq_id AND operations.state IN ('queued', 'running') "
    "ORDER BY operations.seq_id LIMIT 1) AS request_id, "
    "(SELECT operations.finished_at FROM operations WHERE operations.subject_id = runs.model_id "
    "AND operations.seq_id = runs.applied_seq_id) AS finished_at, "
    "(SELECT operations.finished_at FROM operations WHERE operations.subject_id = "
    "(SELECT sampling_session_id FROM sampling_sessions WHERE sampling_sessions.model_id = runs.model_id "
    "AND sampling_sessions.tenant = runs.tenant ORDER BY sampling_sessions.created_at DESC LIMIT 1) "
    "ORDER BY operations.seq_id DESC LIMIT 1) AS sampled_at "
    f"FROM runs WHERE {models.IS_LIVE} ORDER BY runs.created_at, runs.model_id",
    _Next,
)
_OLDEST_SAMPLES = Query(
    " UNION ALL ".join(
        "SELECT sampling_sessions.model_id, min(operations.id) AS id FROM operations "
        "JOIN sampling_sessions ON sampling_sessions.sampling_session_id = operations.subject_id "
        "JOIN runs ON runs.model_id = sampling_sessions.model_id AND runs.tenant = operations.tenant "
        f"WHERE operations.state = '{state}' AND NOT operations.ordered GROUP BY sampling_sessions.model_id"
        for state in (OperationState.QUEUED, OperationState.RUNNING)
    ),
    _Sample,
)
_NAMES = Query("SELECT FIELDS FROM operations WHERE id IN :ids", _Name)
_BEHIND = Query(
    "SELECT id FROM operations WHERE subject_id = :model AND seq_id > :seq_id AND state = 'queued' LIMIT 1", int
)
_UNTOLD = f"{log.OPERATION} WHERE base_model = :base_model AND NOT operations.cancel_told ORDER BY id"
_ALL_UNTOLD, _ANY_UNTOLD = Query(f"{_UNTOLD} FOR UPDATE", log.Operation), Query(f"{_UNTOLD} LIMIT 1", log.Operation)
_TELL = Change("UPDATE operations SET cancel_told = :told WHERE id = :key")
_ENGINE = Query("SELECT FIELDS FROM engines WHERE base_model = :base_model", EngineRecord)


async def get_operation(connections: Connections, request_id: str) -> OperationRecord:
    found = connections.glance(log.glance, request_id)
    return await connections.reader.read(log.get, request_id) if found is None else found


async def wait_for(connections: Connections, request_id: str, timeout_s: float) -> OperationRecord:
    return await connections.wakeups.read_until(
        lambda operation: operation.state.is_finished,
        partial(get_operation, connections, request_id),
        topic=done_topic(request_id),
        timeout_s=timeout_s,
    )


async def finished_samples(
    connections: Connections, sampling_session_id: str, clone: int, *, after: int, limit: int, timeout_s: float
) -> FinishedSamples:
    return await connections.wakeups.read_until(
        lambda found: len(found.samples) > 0,
        partial(connections.reader.read, finished, sampling_session_id, clone, after, limit),
        topic=samples_topic(sampling_session_id, clone),
        timeout_s=timeout_s,
    )


def finished(connection: Connection, subject_id: str, clone: int, cursor: int, limit: int) -> FinishedSamples:
    client = {"subject_id": subject_id, "clone": clone}
    last = transaction.LAST.first(connection, **client) or 0
    if cursor > last:
        raise cursor_ahead(subject_id, cursor, last)
    rows = _AFTER.all(connection, **client, cursor=cursor, at_most=limit)
    samples = [
        FinishedSample(request_id=each.request_id, succeeded=each.succeeded, size_bytes=each.size_bytes)
        for each in rows
    ]
    return FinishedSamples(samples=tuple(samples), cursor=rows[-1].number if rows else cursor)


def pending(connection: Connection, tenant: str) -> PendingCounts:
    number: Counter[str] = Counter()
    num_bytes = 0
    for row in _PENDING.all(connection, tenant=tenant):
        sign = -1 if row.finished else 1
        number[row.kind] += sign * row.number
        num_bytes += sign * row.num_bytes
    return PendingCounts(by_kind=dict(+number), num_bytes=num_bytes)


def waiting(connection: Connection, request_id: str) -> Waiting:
    operation = log.find(connection, request_id)
    run = models.find(connection, operation.subject_id) if operation.ordered else None
    placeless = run is not None and run.has_no_place and operation.seq_id > run.arrived_seq_id
    return Waiting(
        missing_seq_id=None if run is None or placeless else _first_missing(run, operation.seq_id),
        num_ahead=_num_ahead(connection, operation),
        place=places.wait_of(connection, run) if run is not None and placeless else None,
        engine=_ENGINE.first(connection, base_model=operation.base_model),
    )


def _num_ahead(connection: Connection, operation: log.Operation) -> int:
    counts = (each.first(connection, **operation._asdict()) for each in (_NUM_QUEUED, _NUM_RUNNING))
    return min(sum(each or 0 for each in counts), Waiting.MANY_AHEAD)


def _first_missing(run: Run, seq_id: int) -> int | None:
    """The session may have ended, and an UnloadModel may have taken the missing seq_id."""
    missing = run.arrived_seq_id + 1 if run.unload_seq_id is None else min(run.arrived_seq_id + 1, run.unload_seq_id)
    return missing if seq_id > missing else None


def next_requests(connection: Connection) -> dict[str, str | datetime]:
    """Other tenants' samples from a run's weights are none of its business."""
    samples: dict[str, int] = {}
    for each in _OLDEST_SAMPLES.all(connection):
        samples[each.model_id] = min(each.id, samples.get(each.model_id, each.id))
    chosen = chunks(list(samples.values()))
    names = {row.id: row.request_id for chunk in chosen for row in _NAMES.all(connection, ids=chunk)}
    found: dict[str, str | datetime] = {}
    for row in _NEXT.all(connection):
        times = row.last_request_at, row.finished_at, row.sampled_at
        found[row.model_id] = row.request_id or names.get(samples.get(row.model_id, -1)) or max(filter(None, times))
    return found


def is_awaited(connection: Connection, model_id: str, seq_id: int) -> bool:
    return _BEHIND.first(connection, model=model_id, seq_id=seq_id) is not None


def cancel(tx: Transaction, request_id: str) -> OperationRecord:
    operation = log.find(tx.connection, request_id, lock=True)
    if not operation.ordered and not operation.state.is_finished:
        log.finish(tx, operation, CANCELLED, OperationState.CANCELLED)
        if operation.state == OperationState.RUNNING:
            _TELL.run(tx.connection, key=operation.id, told=False)
            tx.wake.append(work_topic(operation.base_model))
    return log.get(tx.connection, request_id)


async def cancelled(connections: Connections, lease: Lease) -> list[str]:
    if not await connections.reader.read(any_untold, lease.base_model):
        return []
    return await connections.relaxed.write(tell, lease)


def any_untold(connection: Connection, base_model: str) -> bool:
    """Look without writing, so that an engine without cancelled operations costs no transaction."""
    return _ANY_UNTOLD.first(connection, base_model=base_model) is not None


def tell(tx: Transaction, lease: Lease) -> list[str]:
    engines.fence(tx, lease)
    untold = _ALL_UNTOLD.all(tx.connection, base_model=lease.base_model)
    _TELL.run_each(tx.connection, [{"key": each.id, "told": True} for each in untold])
    return [each.request_id for each in untold]


def list_pending(connection: Connection) -> list[PendingWork]:
    found = _LIST_PENDING.all(connection)
    return sorted(found, key=lambda each: (each.base_model, each.tenant, each.kind, each.state))
