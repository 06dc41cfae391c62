"""What engines report of themselves, and what happens to pending operations if an engine is given up."""

from sqlmodel import Session, col, or_, select

from tinsmith.sql_store.tables import QUEUED, RUNNING, EngineRow, OperationRow, RunRow, to_record, to_row
from tinsmith.sql_store.transactions import leases, log, submitting
from tinsmith.sql_store.transactions.writer import Transaction
from tinsmith.store import EngineRecord, EngineState, Lease, RunState


def report(tx: Transaction, record: EngineRecord, lease: Lease | None) -> None:
    if lease is not None:
        leases.fence(tx, lease)
    elif leases.is_held(tx.session, record.base_model):
        return  # a supervisor reports its own engine, but another engine serves
    if record.state == EngineState.FAILED:
        tx.session.get(EngineRow, record.base_model, with_for_update=True)  # blocks `submit`, which reads it
    tx.session.merge(to_row(record, EngineRow))
    if record.state == EngineState.FAILED:
        _fail_pending(tx, record)


def _fail_pending(tx: Transaction, record: EngineRecord) -> None:
    unfinished = or_(QUEUED, RUNNING)
    pending = select(OperationRow).where(OperationRow.base_model == record.base_model, unfinished)
    for row in tx.session.exec(pending.order_by(col(OperationRow.id)).with_for_update()).all():
        run = tx.session.get(RunRow, row.subject_id) if row.ordered else None
        if run is not None and run.state == RunState.READY:
            continue  # the next engine rebuilds the model and continues
        if run is not None:
            run.state, run.state_reason = RunState.LOST, record.detail
        log.finish(tx, [row], submitting.no_engine(record.base_model, record.detail))


def list_all(session: Session) -> list[EngineRecord]:
    rows = session.exec(select(EngineRow).order_by(EngineRow.base_model))
    return [to_record(row, EngineRecord) for row in rows]
