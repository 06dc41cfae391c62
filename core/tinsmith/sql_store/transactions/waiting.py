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
        missing_seq_id=None if run is None or placeless else _first_missing(run, row.seq_id),
        num_ahead=session.exec(ahead).one(),
        place=model_places.wait_of(session, run) if run is not None and placeless else None,
        engine=None if engine is None else to_record(engine, EngineRecord),
    )


def _first_missing(run: RunRow, seq_id: int) -> int | None:
    """The session may have ended, and an UnloadModel may have taken the place of what is missing."""
    missing = run.arrived_seq_id + 1 if run.unload_seq_id is None else min(run.arrived_seq_id + 1, run.unload_seq_id)
    return missing if seq_id > missing else None
