"""A model's row, as the transactions that change its log read and write it; and its recovery points.

A recovery can start from these training states on disk.
"""

from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection

from tinsmith.sql_store.statements import Change, Query, fields_of, put_into, values_of
from tinsmith.store import WAITS_FOR_PLACE, RecoveryPointRecord, RunState
from tinsmith.store.refusals import missing

LIVE: Final = (RunState.CREATING, RunState.READY, RunState.PARKED)
IS_LIVE: Final = "runs.state IN ('creating', 'ready', 'parked')"


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

    @property
    def has_no_place(self) -> bool:
        return self.waits_for_place or self.state == RunState.PARKED


_SELECT: Final = "SELECT FIELDS FROM runs WHERE model_id = :model_id"
_FIND = Query(_SELECT, Run)
_LOCK = Query(f"{_SELECT} FOR UPDATE", Run)
_TENANT = Query("SELECT tenant FROM runs WHERE model_id = :model_id", str)
_WRITE = Change(
    "UPDATE runs SET state = :state, state_reason = :state_reason, next_seq_id = :next_seq_id, "
    "applied_seq_id = :applied_seq_id, arrived_seq_id = :arrived_seq_id, unload_seq_id = :unload_seq_id, "
    "rebuilds = :rebuilds WHERE model_id = :model_id"
)

POINTS = Query(
    "SELECT FIELDS FROM recovery_points WHERE model_id = :model_id ORDER BY seq_id DESC", RecoveryPointRecord
)
_PUT_POINT = Change(put_into("recovery_points", *fields_of(RecoveryPointRecord), key="model_id, seq_id"))
DELETE_POINTS = Change("DELETE FROM recovery_points WHERE model_id = :model_id")
DELETE_POINT = Change(f"{DELETE_POINTS.text} AND seq_id = :seq_id")


def find(connection: Connection, model_id: str) -> Run | None:
    return _FIND.first(connection, model_id=model_id)


def locked(connection: Connection, model_id: str) -> Run | None:
    """Lock the model's row for this transaction. Every change of a model's log starts with it."""
    return _LOCK.first(connection, model_id=model_id)


def write(connection: Connection, run: Run) -> None:
    _WRITE.run(connection, **values_of(run))


def keep_newest_points(connection: Connection, record: RecoveryPointRecord, keep: int) -> None:
    _PUT_POINT.run(connection, **values_of(record))
    for each in POINTS.all(connection, model_id=record.model_id)[keep:]:
        DELETE_POINT.run(connection, model_id=each.model_id, seq_id=each.seq_id)


def tenant_of_run(connection: Connection, model_id: str) -> str:
    """Return whose run it is. Raise NotFoundError if there is none."""
    tenant = _TENANT.first(connection, model_id=model_id)
    if tenant is None:
        raise missing("model", model_id)
    return tenant
