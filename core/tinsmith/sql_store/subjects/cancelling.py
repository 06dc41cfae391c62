"""Cancelling samples, and telling their engine."""

from sqlmodel import Session, col, select

from tinsmith.operations import Failed
from tinsmith.sql_store.subjects import leases, log
from tinsmith.sql_store.subjects.transaction import Connections, Transaction
from tinsmith.sql_store.tables import UNTOLD, OperationRow
from tinsmith.store import Lease, OperationRecord, OperationState


def cancel(tx: Transaction, request_id: str) -> OperationRecord:
    row = log.find(tx.session, request_id, lock=True)
    if row.ordered or row.state in log.FINISHED:
        return log.get(tx.session, request_id)
    row.cancel_told = row.state != OperationState.RUNNING
    log.finish(tx, [row], Failed(message="cancelled by the client"), OperationState.CANCELLED)
    if not row.cancel_told:
        tx.wake.append(log.work_topic(row.base_model))
    tx.session.flush()
    return log.get(tx.session, request_id)


async def cancelled(connections: Connections, lease: Lease) -> list[str]:
    if not await connections.reader.read(any_untold, lease.base_model):
        return []
    return await connections.relaxed.write(tell, lease)


def any_untold(session: Session, base_model: str) -> bool:
    """Look without writing, so that an engine without cancelled operations costs no transaction."""
    return session.exec(_untold(base_model).limit(1)).first() is not None


def tell(tx: Transaction, lease: Lease) -> list[str]:
    leases.fence(tx, lease)
    rows = tx.session.exec(_untold(lease.base_model).with_for_update()).all()
    for row in rows:
        row.cancel_told = True
    return [row.request_id for row in rows]


def _untold(base_model: str):  # type: ignore[no-untyped-def]  # sqlmodel's select has no public name
    return select(OperationRow).where(OperationRow.base_model == base_model, UNTOLD).order_by(col(OperationRow.id))
