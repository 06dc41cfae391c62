"""A model's row, as the transactions that change its log read and write it; and its recovery points.

A recovery can start from these training states on disk.
"""

from dataclasses import dataclass, fields
from typing import Final

import sqlalchemy
from sqlalchemy import Connection, bindparam

from tinsmith.sql_store.statements import Change, Query
from tinsmith.sql_store.subjects import leases
from tinsmith.sql_store.subjects.transaction import Transaction
from tinsmith.sql_store.tables import RECOVERY_POINTS, columns_of, put, to_record, to_values
from tinsmith.store import WAITS_FOR_PLACE, Lease, RecoveryPointRecord, RunState
from tinsmith.store.refusals import ahead_of_results, model_not_live

LIVE: Final = (RunState.CREATING, RunState.READY)


@dataclass(slots=True)
class Run:
    """A caller that changes one must call `write`."""

    model_id: str
    session_id: str
    tenant: str
    base_model: str
    state: RunState
    state_reason: str | None
    next_seq_id: int
    applied_seq_id: int
    arrived_seq_id: int  # up to here none is missing; see `submitting.py`
    pruned_seq_id: int
    unload_seq_id: int | None
    rebuilds: int

    @property
    def is_live(self) -> bool:
        return self.state in LIVE

    @property
    def waits_for_place(self) -> bool:
        return self.next_seq_id == WAITS_FOR_PLACE and self.state == RunState.CREATING


_NAMES: Final = tuple(each.name for each in fields(Run))
_SELECT: Final = f"SELECT {', '.join(_NAMES)} FROM runs WHERE model_id = :model_id"
_FIND = Query(_SELECT, Run)
_LOCK = Query(f"{_SELECT} FOR UPDATE", Run)
_WRITE = Change(
    "UPDATE runs SET state = :state, state_reason = :state_reason, next_seq_id = :next_seq_id, "
    "applied_seq_id = :applied_seq_id, arrived_seq_id = :arrived_seq_id, unload_seq_id = :unload_seq_id, "
    "rebuilds = :rebuilds WHERE model_id = :model_id"
)

_POINTS_OF = (
    sqlalchemy.select(*columns_of(RecoveryPointRecord, RECOVERY_POINTS))
    .where(RECOVERY_POINTS.c.model_id == bindparam("model"))
    .order_by(RECOVERY_POINTS.c.seq_id.desc())
)


def find(connection: Connection, model_id: str) -> Run | None:
    return _FIND.first(connection, model_id=model_id)


def locked(connection: Connection, model_id: str) -> Run | None:
    """Lock the model's row for this transaction. Every change of a model's log starts with it."""
    return _LOCK.first(connection, model_id=model_id)


def write(connection: Connection, run: Run) -> None:
    _WRITE.run(connection, **{name: getattr(run, name) for name in _NAMES})


def add_recovery_point(tx: Transaction, lease: Lease, record: RecoveryPointRecord, *, keep: int) -> None:
    leases.fence(tx, lease)
    run = locked(tx.connection, record.model_id)
    if run is None or not run.is_live:
        raise model_not_live(record)
    if record.seq_id > run.applied_seq_id:
        raise ahead_of_results(record, run.applied_seq_id)
    keep_newest_points(tx.connection, record, keep)


def keep_newest_points(connection: Connection, record: RecoveryPointRecord, keep: int) -> None:
    put(connection, RECOVERY_POINTS, to_values(record))
    for each in recovery_points_of(connection, record.model_id)[keep:]:
        _delete_point(connection, each.model_id, each.seq_id)


def recovery_points_of(connection: Connection, model_id: str) -> list[RecoveryPointRecord]:
    return [to_record(row, RecoveryPointRecord) for row in connection.execute(_POINTS_OF, {"model": model_id})]


def drop_recovery_point(tx: Transaction, lease: Lease, model_id: str, seq_id: int) -> None:
    leases.fence(tx, lease)
    _delete_point(tx.connection, model_id, seq_id)


def _delete_point(connection: Connection, model_id: str, seq_id: int) -> None:
    one = RECOVERY_POINTS.c.model_id == model_id, RECOVERY_POINTS.c.seq_id == seq_id
    connection.execute(RECOVERY_POINTS.delete().where(*one))


def drop_recovery_points(connection: Connection, model_id: str) -> None:
    connection.execute(RECOVERY_POINTS.delete().where(RECOVERY_POINTS.c.model_id == model_id))
