"""Deleting what is past its retention, and nothing that a recovery could need."""

from datetime import datetime

from sqlmodel import and_, col, func, or_, select, update

from tinsmith.sql_store.tables import OperationRow, PayloadRow, RecoveryPointRow, ResultRow, RetentionRow, RunRow
from tinsmith.sql_store.transactions import log
from tinsmith.sql_store.transactions.writer import Transaction


def prune(tx: Transaction, finished_before: datetime, idle_since: datetime, limit: int) -> int:
    """Delete at most `limit`; remember how far, so that their ids are known to have existed."""
    log.one_at_a_time(tx.session, "prune")
    oldest = (
        select(func.min(RecoveryPointRow.seq_id)).where(RecoveryPointRow.model_id == RunRow.model_id).scalar_subquery()
    )
    old = (
        select(OperationRow)
        .join(RunRow, col(RunRow.model_id) == OperationRow.subject_id, isouter=True)
        .where(
            col(OperationRow.finished_at) < finished_before,
            or_(
                col(RunRow.model_id).is_(None),
                # a refused operation whose turn has not come holds its number: without its row there would be a gap
                and_(
                    col(OperationRow.seq_id) < col(RunRow.next_seq_id),
                    or_(col(RunRow.state).not_in(log.LIVE), col(OperationRow.seq_id) <= oldest),
                    or_(idle_since >= finished_before, col(RunRow.last_request_at) < idle_since),
                ),
            ),
        )
        .order_by(col(OperationRow.finished_at))
        .limit(limit)
    )
    rows = tx.session.exec(old).all()
    for row in rows:
        if row.ordered:
            behind = col(RunRow.model_id) == row.subject_id, col(RunRow.pruned_seq_id) < row.seq_id
            tx.session.exec(update(RunRow).where(*behind).values(pruned_seq_id=row.seq_id))
        for part in (PayloadRow, ResultRow):
            if (found := tx.session.get(part, row.id)) is not None:
                tx.session.delete(found)
    tx.session.flush()
    for row in rows:
        tx.session.delete(row)
    retention = tx.session.get(RetentionRow, 1)
    if retention is None:
        tx.session.add(RetentionRow(id=1, finished_before=finished_before))
    elif retention.finished_before < finished_before:
        retention.finished_before = finished_before
    return len(rows)
