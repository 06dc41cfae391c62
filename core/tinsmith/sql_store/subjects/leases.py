"""Leases: at most one engine of a base model records anything. Leases expire by the database's clock.

Every write of an engine calls `fence` first, in the same transaction. It locks the lease's row, so a takeover waits
until the write is committed, and a write after the takeover finds the higher epoch.
"""

from datetime import datetime, timedelta
from typing import NamedTuple

from sqlalchemy import Connection

from tinsmith.sql_store.statements import Change, Query
from tinsmith.sql_store.subjects.transaction import Connections, Transaction
from tinsmith.store import Lease, LeaseHeld
from tinsmith.store.refusals import lease_lost
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


async def wait_for_lease(connections: Connections, base_model: str, timeout_s: float) -> None:
    await connections.wakeups.next(lease_topic(base_model), timeout_s)


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


def is_held(connection: Connection, base_model: str) -> bool:
    row = _FIND.first(connection, base_model=base_model)
    return row is not None and row.engine_id is not None and row.now < row.expires_at


def _refuse_superseded(lease: Lease, row: _Row | None) -> None:
    if row is not None and (row.epoch, row.engine_id) == (lease.epoch, lease.engine_id):
        return
    raise lease_lost(lease, row and row.engine_id, row and row.epoch)


def _extend(connection: Connection, lease: Lease, now: datetime) -> None:
    until = now + timedelta(seconds=lease.duration_s)
    _UPDATE.run(connection, base_model=lease.base_model, epoch=lease.epoch, engine_id=lease.engine_id, until=until)
