"""The engine's side of the log: taking what is runnable, and recording what came of it."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

import sqlalchemy
from sqlalchemy import insert
from sqlmodel import Session, col, func, select, update

from tinsmith.codec import encode_result
from tinsmith.errors import ServerError
from tinsmith.operations import Failed
from tinsmith.sql_store import log
from tinsmith.sql_store.tables import (
    QUEUED,
    UNTOLD,
    CheckpointRow,
    EngineRow,
    OperationRow,
    PayloadRow,
    ResultRow,
    RunRow,
    SamplerRow,
    to_row,
)
from tinsmith.sql_store.writer import Transaction
from tinsmith.store import (
    CheckpointWritten,
    Completion,
    Effect,
    LoraResolved,
    OperationRecord,
    OperationState,
    RunStateChanged,
    SamplerCreated,
)

_PART = 500  # values of one IN list

_Place = tuple[int, int, int]
"""Its place in its tenant's queue, the id of when it could run at the earliest, its own id. Tenants take turns."""


def something_queued(session: Session, base_model: str, *, ordered: bool | None = None) -> bool:
    """Look without writing, so that an idle engine's look costs no transaction. What is queued may have to wait."""
    query = select(OperationRow.id).where(OperationRow.base_model == base_model, QUEUED)
    if ordered is not None:
        query = query.where(col(OperationRow.ordered).is_(ordered))
    return session.exec(query.limit(1)).first() is not None


def claim(
    tx: Transaction, base_model: str, engine_id: str, *, max_operations: int, ordered: bool | None
) -> list[OperationRecord]:
    _refuse_superseded(tx.session, base_model, engine_id)
    found: list[_Place] = []
    if ordered is not False:
        found += _runnable_in_order(tx.session, base_model)
    if ordered is not True:
        found += _unordered(tx.session, base_model, max_operations)
    found.sort(key=lambda each: each[:2])  # stable, as above
    rows = _rows(tx.session, [operation_id for _, _, operation_id in found[:max_operations]])
    _advance_models(tx.session, rows)
    for row in rows:
        row.state, row.started_at, row.engine_id = OperationState.RUNNING, tx.now, engine_id
        row.attempts += 1
    payloads = _payloads(tx.session, rows)
    return [log.record_of(row, payload=payloads[row.id]) for row in rows if row.id is not None]


def _refuse_superseded(session: Session, base_model: str, engine_id: str) -> None:
    engine = session.get(EngineRow, base_model)
    if engine is not None and engine.engine_id not in (None, engine_id):
        msg = (
            f"engine {engine_id!r} of {base_model!r} was superseded by {engine.engine_id!r}: only one engine may serve "
            "a base model of one database"
        )
        raise ServerError(msg)


def _unordered(session: Session, base_model: str, limit: int) -> list[_Place]:
    """Return each tenant's oldest."""
    place = func.row_number().over(partition_by=OperationRow.tenant, order_by=col(OperationRow.id))
    query = (
        sqlalchemy.select(place.label("place"), col(OperationRow.id))
        .where(col(OperationRow.base_model) == base_model, col(OperationRow.ordered).is_(False), QUEUED)
        .order_by("place", col(OperationRow.id))
        .limit(limit)
    )
    return [(place, operation_id, operation_id) for place, operation_id in session.connection().execute(query)]


def _runnable_in_order(session: Session, base_model: str) -> list[_Place]:
    """Return, of each model, what is queued from `next_seq_id` on without a gap."""
    streams = select(OperationRow.stream).where(
        OperationRow.base_model == base_model, col(OperationRow.ordered).is_(True), QUEUED
    )
    query = (
        sqlalchemy.select(
            col(OperationRow.stream),
            col(OperationRow.id),
            col(OperationRow.tenant),
            col(OperationRow.state),
            col(OperationRow.seq_id),
            col(RunRow.next_seq_id),
        )
        .join(RunRow, col(RunRow.model_id) == col(OperationRow.stream))
        .where(col(OperationRow.stream).in_(streams), col(OperationRow.seq_id) >= col(RunRow.next_seq_id))
        .order_by(col(OperationRow.stream), col(OperationRow.seq_id))
    )
    runnable: list[tuple[int, str, int]] = []  # when the last of it and its predecessors came, tenant, id
    for _, rows in groupby(session.connection().execute(query), key=lambda row: row[0]):
        arrived = 0
        for number, (_, operation_id, tenant, state, seq_id, next_seq_id) in enumerate(rows):
            if operation_id is None or seq_id != next_seq_id + number:
                break
            arrived = max(arrived, operation_id)
            if state == OperationState.QUEUED:
                runnable.append((arrived, tenant, operation_id))
    runnable.sort(key=lambda each: each[0])  # stable: a model's operations stay in order
    places: Counter[str] = Counter()
    placed = []
    for arrived, tenant, operation_id in runnable:
        places[tenant] += 1
        placed.append((places[tenant], arrived, operation_id))
    return placed


def _rows(session: Session, ids: Sequence[int]) -> list[OperationRow]:
    """Return the rows in the order of `ids`."""
    rows: dict[int | None, OperationRow] = {}
    for start in range(0, len(ids), _PART):
        query = select(OperationRow).where(col(OperationRow.id).in_(ids[start : start + _PART]))
        rows.update((row.id, row) for row in session.exec(query))
    return [rows[operation_id] for operation_id in ids]


def _advance_models(session: Session, claimed: Iterable[OperationRow]) -> None:
    """Move each model's next_seq_id past what was claimed, and past what had been refused in between."""
    last: dict[str, int] = {}
    for row in claimed:
        if row.ordered:
            last[row.stream] = max(last.get(row.stream, -1), row.seq_id)
    for model_id, seq_id in last.items():
        run = log.locked_run(session, model_id)
        assert run is not None
        run.next_seq_id = seq_id + 1


def _payloads(session: Session, rows: Sequence[OperationRow]) -> dict[int, bytes]:
    ids = [row.id for row in rows]
    payloads: dict[int, bytes] = {}
    for start in range(0, len(ids), _PART):
        query = select(PayloadRow).where(col(PayloadRow.operation_id).in_(ids[start : start + _PART]))
        payloads.update((row.operation_id, row.payload) for row in session.exec(query))
    return payloads


def complete(tx: Transaction, completions: Sequence[Completion]) -> None:
    asked = {completion.request_id: completion for completion in completions}
    ids = sorted(asked)
    rows: list[OperationRow] = []
    for start in range(0, len(ids), _PART):
        query = select(OperationRow).where(col(OperationRow.request_id).in_(ids[start : start + _PART]))
        rows.extend(tx.session.exec(query))
    running = [row for row in rows if row.state == OperationState.RUNNING]
    results = []
    applied: dict[str, int] = {}
    for row in running:
        completion = asked[row.request_id]
        kind, encoded = encode_result(completion.result)
        failed = isinstance(completion.result, Failed)
        row.state = OperationState.FAILED if failed else OperationState.SUCCEEDED
        row.finished_at = tx.now
        results.append({"operation_id": row.id, "result_kind": kind, "result": encoded})
        if row.ordered:
            applied[row.stream] = max(applied.get(row.stream, -1), row.seq_id)
        for effect in completion.effects:
            _apply(tx.session, effect)
        tx.wake.append(log.done_topic(row.request_id))
    if results:
        tx.session.connection().execute(insert(ResultRow), results)
    for model_id, seq_id in applied.items():
        behind = col(RunRow.model_id) == model_id, col(RunRow.applied_seq_id) < seq_id
        tx.session.exec(update(RunRow).where(*behind).values(applied_seq_id=seq_id))


def _apply(session: Session, effect: Effect) -> None:
    """Every effect may be applied twice."""
    match effect:
        case RunStateChanged():
            run = session.get(RunRow, effect.model_id)
            if run is not None:
                run.state, run.state_reason = effect.state, effect.reason
        case LoraResolved():
            run = session.get(RunRow, effect.model_id)
            if run is not None:
                run.lora = effect.lora
        case CheckpointWritten():
            session.merge(to_row(effect.record, CheckpointRow))
        case SamplerCreated():
            session.merge(to_row(effect.record, SamplerRow))


def cancel(tx: Transaction, request_id: str) -> OperationRecord:
    row = log.find(tx.session, request_id)
    if row.ordered or row.state in log.FINISHED:
        return log.get(tx.session, request_id)
    row.cancel_told = row.state != OperationState.RUNNING
    log.finish(tx, [row], Failed(message="cancelled by the client"), OperationState.CANCELLED)
    if not row.cancel_told:
        tx.wake.append(log.work_topic(row.base_model))
    tx.session.flush()
    return log.get(tx.session, request_id)


def untold_cancellations(session: Session, base_model: str) -> bool:
    return session.exec(_untold(base_model).limit(1)).first() is not None


def cancelled(tx: Transaction, base_model: str) -> list[str]:
    rows = tx.session.exec(_untold(base_model)).all()
    for row in rows:
        row.cancel_told = True
    return [row.request_id for row in rows]


def _untold(base_model: str):  # type: ignore[no-untyped-def]  # sqlmodel's select has no public name
    return select(OperationRow).where(OperationRow.base_model == base_model, UNTOLD)
