"""Unloading the models of a session that ends."""

from sqlmodel import col, select

from tinsmith.operations import UnloadModel
from tinsmith.sql_store.tables import OperationRow, PayloadRow, RunRow
from tinsmith.sql_store.transactions import gaps, log
from tinsmith.sql_store.transactions.request_ids import new_request_id
from tinsmith.sql_store.transactions.writer import Transaction
from tinsmith.store import OperationState
from tinsmith.store.codec import encode_operation, kind_of


def unload_models(tx: Transaction, session_id: str) -> None:
    """Queue an UnloadModel behind the last operation that can run.

    Later requests are refused, so a gap will never be filled: the UnloadModel takes its seq_id.
    """
    live = select(RunRow.model_id).where(RunRow.session_id == session_id, col(RunRow.state).in_(log.LIVE))
    for model_id in tx.session.exec(live.order_by(RunRow.model_id)).all():
        run = log.locked_run(tx.session, model_id)
        assert run is not None
        first = max(run.next_seq_id, 0)  # it may wait for a place; what was accepted runs when it has one
        rows = gaps.operations_from(tx.session, model_id, first)
        present = gaps.num_contiguous(rows, first)
        missing = first + present
        gaps.fail_behind(tx, [row for row in rows[present:] if row.state == OperationState.QUEUED], model_id, missing)
        _queue_unload(tx, run, missing)


def _queue_unload(tx: Transaction, run: RunRow, seq_id: int) -> None:
    unload = UnloadModel(model_id=run.model_id)
    row = OperationRow(
        request_id=new_request_id(tx.now),
        base_model=run.base_model,
        kind=kind_of(unload),
        tenant=run.tenant,
        session_id=run.session_id,
        subject_id=run.model_id,
        seq_id=seq_id,
        ordered=True,
        num_tokens=0,
        digest=b"",
        state=OperationState.QUEUED,
        created_at=tx.now,
    )
    tx.session.add(row)
    tx.session.flush()
    assert row.id is not None
    tx.session.add(PayloadRow(operation_id=row.id, payload=encode_operation(unload)))
    tx.wake.append(log.work_topic(run.base_model))
