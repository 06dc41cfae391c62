"""Putting what an engine was running back into the queue, and giving up what keeps ending engines."""

from collections.abc import Collection

from sqlmodel import col, select

from tinsmith.failpoints import durable_boundary
from tinsmith.operations import Failed
from tinsmith.sql_store.subjects import leases, log, lost_models
from tinsmith.sql_store.subjects.transaction import Connections, Transaction
from tinsmith.sql_store.tables import RUNNING, OperationRow
from tinsmith.store import Lease, OperationState

_CREATION = "create_model"


@durable_boundary("store.requeue")
async def requeue_operations(
    connections: Connections,
    lease: Lease,
    *,
    max_attempts: int,
    reason: str | None,
    max_interruptions: int | None = None,
    held: Collection[str] = (),
) -> list[str]:
    return await connections.durable.write(
        requeue,
        lease,
        max_attempts=max_attempts,
        reason=reason,
        max_interruptions=max_interruptions,
        held=frozenset(held),  # now: the engine goes on
    )


def requeue(
    tx: Transaction,
    lease: Lease,
    *,
    max_attempts: int,
    reason: str | None,
    max_interruptions: int | None,
    held: frozenset[str],
) -> list[str]:
    leases.fence(tx, lease)
    running = select(OperationRow).where(OperationRow.base_model == lease.base_model, RUNNING)
    failed = []
    for row in tx.session.exec(running.order_by(col(OperationRow.id)).with_for_update()).all():
        if row.request_id in held or row.state != OperationState.RUNNING:  # its model may be lost by now
            continue
        if reason is None or max_interruptions is not None:
            row.attempts -= 1
        if max_interruptions is not None:
            row.interruptions += 1
        too_often = row.interruptions >= max_interruptions if max_interruptions else row.attempts >= max_attempts
        if reason is not None and too_often:
            failed.append(row.request_id)
            _give_up(tx, row, reason)
            continue
        if reason is not None:
            row.alone = row.ordered or row.attempts >= max_attempts - 1
        _put_back(tx, row)
    tx.wake.append(log.work_topic(lease.base_model))
    return failed


def _put_back(tx: Transaction, row: OperationRow) -> None:
    row.state, row.started_at, row.engine_id = OperationState.QUEUED, None, None
    if row.ordered:
        run = log.locked_run(tx.session, row.subject_id)
        assert run is not None
        run.next_seq_id = min(run.next_seq_id, row.seq_id)


def _give_up(tx: Transaction, row: OperationRow, reason: str) -> None:
    """Fail this operation alone. Its seq_id is used up; if it was a creation, its model is lost."""
    times = row.attempts + row.interruptions
    message = f"the engine ended {times} times while this {row.kind} ran, so it is not tried again: {reason}"
    log.finish(tx, [row], Failed(message=message, category="server"))
    run = log.locked_run(tx.session, row.subject_id) if row.ordered else None
    if run is not None:
        run.applied_seq_id = max(run.applied_seq_id, row.seq_id)
        if row.kind == _CREATION:
            tx.session.flush()
            lost_models.mark_lost(tx, run, f"it could not be created: {message}")
