"""Why an operation is still pending."""

from sqlmodel import Session, col, func, or_, select

from tinsmith.sql_store.tables import QUEUED, RUNNING, EngineRow, OperationRow, RunRow, to_record
from tinsmith.sql_store.transactions import log, model_places
from tinsmith.store import EngineRecord, Waiting


def waiting(session: Session, request_id: str) -> Waiting:
    row = log.find(session, request_id)
    unfinished = or_(QUEUED, RUNNING)
    ahead = select(func.count()).where(
        OperationRow.base_model == row.base_model, unfinished, col(OperationRow.id) < row.id
    )
    engine = session.get(EngineRow, row.base_model)
    run = session.get(RunRow, row.subject_id) if row.ordered else None
    placeless = run is not None and model_places.waits(run)
    return Waiting(
        missing_seq_id=None if run is None or placeless else _first_missing(session, run, row.seq_id),
        num_ahead=session.exec(ahead).one(),
        place=model_places.wait_of(session, run) if run is not None and placeless else None,
        engine=None if engine is None else to_record(engine, EngineRecord),
    )


def _first_missing(session: Session, run: RunRow, seq_id: int) -> int | None:
    if seq_id <= run.next_seq_id:
        return None
    between = select(OperationRow.seq_id).where(
        OperationRow.subject_id == run.model_id,
        col(OperationRow.seq_id) >= run.next_seq_id,
        col(OperationRow.seq_id) < seq_id,
    )
    arrived = set(session.exec(between))
    return next((missing for missing in range(run.next_seq_id, seq_id) if missing not in arrived), None)
