"""A model's log, for people: what is there, what it cost, and its results. Nothing here is on a hot path."""

from datetime import datetime

import sqlalchemy
from sqlalchemy import BigInteger, ColumnElement, Connection, func, type_coerce

from tinsmith.sql_store.subjects import models
from tinsmith.sql_store.tables import OPERATIONS, PAYLOADS, RESULTS, RUNS, columns_of, to_record
from tinsmith.store import LoggedOperation, LogTotals, RunLog, RunRecord
from tinsmith.store.refusals import missing

_PAYLOAD_BYTES = func.coalesce(func.length(PAYLOADS.c.payload), 0)
_RESULT_BYTES = func.coalesce(func.length(RESULTS.c.result), 0)
_WITH_CONTENT = OPERATIONS.join(PAYLOADS, PAYLOADS.c.operation_id == OPERATIONS.c.id, isouter=True).join(
    RESULTS, RESULTS.c.operation_id == OPERATIONS.c.id, isouter=True
)
_MICROSECONDS = 1e6
_RUN = sqlalchemy.select(*columns_of(RunRecord, RUNS), RUNS.c.pruned_seq_id)
_RETRIED = sqlalchemy.or_(OPERATIONS.c.attempts > 1, OPERATIONS.c.interruptions > 0)


def run_log(connection: Connection, model_id: str) -> RunLog:
    run = connection.execute(_RUN.where(RUNS.c.model_id == model_id)).first()
    if run is None:
        raise missing("model", model_id)
    return RunLog(
        run=to_record(run, RunRecord),
        pruned_seq_id=run.pruned_seq_id,
        recovery_points=tuple(models.recovery_points_of(connection, model_id)),
    )


def list_log(connection: Connection, model_id: str, *, from_seq_id: int | None, limit: int) -> list[LoggedOperation]:
    wanted = ("seq_id", "request_id", "kind", "state", "num_tokens", "created_at", "started_at", "finished_at")
    query = (
        sqlalchemy.select(
            *(OPERATIONS.c[name] for name in (*wanted, "attempts", "interruptions")),
            _PAYLOAD_BYTES.label("payload_bytes"),
            _RESULT_BYTES.label("result_bytes"),
            RESULTS.c.result_kind,
            RESULTS.c.result,
        )
        .select_from(_WITH_CONTENT)
        .where(OPERATIONS.c.subject_id == model_id)
        .limit(limit)
    )
    if from_seq_id is None:
        query = query.order_by(OPERATIONS.c.seq_id.desc())
    else:
        query = query.where(OPERATIONS.c.seq_id >= from_seq_id).order_by(OPERATIONS.c.seq_id)
    found = [LoggedOperation(**row) for row in connection.execute(query).mappings()]
    return sorted(found, key=lambda each: each.seq_id)


def totals(connection: Connection, model_id: str) -> list[LogTotals]:
    query = (
        sqlalchemy.select(
            OPERATIONS.c.kind,
            OPERATIONS.c.state,
            func.count().label("number"),
            func.sum(OPERATIONS.c.num_tokens),
            func.sum(_PAYLOAD_BYTES),
            func.sum(_RESULT_BYTES),
            func.coalesce(func.sum(_since(OPERATIONS.c.created_at, OPERATIONS.c.started_at)), 0),
            func.coalesce(func.sum(_since(OPERATIONS.c.started_at, OPERATIONS.c.finished_at)), 0),
            func.sum(sqlalchemy.case((_RETRIED, 1), else_=0)),
        )
        .select_from(_WITH_CONTENT)
        .where(OPERATIONS.c.subject_id == model_id)
        .group_by(OPERATIONS.c.kind, OPERATIONS.c.state)
        .order_by(OPERATIONS.c.kind, OPERATIONS.c.state)
    )
    return [
        LogTotals(
            kind=kind,
            state=state,
            number=number,
            num_tokens=int(tokens),
            payload_bytes=int(payload),
            result_bytes=int(result),
            queued_s=int(queued) / _MICROSECONDS,
            run_s=int(run) / _MICROSECONDS,
            retried=int(retried),
        )
        for kind, state, number, tokens, payload, result, queued, run, retried in connection.execute(query)
    ]


def _since(start: ColumnElement[datetime], end: ColumnElement[datetime]) -> ColumnElement[int]:
    return type_coerce(end, BigInteger) - type_coerce(start, BigInteger)
