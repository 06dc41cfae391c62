"""Operations that will not run: gaps that stay open, sessions that end, engines that die."""

from collections.abc import Sequence
from datetime import datetime

from sqlmodel import Session, col, or_, select

from tinsmith.operations import Failed, UnloadModel
from tinsmith.sql_store.tables import QUEUED, RUNNING, EngineRow, OperationRow, PayloadRow, RunRow, to_record, to_row
from tinsmith.sql_store.transactions import leases, log, submitting
from tinsmith.sql_store.transactions.request_ids import new_request_id
from tinsmith.sql_store.transactions.writer import Transaction
from tinsmith.store import EngineRecord, EngineState, Lease, OperationState, RunState
from tinsmith.store.codec import encode_operation, kind_of


def waiting_since(session: Session, base_model: str, older_than: datetime) -> bool:
    """Say whether anything could be waiting behind a gap so long, without writing."""
    return session.exec(_old(base_model, older_than).limit(1)).first() is not None


def fail_gaps(tx: Transaction, base_model: str, older_than: datetime) -> int:
    failed = 0
    for model_id in sorted(set(tx.session.exec(_old(base_model, older_than)))):
        run = log.locked_run(tx.session, model_id)
        assert run is not None
        failed += _fail_gaps_of(tx, run, older_than)
    return failed


def _fail_gaps_of(tx: Transaction, run: RunRow, older_than: datetime) -> int:
    """Where the gap is open too long, everything up to the youngest of those that waited so long fails.

    What runs comes first: were it put back into the queue after that, the model would come to the same gap again.
    """
    failed = 0
    if (
        tx.session.exec(select(OperationRow.id).where(OperationRow.subject_id == run.model_id, RUNNING)).first()
        is not None
    ):
        return failed
    while True:
        rows = tx.session.exec(_from(run.model_id, run.next_seq_id)).all()
        present = _contiguous(rows, run.next_seq_id)
        missing = run.next_seq_id + present
        behind = [row for row in rows[present:] if row.state == OperationState.QUEUED]
        late = [row.seq_id for row in behind if row.created_at < older_than]
        if not late or any(row.state == OperationState.QUEUED for row in rows[:present]):
            return failed
        lost = [row for row in behind if row.seq_id <= late[-1]]
        _fail_behind(tx, lost, run.model_id, missing)
        run.next_seq_id, run.applied_seq_id = late[-1] + 1, late[-1]
        failed += len(lost)
        tx.wake.append(log.work_topic(run.base_model))


def _fail_behind(tx: Transaction, rows: Sequence[OperationRow], model_id: str, missing: int) -> None:
    message = (
        f"seq_id {missing} of {model_id!r} never came, so what waited behind it was not run; the model goes on with "
        "the next request"
    )
    log.finish(tx, rows, Failed(message=message))
    tx.session.flush()


def unload_models(tx: Transaction, session_id: str) -> None:
    """Put an UnloadModel behind the last operation that can run. What comes now is refused, so a gap is its place."""
    live = select(RunRow.model_id).where(RunRow.session_id == session_id, col(RunRow.state).in_(log.LIVE))
    for model_id in tx.session.exec(live.order_by(RunRow.model_id)).all():
        run = log.locked_run(tx.session, model_id)
        assert run is not None
        rows = tx.session.exec(_from(model_id, run.next_seq_id)).all()
        present = _contiguous(rows, run.next_seq_id)
        missing = run.next_seq_id + present
        _fail_behind(tx, [row for row in rows[present:] if row.state == OperationState.QUEUED], model_id, missing)
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


def report_engine(tx: Transaction, record: EngineRecord, lease: Lease | None) -> None:
    if lease is not None:
        leases.fence(tx, lease)
    elif leases.is_held(tx.session, record.base_model):
        return  # what a supervisor says of its own engine is not what serves
    if record.state == EngineState.FAILED:
        tx.session.get(EngineRow, record.base_model, with_for_update=True)  # submits look at it, see there
    tx.session.merge(to_row(record, EngineRow))
    if record.state == EngineState.FAILED:
        unfinished = or_(QUEUED, RUNNING)
        pending = select(OperationRow).where(OperationRow.base_model == record.base_model, unfinished)
        for row in tx.session.exec(pending.order_by(col(OperationRow.id)).with_for_update()).all():
            run = tx.session.get(RunRow, row.subject_id) if row.ordered else None
            if run is not None and run.state == RunState.READY:
                continue  # the next engine has its state and its log: it goes on there
            if run is not None:
                run.state, run.state_reason = RunState.LOST, record.detail
            log.finish(tx, [row], submitting.no_engine(record.base_model, record.detail))


def list_engines(session: Session) -> list[EngineRecord]:
    rows = session.exec(select(EngineRow).order_by(EngineRow.base_model))
    return [to_record(row, EngineRecord) for row in rows]


def _old(base_model: str, older_than: datetime):  # type: ignore[no-untyped-def]  # sqlmodel's select has no public name
    return select(OperationRow.subject_id).where(
        OperationRow.base_model == base_model,
        col(OperationRow.ordered).is_(True),
        col(OperationRow.created_at) < older_than,
        QUEUED,
    )


def _from(model_id: str, seq_id: int):  # type: ignore[no-untyped-def]  # as above
    return (
        select(OperationRow)
        .where(OperationRow.subject_id == model_id, col(OperationRow.seq_id) >= seq_id)
        .order_by(col(OperationRow.seq_id))
    )


def _contiguous(rows: Sequence[OperationRow], first: int) -> int:
    """Count the rows whose numbers follow on one another from `first`."""
    return next((index for index, row in enumerate(rows) if row.seq_id != first + index), len(rows))
