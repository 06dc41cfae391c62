"""Unloading the models of a session that ends."""

from sqlmodel import Session, col, select

from tinsmith.operations import UnloadModel
from tinsmith.sql_store.subjects import arriving, log, model_places, submitting
from tinsmith.sql_store.subjects.transaction import Transaction
from tinsmith.sql_store.tables import RunRow
from tinsmith.store import NewOperation
from tinsmith.store.codec import encode_operation, kind_of


def unload_models(tx: Transaction, session_id: str) -> None:
    """Queue an UnloadModel behind the last operation that can run.

    Later requests are refused, so a gap will never be filled: the UnloadModel takes its seq_id, and what is behind it
    fails (`gaps.fail_some`). What a model that waits for a place has accepted runs when it has one.
    """
    for model_id in live_models_of(tx.session, session_id):
        run = log.locked_run(tx.session, model_id)
        assert run is not None
        run.unload_seq_id = _first_missing(tx, run)
        _queue_unload(tx, run, run.unload_seq_id)


def live_models_of(session: Session, session_id: str) -> list[str]:
    live = select(RunRow.model_id).where(RunRow.session_id == session_id, col(RunRow.state).in_(log.LIVE))
    return list(session.exec(live.order_by(RunRow.model_id)))


def _first_missing(tx: Transaction, run: RunRow) -> int:
    """While a gap is being failed, what is before `next_seq_id` does not count."""
    first = 0 if model_places.waits(run) else max(run.arrived_seq_id + 1, run.next_seq_id)
    return arriving.last_before_a_gap(tx.session, run, first) + 1


def _queue_unload(tx: Transaction, run: RunRow, seq_id: int) -> None:
    unload = UnloadModel(model_id=run.model_id)
    operation = NewOperation(
        base_model=run.base_model,
        kind=kind_of(unload),
        tenant=run.tenant,
        session_id=run.session_id,
        subject_id=run.model_id,
        seq_id=seq_id,
        ordered=True,
        payload=encode_operation(unload),
        digest=b"",
    )
    submitting.insert(tx, operation, run, submitting.neighbours(tx.session, operation))
    tx.wake.append(log.work_topic(run.base_model))
