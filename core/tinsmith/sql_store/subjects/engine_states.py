"""The reports of engines, and the failure of pending operations when an engine is given up."""

from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Connection

from tinsmith.failpoints import durable_boundary
from tinsmith.sql_store.statements import CHUNK, Change, Query, fields_of, put_into, values_of
from tinsmith.sql_store.subjects import leases, log, submitting
from tinsmith.sql_store.subjects.transaction import Connections, Transaction
from tinsmith.store import EngineRecord, EngineState, Lease, ReportedFigures
from tinsmith.store.refusals import no_engine


class _Running(NamedTuple):
    base_model: str
    since: datetime


# Without operations of ready models: the next engine rebuilds these and continues.
_PENDING = (
    f"{log.OPERATION} WHERE base_model = :base_model "
    "AND (operations.state = 'queued' OR operations.state = 'running') AND id > :after "
    "AND NOT EXISTS (SELECT 1 FROM runs WHERE operations.ordered AND runs.model_id = operations.subject_id "
    f"AND runs.state IN ('ready', 'parked')) ORDER BY id LIMIT {CHUNK}"
)
_SOME = Query(_PENDING, log.Operation)
_SOME_LOCKED = Query(f"{_PENDING} FOR UPDATE OF operations", log.Operation)
_STATE = "SELECT FIELDS FROM engines WHERE base_model = :base_model"
_LOCK, _SHARE = Query(f"{_STATE} FOR UPDATE", submitting.Engine), Query(f"{_STATE} FOR SHARE", submitting.Engine)
_RUNNING_SINCE = Query(
    "SELECT base_model, min(started_at) AS since FROM operations WHERE operations.state = 'running' "
    "GROUP BY base_model",
    _Running,
)
_LOSE = Change(
    "UPDATE runs SET state = 'lost', state_reason = :reason WHERE model_id IN :models AND state = 'creating'"
)
_LIST = Query("SELECT FIELDS FROM engines ORDER BY base_model", EngineRecord)
_PUT = Change(put_into("engines", *fields_of(EngineRecord), key="base_model"))
_FIGURES = Query("SELECT FIELDS FROM engine_figures ORDER BY base_model", ReportedFigures)
_PUT_FIGURES = Change(put_into("engine_figures", *fields_of(ReportedFigures), key="base_model"))


@durable_boundary("store.report_engine")
async def report_engine(connections: Connections, record: EngineRecord, *, lease: Lease | None = None) -> None:
    writer = connections.durable if record.state == EngineState.FAILED else connections.relaxed
    if await writer.write(report, record, lease):
        await _fail_pending(connections, record.base_model)


async def _fail_pending(connections: Connections, base_model: str) -> None:
    """In chunks, so that other writes come in between. If this process dies, the next engine runs what is left."""
    last: int | None = 0
    while last is not None:
        last = await connections.durable.write_locking(pending_models, fail_some, base_model, last)


def report(tx: Transaction, record: EngineRecord, lease: Lease | None) -> bool:
    """Return whether the engine is given up, so that what is pending for it must fail."""
    if lease is not None:
        leases.fence(tx, lease)
    elif leases.is_held(tx.connection, record.base_model):
        return False  # a supervisor reports its own engine, but another engine serves
    if record.state == EngineState.FAILED:
        _LOCK.first(tx.connection, base_model=record.base_model)  # blocks `submit`, which reads it
    _PUT.run(tx.connection, **values_of(record))
    return record.state == EngineState.FAILED


def pending_models(connection: Connection, base_model: str, after: int) -> set[str]:
    """Return the models that `fail_some` changes."""
    rows = _SOME.all(connection, base_model=base_model, after=after)
    return {row.subject_id for row in rows if row.ordered}


def fail_some(tx: Transaction, base_model: str, after: int) -> int | None:
    """Fail some operations pending for an engine that was given up: ids above `after`.

    Return the greatest id that failed, or None if nothing is left. `submit` refuses what comes later.
    """
    engine = _SHARE.first(tx.connection, base_model=base_model)
    if engine is None or engine.state != EngineState.FAILED:
        return None  # the next engine has started, and runs what is left
    rows = _SOME_LOCKED.all(tx.connection, base_model=base_model, after=after)
    if not rows:
        return None
    models = sorted({row.subject_id for row in rows if row.ordered})
    _LOSE.run(tx.connection, models=models, reason=engine.detail)
    log.fail(tx, rows, no_engine(base_model, engine.detail))
    return rows[-1].id


def running_since(connection: Connection) -> dict[str, datetime]:
    """Return when the oldest running operation of each base model was claimed."""
    return {row.base_model: row.since for row in _RUNNING_SINCE.all(connection)}


def list_all(connection: Connection) -> list[EngineRecord]:
    return _LIST.all(connection)


def report_figures(tx: Transaction, lease: Lease, report: bytes) -> None:
    leases.fence(tx, lease)
    reported = ReportedFigures(base_model=lease.base_model, reported_at=tx.now, report=report)
    _PUT_FIGURES.run(tx.connection, **values_of(reported))


def list_figures(connection: Connection) -> list[ReportedFigures]:
    return _FIGURES.all(connection)
