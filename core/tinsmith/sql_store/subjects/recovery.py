"""What an engine does when it starts: it puts back what was running, and rebuilds its models."""

from sqlalchemy import Connection

from tinsmith.operations import INFLIGHT, Failed
from tinsmith.sql_store.statements import Change, Query
from tinsmith.sql_store.subjects import engines, log, models, runs
from tinsmith.sql_store.transaction import Transaction
from tinsmith.store import Lease, LiveModel, OperationRecord, RecoveryPointRecord, RunRecord
from tinsmith.store.refusals import ahead_of_results, ended_too_often, model_not_live
from tinsmith.store.wakeups import work_topic

_CREATION = "create_model"
_RUNNING = Query(
    f"{log.OPERATION} WHERE base_model = :base_model AND operations.state = 'running' ORDER BY id FOR UPDATE",
    log.Operation,
)
_RECOUNT = Change("UPDATE operations SET attempts = :attempts, interruptions = :interruptions WHERE id = :key")
_PUT_BACK = Change(
    "UPDATE operations SET state = 'queued', started_at = NULL, engine_id = NULL, "
    "alone = CASE WHEN :crashed THEN :alone ELSE alone END WHERE id = :key"
)
_READY = Query(
    "SELECT FIELDS FROM runs WHERE base_model = :base_model AND state IN ('ready', 'parked') "
    "ORDER BY created_at, model_id",
    RunRecord,
)
_REBUILDS = Query("SELECT rebuilds FROM runs WHERE model_id = :model", int)
_EPHEMERAL = Query(
    "SELECT snapshot_id FROM sampling_sessions WHERE session_id = :session AND model_id = :model "
    f"AND snapshot_id IN (sampling_session_id, sampling_session_id || '{INFLIGHT}') ORDER BY created_at",
    str,
)
REPLAYABLE = Query(
    f"SELECT {log.RECORD}, payloads.payload, results.result_kind, results.result FROM operations "
    "LEFT JOIN payloads ON payloads.operation_id = operations.id "
    "LEFT JOIN results ON results.operation_id = operations.id "
    "WHERE subject_id = :model_id AND seq_id > :after_seq_id AND state = 'succeeded' ORDER BY seq_id LIMIT :limit",
    OperationRecord,
)


def requeue(
    tx: Transaction,
    lease: Lease,
    *,
    max_attempts: int,
    reason: str | None,
    max_interruptions: int | None = None,
    held: frozenset[str] = frozenset(),
) -> list[str]:
    engines.fence(tx, lease)
    failed: list[str] = []
    lost: set[str] = set()  # models, with everything that they had running
    for each in _RUNNING.all(tx.connection, base_model=lease.base_model):
        if each.request_id in held or each.subject_id in lost:
            continue
        attempts = each.attempts - (reason is None or max_interruptions is not None)
        interruptions = each.interruptions + (max_interruptions is not None)
        _RECOUNT.run(tx.connection, key=each.id, attempts=attempts, interruptions=interruptions)
        too_often = interruptions >= max_interruptions if max_interruptions else attempts >= max_attempts
        if reason is not None and too_often:
            failed.append(each.request_id)
            if _give_up(tx, each, ended_too_often(each.kind, attempts + interruptions, reason)):
                lost.add(each.subject_id)
        else:
            alone = each.ordered or attempts >= max_attempts - 1
            _put_back(tx, each, crashed=reason is not None, alone=alone)
    tx.wake.append(work_topic(lease.base_model))
    return failed


def _put_back(tx: Transaction, operation: log.Operation, *, crashed: bool, alone: bool) -> None:
    _PUT_BACK.run(tx.connection, key=operation.id, crashed=crashed, alone=alone)
    if operation.ordered:
        run = models.locked(tx.connection, operation.subject_id)
        assert run is not None
        run.next_seq_id = min(run.next_seq_id, operation.seq_id)
        models.write(tx.connection, run)


def _give_up(tx: Transaction, operation: log.Operation, failure: Failed) -> bool:
    """Fail this operation alone. Its seq_id is used up; return whether its model is lost, as after a creation."""
    log.finish(tx, operation, failure)
    run = models.locked(tx.connection, operation.subject_id) if operation.ordered else None
    if run is None:
        return False
    run.applied_seq_id = max(run.applied_seq_id, operation.seq_id)
    models.write(tx.connection, run)
    if operation.kind != _CREATION:
        return False
    runs.mark_lost(tx, run, f"it could not be created: {failure.message}")
    return True


def live_models(connection: Connection, base_model: str) -> list[LiveModel]:
    return [
        LiveModel(
            run=run,
            pruned_seq_id=runs.PRUNED.one(connection, model=run.model_id),
            rebuilds=_REBUILDS.one(connection, model=run.model_id),
            recovery_points=tuple(models.POINTS.all(connection, model_id=run.model_id)),
            ephemeral=tuple(_EPHEMERAL.all(connection, session=run.session_id, model=run.model_id)),
        )
        for run in _READY.all(connection, base_model=base_model)
    ]


def begin_rebuild(tx: Transaction, lease: Lease, model_id: str, *, interrupted: bool) -> int:
    engines.fence(tx, lease)
    run = models.locked(tx.connection, model_id)
    assert run is not None
    if not (interrupted and run.rebuilds):
        run.rebuilds += 1
        models.write(tx.connection, run)
    return run.rebuilds


def end_rebuild(tx: Transaction, lease: Lease, model_id: str) -> None:
    engines.fence(tx, lease)
    run = models.locked(tx.connection, model_id)
    assert run is not None
    run.rebuilds = 0
    models.write(tx.connection, run)


def add_recovery_point(tx: Transaction, lease: Lease, record: RecoveryPointRecord, *, keep: int) -> None:
    engines.fence(tx, lease)
    run = models.locked(tx.connection, record.model_id)
    if run is None or not run.is_live:
        raise model_not_live(record)
    if record.seq_id > run.applied_seq_id:
        raise ahead_of_results(record, run.applied_seq_id)
    models.keep_newest_points(tx.connection, record, keep)


def drop_recovery_point(tx: Transaction, lease: Lease, model_id: str, seq_id: int) -> None:
    engines.fence(tx, lease)
    models.DELETE_POINT.run(tx.connection, model_id=model_id, seq_id=seq_id)
