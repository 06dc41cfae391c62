"""Engines: their leases, their reports, and the failure of what is pending when one is given up.

At most one engine of a base model records anything. Leases expire by the database's clock. Every write of an engine
calls `fence` first, in the same transaction. It locks the lease's row, so a takeover waits until the write is
committed, and a write after the takeover finds the higher epoch.
"""

from datetime import datetime, timedelta
from typing import NamedTuple

from sqlalchemy import Connection

from tinsmith.failpoints import durable_boundary
from tinsmith.sql_store.connections import Connections
from tinsmith.sql_store.group_commit import locks
from tinsmith.sql_store.statements import CHUNK, Change, Query, fields_of, put_into, values_of
from tinsmith.sql_store.subjects import log, submitting
from tinsmith.sql_store.transaction import Transaction
from tinsmith.store import EngineRecord, EngineState, Lease, LeaseHeld, ReportedFigures
from tinsmith.store.refusals import lease_lost, no_engine
from tinsmith.store.wakeups import lease_topic


class _Row(NamedTuple):
    epoch: int
    engine_id: str | None
    expires_at: datetime
    now: datetime  # by the database's clock


_READ = "SELECT epoch, engine_id, expires_at, DATABASE_NOW AS now FROM leases"
_OURS = "WHERE base_model = :base_model"
_FIND = Query(f"{_READ} {_OURS}", _Row)
_LOCK = Query(f"{_READ} {_OURS} FOR UPDATE", _Row)
_SHARE = Query(f"{_READ} {_OURS} FOR SHARE", _Row)
_OVERDUE = Query(f"{_READ} WHERE engine_id IS NOT NULL AND expires_at < DATABASE_NOW", _Row)
_INSERT = Change("INSERT INTO leases (base_model, epoch, engine_id, expires_at) VALUES (:base_model, 0, NULL, 0)")
_UPDATE = Change(f"UPDATE leases SET epoch = :epoch, engine_id = :engine_id, expires_at = :until {_OURS}")


def acquire(
    tx: Transaction, base_model: str, *, engine_id: str, duration_s: float, dead: str | None = None
) -> Lease | LeaseHeld:
    if _FIND.first(tx.connection, base_model=base_model) is None:
        _INSERT.run(tx.connection, base_model=base_model)
    row = _LOCK.first(tx.connection, base_model=base_model)
    assert row is not None
    if row.engine_id not in (None, engine_id, dead) and row.now < row.expires_at:
        remaining_s = (row.expires_at - row.now).total_seconds()
        return LeaseHeld(base_model=base_model, engine_id=row.engine_id, remaining_s=remaining_s, until=row.expires_at)
    epoch = row.epoch if row.engine_id == engine_id else row.epoch + 1
    lease = Lease(base_model=base_model, engine_id=engine_id, epoch=epoch, duration_s=duration_s)
    _extend(tx.connection, lease, row.now)
    return lease


def renew(tx: Transaction, lease: Lease) -> None:
    row = _LOCK.first(tx.connection, base_model=lease.base_model)
    _refuse_superseded(lease, row)
    assert row is not None
    _extend(tx.connection, lease, row.now)


def release(tx: Transaction, base_model: str, engine_id: str) -> None:
    row = _LOCK.first(tx.connection, base_model=base_model)
    if row is not None and row.engine_id == engine_id:
        _UPDATE.run(tx.connection, base_model=base_model, epoch=row.epoch, engine_id=None, until=row.now)
        tx.wake.append(lease_topic(base_model))


def fence(tx: Transaction, lease: Lease) -> None:
    """Raise LeaseLostError if another engine has taken the lease over. Renew the lease if it has expired."""
    row = _SHARE.first(tx.connection, base_model=lease.base_model)
    _refuse_superseded(lease, row)
    assert row is not None
    if row.expires_at <= row.now:
        _extend(tx.connection, lease, row.now)


def overdue(connection: Connection) -> dict[str, float]:
    """Return for how many seconds each lease has run out, by the engine that holds it still."""
    rows = _OVERDUE.all(connection)
    return {str(row.engine_id): (row.now - row.expires_at).total_seconds() for row in rows}


def _is_held(connection: Connection, base_model: str) -> bool:
    row = _FIND.first(connection, base_model=base_model)
    return row is not None and row.engine_id is not None and row.now < row.expires_at


def _refuse_superseded(lease: Lease, row: _Row | None) -> None:
    if row is not None and (row.epoch, row.engine_id) == (lease.epoch, lease.engine_id):
        return
    raise lease_lost(lease, row and row.engine_id, row and row.epoch)


def _extend(connection: Connection, lease: Lease, now: datetime) -> None:
    until = now + timedelta(seconds=lease.duration_s)
    _UPDATE.run(connection, base_model=lease.base_model, epoch=lease.epoch, engine_id=lease.engine_id, until=until)


# reports


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
_LOCK_STATE, _SHARE_STATE = (
    Query(f"{_STATE} FOR UPDATE", submitting.Engine),
    Query(f"{_STATE} FOR SHARE", submitting.Engine),
)
_RUNNING_SINCE = Query(
    "SELECT base_model, min(started_at) AS since FROM operations WHERE operations.state = 'running' "
    "GROUP BY base_model",
    _Running,
)
_LOSE = Change(
    "UPDATE runs SET state = 'lost', state_reason = :reason WHERE model_id IN :models AND state = 'creating'"
)
LIST = Query("SELECT FIELDS FROM engines ORDER BY base_model", EngineRecord)
_PUT = Change(put_into("engines", *fields_of(EngineRecord), key="base_model"))
FIGURES = Query("SELECT FIELDS FROM engine_figures ORDER BY base_model", ReportedFigures)
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
        last = await connections.durable.write(fail_some, base_model, last)


def report(tx: Transaction, record: EngineRecord, lease: Lease | None) -> bool:
    """Return whether the engine is given up, so that what is pending for it must fail."""
    if lease is not None:
        fence(tx, lease)
    elif _is_held(tx.connection, record.base_model):
        return False  # a supervisor reports its own engine, but another engine serves
    if record.state == EngineState.FAILED:
        _LOCK_STATE.first(tx.connection, base_model=record.base_model)  # blocks `submit`, which reads it
    _PUT.run(tx.connection, **values_of(record))
    return record.state == EngineState.FAILED


def _pending_models(connection: Connection, base_model: str, after: int) -> set[str]:
    rows = _SOME.all(connection, base_model=base_model, after=after)
    return {row.subject_id for row in rows if row.ordered}


@locks(_pending_models)
def fail_some(tx: Transaction, base_model: str, after: int) -> int | None:
    """Fail some operations pending for an engine that was given up: ids above `after`.

    Return the greatest id that failed, or None if nothing is left. `submit` refuses what comes later.
    """
    engine = _SHARE_STATE.first(tx.connection, base_model=base_model)
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


def report_figures(tx: Transaction, lease: Lease, report: bytes) -> None:
    fence(tx, lease)
    reported = ReportedFigures(base_model=lease.base_model, reported_at=tx.now, report=report)
    _PUT_FIGURES.run(tx.connection, **values_of(reported))
