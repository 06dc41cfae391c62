"""Leases: at most one engine of a base model records anything. Leases expire by the database's clock.

Every write of an engine calls `fence` first, in the same transaction. It locks the lease's row, so a takeover waits
until the write is committed, and a write after the takeover finds the higher epoch.
"""

import asyncio
from contextlib import suppress
from datetime import datetime, timedelta

import sqlalchemy
from sqlalchemy import bindparam
from sqlmodel import Session

from tinsmith.errors import LeaseLostError
from tinsmith.sql_store.columns import DatabaseNow
from tinsmith.sql_store.prepared import Prepared
from tinsmith.sql_store.subjects.transaction import Connections, Transaction
from tinsmith.sql_store.tables import LEASES
from tinsmith.store import Lease, LeaseHeld

_LONG_AGO = datetime.fromisoformat("1970-01-01T00:00:00+00:00")
_OURS = LEASES.c.base_model == bindparam("base_model")
_FIND = sqlalchemy.select(LEASES.c.epoch, LEASES.c.engine_id, LEASES.c.expires_at, DatabaseNow().label("now")).where(
    _OURS
)
_LOCK, _SHARE = _FIND.with_for_update(), Prepared(_FIND.with_for_update(read=True))
_OVERDUE = sqlalchemy.select(LEASES.c.engine_id, LEASES.c.expires_at, DatabaseNow().label("now")).where(
    LEASES.c.engine_id.is_not(None), LEASES.c.expires_at < DatabaseNow()
)
_INSERT = LEASES.insert().values(base_model=bindparam("base_model"), epoch=0, engine_id=None, expires_at=_LONG_AGO)
_UPDATE = (
    LEASES.update()
    .where(LEASES.c.base_model == bindparam("model"))
    .values(epoch=bindparam("new_epoch"), engine_id=bindparam("new_engine"), expires_at=bindparam("until"))
)


def topic(base_model: str) -> str:
    return f"lease {base_model}"


def acquire(
    tx: Transaction, base_model: str, *, engine_id: str, duration_s: float, dead: str | None = None
) -> Lease | LeaseHeld:
    connection = tx.session.connection()
    if connection.execute(_FIND, {"base_model": base_model}).first() is None:
        connection.execute(_INSERT, {"base_model": base_model})
    row = connection.execute(_LOCK, {"base_model": base_model}).one()
    if row.engine_id not in (None, engine_id, dead) and row.now < row.expires_at:
        remaining_s = (row.expires_at - row.now).total_seconds()
        return LeaseHeld(base_model=base_model, engine_id=row.engine_id, remaining_s=remaining_s, until=row.expires_at)
    epoch = row.epoch if row.engine_id == engine_id else row.epoch + 1
    lease = Lease(base_model=base_model, engine_id=engine_id, epoch=epoch, duration_s=duration_s)
    _extend(tx.session, lease, row.now)
    return lease


def renew(tx: Transaction, lease: Lease) -> None:
    row = tx.session.connection().execute(_LOCK, {"base_model": lease.base_model}).first()
    _refuse_superseded(lease, row)
    assert row is not None
    _extend(tx.session, lease, row.now)


async def wait_for_lease(connections: Connections, base_model: str, timeout_s: float) -> None:
    with connections.wakeups.subscribe(topic(base_model)) as told, suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await told.wait()


def release(tx: Transaction, base_model: str, engine_id: str) -> None:
    row = tx.session.connection().execute(_LOCK, {"base_model": base_model}).first()
    if row is not None and row.engine_id == engine_id:
        values = {"model": base_model, "new_epoch": row.epoch, "new_engine": None, "until": row.now}
        tx.session.connection().execute(_UPDATE, values)
        tx.wake.append(topic(base_model))


def fence(tx: Transaction, lease: Lease) -> None:
    """Raise LeaseLostError if another engine has taken the lease over. Renew the lease if it has expired."""
    row = _SHARE.first(tx.session.connection(), {"base_model": lease.base_model})
    _refuse_superseded(lease, row)
    assert row is not None
    if row.expires_at <= row.now:
        _extend(tx.session, lease, row.now)


def overdue(session: Session) -> dict[str, float]:
    """Return for how many seconds each lease has run out, by the engine that holds it still."""
    return {row.engine_id: (row.now - row.expires_at).total_seconds() for row in session.connection().execute(_OVERDUE)}


def is_held(session: Session, base_model: str) -> bool:
    row = session.connection().execute(_FIND, {"base_model": base_model}).first()
    return row is not None and row.engine_id is not None and row.now < row.expires_at


def _refuse_superseded(lease: Lease, row: sqlalchemy.Row[tuple[int, str | None, datetime, datetime]] | None) -> None:
    if row is not None and (row.epoch, row.engine_id) == (lease.epoch, lease.engine_id):
        return
    now = "nobody" if row is None or row.engine_id is None else f"engine {row.engine_id!r} with epoch {row.epoch}"
    msg = (
        f"engine {lease.engine_id!r} of {lease.base_model!r} no longer holds its lease (epoch {lease.epoch}): "
        f"{now} holds it; nothing that this engine does is recorded any more"
    )
    raise LeaseLostError(msg)


def _extend(session: Session, lease: Lease, now: datetime) -> None:
    until = now + timedelta(seconds=lease.duration_s)
    values = {"model": lease.base_model, "new_epoch": lease.epoch, "new_engine": lease.engine_id, "until": until}
    session.connection().execute(_UPDATE, values)
