"""What engines report of themselves, and what happens to pending operations if an engine is given up."""

from datetime import datetime

import sqlalchemy
from sqlalchemy import bindparam
from sqlmodel import Session, select

from tinsmith.failpoints import durable_boundary
from tinsmith.sql_store.subjects import leases, log, submitting
from tinsmith.sql_store.subjects.finished_samples import Finished
from tinsmith.sql_store.subjects.transaction import Connections, Transaction
from tinsmith.sql_store.tables import OPERATIONS, QUEUED, RUNNING, RUNS, EngineRow, to_record, to_row
from tinsmith.store import EngineRecord, EngineState, Lease, RunState
from tinsmith.store.codec import encode_result

# Without those of models that are ready: the next engine rebuilds them and continues.
_IS_READY = sqlalchemy.exists().where(
    OPERATIONS.c.ordered, RUNS.c.model_id == OPERATIONS.c.subject_id, RUNS.c.state == RunState.READY
)
_PENDING = (
    sqlalchemy.select(*log.COUNTED, OPERATIONS.c.subject_id, OPERATIONS.c.seq_id, OPERATIONS.c.ordered)
    .where(
        OPERATIONS.c.base_model == bindparam("base_model"),
        sqlalchemy.or_(QUEUED, RUNNING),
        OPERATIONS.c.id > bindparam("after"),
        ~_IS_READY,
    )
    .order_by(OPERATIONS.c.id)
    .limit(log.PART)
)
_RUNNING_SINCE = (
    sqlalchemy.select(OPERATIONS.c.base_model, sqlalchemy.func.min(OPERATIONS.c.started_at).label("since"))
    .where(RUNNING)
    .group_by(OPERATIONS.c.base_model)
)
_LOSE = (
    RUNS.update()
    .where(RUNS.c.model_id.in_(bindparam("models", expanding=True)), RUNS.c.state == RunState.CREATING)
    .values(state=RunState.LOST, state_reason=bindparam("reason"))
)


@durable_boundary("store.report_engine")
async def report_engine(connections: Connections, record: EngineRecord, *, lease: Lease | None = None) -> None:
    writer = connections.durable if record.state == EngineState.FAILED else connections.relaxed
    if await writer.write(report, record, lease):
        await _fail_pending(connections, record.base_model)


async def _fail_pending(connections: Connections, base_model: str) -> None:
    """In parts, so that other writes get their turn. If this process dies, the next engine runs what is left."""
    last: int | None = 0
    while last is not None:
        last = await connections.durable.write_locking(pending_models, fail_some, base_model, last)


def report(tx: Transaction, record: EngineRecord, lease: Lease | None) -> bool:
    """Return whether the engine is given up, so that what is pending for it must fail."""
    if lease is not None:
        leases.fence(tx, lease)
    elif leases.is_held(tx.session, record.base_model):
        return False  # a supervisor reports its own engine, but another engine serves
    if record.state == EngineState.FAILED:
        tx.session.get(EngineRow, record.base_model, with_for_update=True)  # blocks `submit`, which reads it
    tx.session.merge(to_row(record, EngineRow))
    return record.state == EngineState.FAILED


def pending_models(session: Session, base_model: str, after: int) -> set[str]:
    """Return the models that `fail_some` changes."""
    rows = session.connection().execute(_PENDING, {"base_model": base_model, "after": after})
    return {row.subject_id for row in rows if row.ordered}


def fail_some(tx: Transaction, base_model: str, after: int) -> int | None:
    """Fail some of what is pending for an engine that was given up, if its id is greater than `after`.

    Return the greatest id that failed, or None if nothing is left. `submit` refuses what comes later.
    """
    engine = tx.session.get(EngineRow, base_model, with_for_update={"read": True})
    if engine is None or engine.state != EngineState.FAILED:
        return None  # the next engine has started, and runs what is left
    connection = tx.session.connection()
    rows = connection.execute(_PENDING.with_for_update(of=OPERATIONS), {"base_model": base_model, "after": after}).all()
    if not rows:
        return None
    models = sorted({row.subject_id for row in rows if row.ordered})
    connection.execute(_LOSE, {"models": models, "reason": engine.detail})
    failed = submitting.no_engine(base_model, engine.detail)
    log.fail(tx, rows, failed)
    _, encoded = encode_result(failed)
    samples = [row for row in rows if not row.ordered]
    tx.finished.extend(
        Finished(row.subject_id, row.seq_id, row.request_id, succeeded=False, size_bytes=len(encoded))
        for row in samples
    )
    last: int = rows[-1].id
    return last


def running_since(session: Session) -> dict[str, datetime]:
    """Return when the oldest running operation of each base model was claimed."""
    return {row.base_model: row.since for row in session.connection().execute(_RUNNING_SINCE)}


def list_all(session: Session) -> list[EngineRecord]:
    rows = session.exec(select(EngineRow).order_by(EngineRow.base_model))
    return [to_record(row, EngineRecord) for row in rows]
