"""Gaps: seq_ids that have not arrived, and the operations that wait behind them."""

from collections.abc import Sequence
from datetime import datetime

from sqlmodel import Session, col, select

from tinsmith.operations import Failed
from tinsmith.sql_store.tables import QUEUED, RUNNING, OperationRow, RunRow
from tinsmith.sql_store.transactions import log, model_places
from tinsmith.sql_store.transactions.writer import Transaction
from tinsmith.store import OperationState


def any_waiting_since(session: Session, base_model: str, older_than: datetime) -> bool:
    """Return, without writing, whether an operation could have waited behind a gap for that long."""
    return session.exec(_old(base_model, older_than).limit(1)).first() is not None


def fail_old(tx: Transaction, base_model: str, older_than: datetime) -> int:
    failed = 0
    for model_id in sorted(set(tx.session.exec(_old(base_model, older_than)))):
        run = log.locked_run(tx.session, model_id)
        assert run is not None
        failed += _fail_old_of(tx, run, older_than)
    return failed


def _fail_old_of(tx: Transaction, run: RunRow, older_than: datetime) -> int:
    """If a gap has been open for too long, fail everything up to the youngest operation that has waited as long.

    Not while an operation of the model runs: if it were requeued later, the model would reach the same gap again.
    """
    failed = 0
    if model_places.waits(run):
        return failed
    running = select(OperationRow.id).where(OperationRow.subject_id == run.model_id, RUNNING)
    if tx.session.exec(running).first() is not None:
        return failed
    while True:
        rows = operations_from(tx.session, run.model_id, run.next_seq_id)
        present = num_contiguous(rows, run.next_seq_id)
        missing = run.next_seq_id + present
        behind = [row for row in rows[present:] if row.state == OperationState.QUEUED]
        late = [row.seq_id for row in behind if row.created_at < older_than]
        if not late or any(row.state == OperationState.QUEUED for row in rows[:present]):
            return failed
        lost = [row for row in behind if row.seq_id <= late[-1]]
        fail_behind(tx, lost, run.model_id, missing)
        run.next_seq_id, run.applied_seq_id = late[-1] + 1, late[-1]
        failed += len(lost)
        tx.wake.append(log.work_topic(run.base_model))


def operations_from(session: Session, model_id: str, seq_id: int) -> Sequence[OperationRow]:
    return session.exec(
        select(OperationRow)
        .where(OperationRow.subject_id == model_id, col(OperationRow.seq_id) >= seq_id)
        .order_by(col(OperationRow.seq_id))
    ).all()


def num_contiguous(rows: Sequence[OperationRow], first: int) -> int:
    """Return how many rows there are before the first gap, counted from the seq_id `first`."""
    return next((index for index, row in enumerate(rows) if row.seq_id != first + index), len(rows))


def fail_behind(tx: Transaction, rows: Sequence[OperationRow], model_id: str, missing: int) -> None:
    message = (
        f"seq_id {missing} of {model_id!r} never arrived, so the requests that waited behind it were not run; the "
        "model continues with the next request"
    )
    log.finish(tx, rows, Failed(message=message))
    tx.session.flush()


def _old(base_model: str, older_than: datetime):  # type: ignore[no-untyped-def]  # sqlmodel's select has no public name
    return select(OperationRow.subject_id).where(
        OperationRow.base_model == base_model,
        col(OperationRow.ordered).is_(True),
        col(OperationRow.created_at) < older_than,
        QUEUED,
    )
