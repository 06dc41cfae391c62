"""Deleting what is past its retention, except what a recovery could need."""

from datetime import datetime, timedelta
from typing import Final

import sqlalchemy
from sqlalchemy import bindparam, delete
from sqlmodel import Session, and_, col, func, or_, select, update

from tinsmith.failpoints import durable_boundary
from tinsmith.sql_store.subjects import log, routed_experts, windows
from tinsmith.sql_store.subjects.transaction import Connections, Transaction
from tinsmith.sql_store.tables import (
    FINISHED_SAMPLES,
    OPERATIONS,
    PAYLOADS,
    RESULTS,
    CheckpointRow,
    OperationRow,
    RecoveryPointRow,
    RetentionRow,
    RunRow,
)

_PART: Final = 500  # operations that one transaction deletes
_SAMPLES_KEPT_LONGER: Final = timedelta(hours=3)
"""The SDK asks for the samples of a client for up to two hours."""
_SIZES = (
    sqlalchemy.select(
        OPERATIONS.c.tenant,
        OPERATIONS.c.kind,
        func.sum(func.coalesce(func.length(PAYLOADS.c.payload), 0) + func.coalesce(func.length(RESULTS.c.result), 0)),
    )
    .join_from(OPERATIONS, PAYLOADS, PAYLOADS.c.operation_id == OPERATIONS.c.id, isouter=True)
    .join(RESULTS, RESULTS.c.operation_id == OPERATIONS.c.id, isouter=True)
    .where(OPERATIONS.c.id.in_(bindparam("ids", expanding=True)))
    .group_by(OPERATIONS.c.tenant, OPERATIONS.c.kind)
)


@durable_boundary("store.prune")
async def prune(connections: Connections, finished_before: datetime, *, idle_since: datetime | None = None) -> int:
    durable, idle_since = connections.durable, idle_since or finished_before
    pruned = 0
    while part := await durable.write_locking(
        models_of, operations, finished_before, idle_since=idle_since, limit=_PART
    ):
        pruned += part
    await durable.write(finished_samples, finished_before)
    forgotten = await durable.write(deleted_checkpoints, finished_before)
    forgotten += await durable.write(routed_experts.prune, finished_before)
    await durable.scrub(deleted=pruned + forgotten > 0)
    return pruned


def models_of(session: Session, finished_before: datetime, *, idle_since: datetime, limit: int) -> set[str]:
    """Return the models of which `operations` would delete something."""
    rows = (
        _unneeded(finished_before, idle_since)
        .limit(limit)
        .with_only_columns(OperationRow.subject_id, OperationRow.ordered)
    )
    return {subject_id for subject_id, ordered in session.connection().execute(rows) if ordered}


def operations(tx: Transaction, finished_before: datetime, *, idle_since: datetime, limit: int) -> int:
    """Delete at most `limit` operations. Remember up to when, so that later requests for them get the right error."""
    log.one_at_a_time(tx.session, "prune")
    rows = tx.session.exec(_unneeded(finished_before, idle_since).limit(limit)).all()
    for row in rows:
        if row.ordered:
            behind = col(RunRow.model_id) == row.subject_id, col(RunRow.pruned_seq_id) < row.seq_id
            tx.session.exec(update(RunRow).where(*behind).values(pruned_seq_id=row.seq_id))
    _delete_content(tx, [row.id for row in rows if row.id is not None])
    for row in rows:
        tx.session.delete(row)
    _remember(tx, finished_before)
    return len(rows)


def _delete_content(tx: Transaction, ids: list[int]) -> None:
    """Delete payloads and results, without reading them."""
    tx.session.flush()
    connection = tx.session.connection()
    for tenant, kind, num_bytes in connection.execute(_SIZES, {"ids": ids}).all():
        tx.pending.removed(tenant, kind, int(num_bytes))
    for table in (PAYLOADS, RESULTS):
        connection.execute(table.delete().where(table.c.operation_id.in_(ids)))


def _unneeded(finished_before: datetime, idle_since: datetime):  # type: ignore[no-untyped-def]  # sqlmodel's select has no public name
    oldest = (
        select(func.min(RecoveryPointRow.seq_id)).where(RecoveryPointRow.model_id == RunRow.model_id).scalar_subquery()
    )
    return (
        select(OperationRow)
        .join(RunRow, col(RunRow.model_id) == OperationRow.subject_id, isouter=True)
        .where(
            col(OperationRow.finished_at) < finished_before,
            or_(
                col(RunRow.model_id).is_(None),
                and_(
                    or_(
                        col(RunRow.state).not_in(log.LIVE),
                        and_(
                            # a refused operation whose turn has not come: without its row there would be a gap
                            col(OperationRow.seq_id) < col(RunRow.next_seq_id),
                            col(OperationRow.seq_id) <= oldest,
                            windows.is_done_with(),
                        ),
                    ),
                    or_(idle_since >= finished_before, col(RunRow.last_request_at) < idle_since),
                ),
            ),
        )
        .order_by(col(OperationRow.finished_at))
    )


def _remember(tx: Transaction, finished_before: datetime) -> None:
    retention = tx.session.get(RetentionRow, 1)
    if retention is None:
        tx.session.add(RetentionRow(id=1, finished_before=finished_before))
    elif retention.finished_before < finished_before:
        retention.finished_before = finished_before


def finished_samples(tx: Transaction, finished_before: datetime) -> None:
    old = FINISHED_SAMPLES.c.finished_at < finished_before - _SAMPLES_KEPT_LONGER
    tx.session.connection().execute(FINISHED_SAMPLES.delete().where(old))


def deleted_checkpoints(tx: Transaction, deleted_before: datetime) -> int:
    old = delete(CheckpointRow).where(col(CheckpointRow.deleted_at) < deleted_before)
    return tx.session.connection().execute(old).rowcount
