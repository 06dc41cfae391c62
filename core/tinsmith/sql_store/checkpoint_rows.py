"""What is known of checkpoints; their files are the engine's business."""

from collections.abc import Callable
from datetime import datetime

from sqlmodel import Session, col, func, select

from tinsmith.errors import NotFoundError
from tinsmith.sql_store.tables import CheckpointRow, to_record
from tinsmith.sql_store.writer import Transaction
from tinsmith.store import CheckpointRecord

_NO_LIMIT = 2**62


def get(session: Session, path: str) -> CheckpointRecord:
    return to_record(_row(session, path), CheckpointRecord)


def list_all(
    session: Session, tenant: str | None, model_id: str | None, limit: int | None, offset: int
) -> tuple[list[CheckpointRecord], int]:
    conditions = [] if tenant is None else [CheckpointRow.tenant == tenant]
    if model_id is not None:
        conditions.append(CheckpointRow.model_id == model_id)
    newest = col(CheckpointRow.created_at).desc(), col(CheckpointRow.path).desc()
    query = select(CheckpointRow).where(*conditions).order_by(*newest).offset(offset)
    if limit is not None or offset:
        query = query.limit(_NO_LIMIT if limit is None else limit)  # SQLite knows no offset without a limit
    rows = session.exec(query)
    total = session.exec(select(func.count()).select_from(CheckpointRow).where(*conditions)).one()
    return [to_record(row, CheckpointRecord) for row in rows], total


def update(tx: Transaction, path: str, change: Callable[[CheckpointRecord], CheckpointRecord]) -> CheckpointRecord:
    row = _row(tx.session, path)
    changed = change(to_record(row, CheckpointRecord))
    row.public, row.expires_at = changed.public, changed.expires_at
    return to_record(row, CheckpointRecord)


def delete(tx: Transaction, path: str) -> CheckpointRecord:
    row = _row(tx.session, path)
    record = to_record(row, CheckpointRecord)
    tx.session.delete(row)
    return record


def expired(session: Session, now: datetime) -> list[CheckpointRecord]:
    query = select(CheckpointRow).where(col(CheckpointRow.expires_at) <= now).order_by(col(CheckpointRow.expires_at))
    return [to_record(row, CheckpointRecord) for row in session.exec(query)]


def _row(session: Session, path: str) -> CheckpointRow:
    row = session.get(CheckpointRow, path)
    if row is None:
        msg = f"no checkpoint {path!r}"
        raise NotFoundError(msg)
    return row
