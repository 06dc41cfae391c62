"""What an engine that starts needs: what was running, the models to rebuild, their snapshots and operations."""

import sqlalchemy
from sqlalchemy import delete
from sqlmodel import Session, col, select

from tinsmith.errors import ServerError
from tinsmith.operations import Failed
from tinsmith.sql_store.tables import (
    OPERATIONS,
    PAYLOADS,
    RESULTS,
    RUNNING,
    OperationRow,
    RecoveryPointRow,
    RunRow,
    SamplingSessionRow,
    to_record,
    to_row,
)
from tinsmith.sql_store.transactions import leases, log, submitting
from tinsmith.sql_store.transactions.writer import Transaction
from tinsmith.store import Lease, LiveModel, OperationRecord, OperationState, RecoveryPointRecord, RunRecord, RunState

_CREATION = "create_model"


def requeue(
    tx: Transaction,
    lease: Lease,
    max_attempts: int,
    reason: str | None,
    max_interruptions: int | None,
    held: frozenset[str],
) -> list[str]:
    leases.fence(tx, lease)
    base_model = lease.base_model
    running = select(OperationRow).where(OperationRow.base_model == base_model, RUNNING).order_by(col(OperationRow.id))
    running = running.with_for_update()
    failed = []
    for row in tx.session.exec(running).all():
        if row.request_id in held:
            continue
        if reason is None or max_interruptions is not None:
            row.attempts -= 1
        if max_interruptions is not None:
            row.interruptions += 1
        too_often = row.interruptions >= max_interruptions if max_interruptions else row.attempts >= max_attempts
        if reason is not None and too_often:
            failed.append(row.request_id)
            _give_up(tx, row, reason)
            continue
        if reason is not None:
            row.alone = row.ordered or row.attempts >= max_attempts - 1
        row.state, row.started_at, row.engine_id = OperationState.QUEUED, None, None
        if row.ordered:
            run = log.locked_run(tx.session, row.subject_id)
            assert run is not None
            run.next_seq_id = min(run.next_seq_id, row.seq_id)
    tx.wake.append(log.work_topic(base_model))
    return failed


def _give_up(tx: Transaction, row: OperationRow, reason: str) -> None:
    """Fail the operation alone. Its number is used up; a model whose creation it was can never be there."""
    times = row.attempts + row.interruptions
    message = f"the engine ended {times} times while this {row.kind} ran, so it is not tried again: {reason}"
    log.finish(tx, [row], Failed(message=message, category="server"))
    run = log.locked_run(tx.session, row.subject_id) if row.ordered else None
    if run is not None:
        run.applied_seq_id = max(run.applied_seq_id, row.seq_id)
        if row.kind == _CREATION:
            tx.session.flush()
            _lose(tx, run, f"it could not be created: {message}")


def lose_run(tx: Transaction, lease: Lease, model_id: str, reason: str) -> None:
    leases.fence(tx, lease)
    run = log.locked_run(tx.session, model_id)
    if run is not None and run.state in log.LIVE:
        _lose(tx, run, reason)


def _lose(tx: Transaction, run: RunRow, reason: str) -> None:
    run.state, run.state_reason = RunState.LOST, reason
    drop_recovery_points(tx.session, run.model_id)
    pending = select(OperationRow).where(
        OperationRow.subject_id == run.model_id, col(OperationRow.state).not_in(log.FINISHED)
    )
    log.finish(tx, tx.session.exec(pending).all(), submitting.lost(run.model_id, reason))
    tx.session.flush()


def begin_rebuild(tx: Transaction, lease: Lease, model_id: str, *, interrupted: bool) -> int:
    leases.fence(tx, lease)
    run = log.locked_run(tx.session, model_id)
    assert run is not None
    if not (interrupted and run.rebuilds):
        run.rebuilds += 1
    return run.rebuilds


def end_rebuild(tx: Transaction, lease: Lease, model_id: str) -> None:
    leases.fence(tx, lease)
    run = log.locked_run(tx.session, model_id)
    assert run is not None
    run.rebuilds = 0


def note_run(tx: Transaction, lease: Lease, model_id: str, note: str) -> None:
    leases.fence(tx, lease)
    run = log.locked_run(tx.session, model_id)
    if run is not None and run.state in log.LIVE:
        run.state_reason = note


def live_models(session: Session, base_model: str) -> list[LiveModel]:
    ready = (
        select(RunRow)
        .where(RunRow.base_model == base_model, RunRow.state == RunState.READY)
        .order_by(col(RunRow.created_at), col(RunRow.model_id))
    )
    return [
        LiveModel(
            run=to_record(run, RunRecord),
            pruned_seq_id=run.pruned_seq_id,
            recovery_points=tuple(list_recovery_points(session, run.model_id)),
            ephemeral=_ephemeral(session, run),
        )
        for run in session.exec(ready).all()
    ]


def _ephemeral(session: Session, run: RunRow) -> tuple[str, ...]:
    samplers = select(SamplingSessionRow.sampling_session_id).where(
        SamplingSessionRow.session_id == run.session_id,
        SamplingSessionRow.model_id == run.model_id,
        SamplingSessionRow.snapshot_id == SamplingSessionRow.sampling_session_id,
    )
    return tuple(session.exec(samplers))


def replayable(session: Session, model_id: str, after_seq_id: int, limit: int) -> list[OperationRecord]:
    query = (
        sqlalchemy.select(*log.RECORD_COLUMNS, PAYLOADS.c.payload, RESULTS.c.result_kind, RESULTS.c.result)
        .join_from(OPERATIONS, PAYLOADS, PAYLOADS.c.operation_id == OPERATIONS.c.id, isouter=True)
        .join(RESULTS, RESULTS.c.operation_id == OPERATIONS.c.id, isouter=True)
        .where(
            OPERATIONS.c.subject_id == model_id,
            OPERATIONS.c.seq_id > after_seq_id,
            OPERATIONS.c.state == OperationState.SUCCEEDED,
        )
        .order_by(OPERATIONS.c.seq_id)
        .limit(limit)
    )
    return [OperationRecord(**row) for row in session.connection().execute(query).mappings()]


def add_recovery_point(tx: Transaction, lease: Lease, record: RecoveryPointRecord, keep: int) -> None:
    leases.fence(tx, lease)
    run = log.locked_run(tx.session, record.model_id)
    if run is None or run.state not in log.LIVE:
        msg = f"model {record.model_id!r} is not live any more, so its snapshot is not kept"
        raise ServerError(msg)
    if record.seq_id > run.applied_seq_id:
        msg = (
            f"a snapshot of {record.model_id!r} as of seq_id {record.seq_id} is ahead of the recorded results, which "
            f"end with {run.applied_seq_id}"
        )
        raise ServerError(msg)
    keep_newest(tx.session, record, keep)


def keep_newest(session: Session, record: RecoveryPointRecord, keep: int) -> None:
    session.merge(to_row(record, RecoveryPointRow))
    session.flush()
    for row in session.exec(_of(record.model_id).offset(keep).limit(1000)).all():
        session.delete(row)


def list_recovery_points(session: Session, model_id: str) -> list[RecoveryPointRecord]:
    return [to_record(row, RecoveryPointRecord) for row in session.exec(_of(model_id))]


def drop_recovery_point(tx: Transaction, lease: Lease, model_id: str, seq_id: int) -> None:
    leases.fence(tx, lease)
    row = tx.session.get(RecoveryPointRow, (model_id, seq_id))
    if row is not None:
        tx.session.delete(row)


def drop_recovery_points(session: Session, model_id: str) -> None:
    session.connection().execute(delete(RecoveryPointRow).where(col(RecoveryPointRow.model_id) == model_id))


def _of(model_id: str):  # type: ignore[no-untyped-def]  # sqlmodel's select has no public name
    return (
        select(RecoveryPointRow)
        .where(RecoveryPointRow.model_id == model_id)
        .order_by(col(RecoveryPointRow.seq_id).desc())
    )
