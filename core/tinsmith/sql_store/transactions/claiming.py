"""Claiming: giving an engine operations that can run."""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Final

import sqlalchemy
from sqlalchemy import bindparam, func
from sqlmodel import Session

from tinsmith.sql_store.tables import OPERATIONS, PAYLOADS, QUEUED, RUNS
from tinsmith.sql_store.transactions import leases, log
from tinsmith.sql_store.transactions.writer import Transaction
from tinsmith.store import Lease, OperationRecord, OperationState

_PART: Final = 500  # values of one IN list

_Place = tuple[int, int, int]
"""An operation's place in its tenant's queue, the id of the last operation it had to wait for, and its own id.

Sorted by place, so tenants take turns.
"""

_OURS = OPERATIONS.c.base_model == bindparam("base_model")
_ANY_QUEUED = sqlalchemy.select(OPERATIONS.c.id).where(_OURS, QUEUED).limit(1)
_SOME_QUEUED = _ANY_QUEUED.where(OPERATIONS.c.ordered == bindparam("ordered"))
_ALONE = sqlalchemy.or_(sqlalchemy.not_(bindparam("alone", type_=sqlalchemy.Boolean)), OPERATIONS.c.alone)
_SAMPLES = (
    sqlalchemy.select(
        func.row_number().over(partition_by=OPERATIONS.c.tenant, order_by=OPERATIONS.c.id).label("place"),
        OPERATIONS.c.id,
    )
    .where(_OURS, OPERATIONS.c.ordered.is_(False), QUEUED, _ALONE)
    .order_by("place", OPERATIONS.c.id)
    .limit(bindparam("limit"))
)
_IN_ORDER = (
    sqlalchemy.select(
        OPERATIONS.c.subject_id,
        OPERATIONS.c.id,
        OPERATIONS.c.tenant,
        OPERATIONS.c.state,
        OPERATIONS.c.seq_id,
        OPERATIONS.c.alone,
        RUNS.c.next_seq_id,
    )
    .join_from(OPERATIONS, RUNS, RUNS.c.model_id == OPERATIONS.c.subject_id)
    .where(
        OPERATIONS.c.subject_id.in_(
            sqlalchemy.select(OPERATIONS.c.subject_id).where(_OURS, OPERATIONS.c.ordered, QUEUED)
        ),
        OPERATIONS.c.seq_id >= RUNS.c.next_seq_id,
    )
    .order_by(OPERATIONS.c.subject_id, OPERATIONS.c.seq_id)
)
_AMONG = OPERATIONS.c.id.in_(bindparam("ids", expanding=True))
_SUBJECTS = sqlalchemy.select(OPERATIONS.c.subject_id).where(_OURS, OPERATIONS.c.ordered, QUEUED).distinct()
_LOCK = sqlalchemy.select(OPERATIONS.c.id).where(_AMONG, QUEUED).with_for_update(skip_locked=True)
_START = (
    OPERATIONS.update()
    .where(_AMONG)
    .values(
        state=OperationState.RUNNING,
        started_at=bindparam("now"),
        engine_id=bindparam("engine"),
        attempts=OPERATIONS.c.attempts + 1,
    )
)
_CLAIMED = (
    sqlalchemy.select(OPERATIONS.c.id.label("key"), *log.RECORD_COLUMNS, PAYLOADS.c.payload)
    .join_from(OPERATIONS, PAYLOADS, PAYLOADS.c.operation_id == OPERATIONS.c.id)
    .where(_AMONG)
)
_ADVANCE = RUNS.update().where(RUNS.c.model_id == bindparam("model")).values(next_seq_id=bindparam("next"))


def any_queued(session: Session, base_model: str, *, ordered: bool | None = None) -> bool:
    """Look without writing, so that an idle engine costs no transaction. Operations found may still have to wait."""
    query = _ANY_QUEUED if ordered is None else _SOME_QUEUED
    values = {"base_model": base_model} | ({} if ordered is None else {"ordered": ordered})
    return session.connection().execute(query, values).first() is not None


def models_to_claim(session: Session, base_model: str) -> list[str]:
    return list(session.connection().execute(_SUBJECTS, {"base_model": base_model}).scalars())


def claim(
    tx: Transaction, lease: Lease, *, max_operations: int, ordered: bool | None, alone: bool
) -> list[OperationRecord]:
    leases.fence(tx, lease)
    found: list[_Place] = []
    if ordered is not False:
        found += _runnable_in_order(tx.session, lease.base_model, alone=alone)
    if ordered is not True:
        found += _samples(tx.session, lease.base_model, max_operations, alone=alone)
    found.sort(key=lambda each: each[:2])  # stable, as below
    ids = [operation_id for _, _, operation_id in found[:max_operations]]
    records: dict[int, OperationRecord] = {}
    for start in range(0, len(ids), _PART):
        records |= _start(tx, ids[start : start + _PART], lease.engine_id)
    claimed = [records[operation_id] for operation_id in ids if operation_id in records]
    _advance_models(tx.session, claimed)
    return claimed


def _start(tx: Transaction, ids: Sequence[int], engine_id: str) -> dict[int, OperationRecord]:
    """Skip samples that are being cancelled right now. Operations of models are locked with their model."""
    connection = tx.session.connection()
    ids = connection.execute(_LOCK, {"ids": ids}).scalars().all()
    if not ids:
        return {}
    connection.execute(_START, {"ids": ids, "now": tx.now, "engine": engine_id})
    records = {}
    for row in connection.execute(_CLAIMED, {"ids": ids}).mappings():
        values = dict(row)
        key = values.pop("key")
        records[key] = OperationRecord(**values)
    return records


def _samples(session: Session, base_model: str, limit: int, *, alone: bool) -> list[_Place]:
    """Return each tenant's oldest samples."""
    found = session.connection().execute(_SAMPLES, {"base_model": base_model, "limit": limit, "alone": alone})
    return [(place, operation_id, operation_id) for place, operation_id in found]


def _runnable_in_order(session: Session, base_model: str, *, alone: bool) -> list[_Place]:
    """Return the operations of each model that are queued from `next_seq_id` on without a gap."""
    found = session.connection().execute(_IN_ORDER, {"base_model": base_model})
    runnable: list[tuple[int, str, int]] = []  # the last id of it and its predecessors, tenant, id
    for _, rows in groupby(found, key=lambda row: row.subject_id):
        arrived = 0
        for number, row in enumerate(rows):
            if row.seq_id != row.next_seq_id + number:
                break
            arrived = max(arrived, row.id)
            if row.state == OperationState.QUEUED and (row.alone or not alone):
                runnable.append((arrived, row.tenant, row.id))
    runnable.sort(key=lambda each: each[0])  # stable: a model's operations stay in order
    places: Counter[str] = Counter()
    placed = []
    for arrived, tenant, operation_id in runnable:
        places[tenant] += 1
        placed.append((places[tenant], arrived, operation_id))
    return placed


def _advance_models(session: Session, claimed: Sequence[OperationRecord]) -> None:
    """Move each model's next_seq_id past the claimed operations, and past refused ones between them."""
    last: dict[str, int] = {}
    for record in claimed:
        if record.ordered:
            last[record.subject_id] = max(last.get(record.subject_id, -1), record.seq_id)
    if last:
        values = [{"model": model_id, "next": seq_id + 1} for model_id, seq_id in last.items()]
        session.connection().execute(_ADVANCE, values)
