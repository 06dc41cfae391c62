"""Recovery points: which training states on disk a recovery can start from."""

from sqlalchemy import delete
from sqlmodel import Session, col, select

from tinsmith.errors import ServerError
from tinsmith.sql_store.subjects import leases, log
from tinsmith.sql_store.subjects.transaction import Transaction
from tinsmith.sql_store.tables import RecoveryPointRow, to_record, to_row
from tinsmith.store import Lease, RecoveryPointRecord


def add(tx: Transaction, lease: Lease, record: RecoveryPointRecord, *, keep: int) -> None:
    leases.fence(tx, lease)
    run = log.locked_run(tx.session, record.model_id)
    if run is None or run.state not in log.LIVE:
        msg = f"model {record.model_id!r} is not live, so its recovery point is not kept"
        raise ServerError(msg)
    if record.seq_id > run.applied_seq_id:
        msg = (
            f"a recovery point of {record.model_id!r} at seq_id {record.seq_id} is ahead of the recorded results, "
            f"which end at {run.applied_seq_id}"
        )
        raise ServerError(msg)
    keep_newest(tx.session, record, keep)


def keep_newest(session: Session, record: RecoveryPointRecord, keep: int) -> None:
    session.merge(to_row(record, RecoveryPointRow))
    session.flush()
    for row in session.exec(_of(record.model_id).offset(keep).limit(1000)).all():
        session.delete(row)


def list_of(session: Session, model_id: str) -> list[RecoveryPointRecord]:
    return [to_record(row, RecoveryPointRecord) for row in session.exec(_of(model_id))]


def drop(tx: Transaction, lease: Lease, model_id: str, seq_id: int) -> None:
    leases.fence(tx, lease)
    row = tx.session.get(RecoveryPointRow, (model_id, seq_id))
    if row is not None:
        tx.session.delete(row)


def drop_all(session: Session, model_id: str) -> None:
    session.connection().execute(delete(RecoveryPointRow).where(col(RecoveryPointRow.model_id) == model_id))


def _of(model_id: str):  # type: ignore[no-untyped-def]  # sqlmodel's select has no public name
    return (
        select(RecoveryPointRow)
        .where(RecoveryPointRow.model_id == model_id)
        .order_by(col(RecoveryPointRow.seq_id).desc())
    )
