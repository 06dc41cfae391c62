"""Rebuilding models when an engine starts: which ones, from what, and how often it was tried."""

import sqlalchemy
from sqlmodel import Session, col, select

from tinsmith.sql_store.subjects import leases, log, recovery_points
from tinsmith.sql_store.subjects.transaction import Transaction
from tinsmith.sql_store.tables import OPERATIONS, PAYLOADS, RESULTS, RunRow, SamplingSessionRow, to_record
from tinsmith.store import Lease, LiveModel, OperationRecord, OperationState, RunRecord, RunState


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
            recovery_points=tuple(recovery_points.list_of(session, run.model_id)),
            ephemeral=_ephemeral(session, run),
        )
        for run in session.exec(ready).all()
    ]


def _ephemeral(session: Session, run: RunRow) -> tuple[str, ...]:
    ids = select(SamplingSessionRow.sampling_session_id).where(
        SamplingSessionRow.session_id == run.session_id,
        SamplingSessionRow.model_id == run.model_id,
        SamplingSessionRow.snapshot_id == SamplingSessionRow.sampling_session_id,
    )
    return tuple(session.exec(ids))


def replayable(session: Session, model_id: str, *, after_seq_id: int, limit: int) -> list[OperationRecord]:
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


def begin(tx: Transaction, lease: Lease, model_id: str, *, interrupted: bool) -> int:
    leases.fence(tx, lease)
    run = log.locked_run(tx.session, model_id)
    assert run is not None
    if not (interrupted and run.rebuilds):
        run.rebuilds += 1
    return run.rebuilds


def end(tx: Transaction, lease: Lease, model_id: str) -> None:
    leases.fence(tx, lease)
    run = log.locked_run(tx.session, model_id)
    assert run is not None
    run.rebuilds = 0
