"""Sampling sessions."""

from sqlmodel import Session, col, select

from tinsmith.errors import NotFoundError
from tinsmith.sql_store.tables import SamplingSessionRow, to_record, to_row
from tinsmith.sql_store.transactions.writer import Transaction
from tinsmith.store import SamplingSessionRecord


def create(tx: Transaction, sampler: SamplingSessionRecord) -> SamplingSessionRecord:
    first = tx.session.get(SamplingSessionRow, sampler.sampling_session_id)
    if first is not None:
        return to_record(first, SamplingSessionRecord)
    tx.session.add(to_row(sampler, SamplingSessionRow))
    return sampler


def get(session: Session, sampling_session_id: str) -> SamplingSessionRecord:
    row = session.get(SamplingSessionRow, sampling_session_id)
    if row is None:
        msg = f"no sampling session {sampling_session_id!r}"
        raise NotFoundError(msg)
    return to_record(row, SamplingSessionRecord)


def list_of(session: Session, session_id: str) -> list[SamplingSessionRecord]:
    rows = session.exec(
        select(SamplingSessionRow)
        .where(SamplingSessionRow.session_id == session_id)
        .order_by(col(SamplingSessionRow.created_at), col(SamplingSessionRow.sampling_session_id))
    )
    return [to_record(row, SamplingSessionRecord) for row in rows]
