"""A model's row, as the transactions that change its log read and write it."""

from dataclasses import dataclass, fields
from typing import Final

from sqlalchemy import Connection

from tinsmith.sql_store.statements import Change, Query
from tinsmith.store import WAITS_FOR_PLACE, RunState

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


def find(connection: Connection, model_id: str) -> Run | None:
    return _FIND.first(connection, model_id=model_id)


def locked(connection: Connection, model_id: str) -> Run | None:
    """Lock the model's row for this transaction. Every change of a model's log starts with it."""
    return _LOCK.first(connection, model_id=model_id)


def write(connection: Connection, run: Run) -> None:
    _WRITE.run(connection, **{name: getattr(run, name) for name in _NAMES})
