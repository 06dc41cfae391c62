"""The rollouts of passes, and the rewards that clients logged: a row for each pass, and one for a step's rewards."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from sqlalchemy import Connection

from tinsmith.sql_store.group_commit import locks
from tinsmith.sql_store.statements import CHUNK, Change, Query, insert_into
from tinsmith.sql_store.subjects import metrics
from tinsmith.sql_store.transaction import Transaction, the_model
from tinsmith.store import OF_CLIENT, RolloutsRow, RolloutsTrained
from tinsmith.store.rollouts import row_bytes, with_rewards


class _Size(NamedTuple):
    step: int
    seq_id: int
    num_bytes: int


_OF_MODEL: Final = "FROM rollouts WHERE model_id = :model"
_PUT = Change(
    f"{insert_into('rollouts', 'model_id', 'step', 'seq_id', 'number', 'num_bytes', 'content')} "
    "ON CONFLICT (model_id, step, seq_id) DO UPDATE SET number = :number, num_bytes = :num_bytes, content = :content"
)
_SIZE = Query(f"SELECT num_bytes {_OF_MODEL} AND step = :step AND seq_id = :seq_id", int)
_CHANGE = Change("UPDATE runs SET rollout_bytes = rollout_bytes + :more WHERE model_id = :model")
_TOTAL = Query("SELECT rollout_bytes FROM runs WHERE model_id = :model", int)
_OLDEST = Query(f"SELECT FIELDS {_OF_MODEL} ORDER BY step, seq_id LIMIT {CHUNK}", _Size)
_DELETE = Change(f"DELETE {_OF_MODEL} AND step = :step AND seq_id = :seq_id")
_READ = Query(f"SELECT FIELDS {_OF_MODEL} AND step = :step ORDER BY seq_id", RolloutsRow)
_STEPS = Query(f"SELECT DISTINCT step {_OF_MODEL} AND seq_id <> {OF_CLIENT} ORDER BY step", int)
_REWARDS = Query(f"SELECT content {_OF_MODEL} AND step = :step AND seq_id = {OF_CLIENT}", bytes)
DELETE_OF_DELETED = Change(
    "DELETE FROM rollouts WHERE model_id IN :keys "
    "AND NOT EXISTS (SELECT 1 FROM runs WHERE runs.model_id = rollouts.model_id)"
)


def keep(tx: Transaction, trained: RolloutsTrained) -> None:
    row = RolloutsRow(step=trained.step, seq_id=trained.seq_id, number=trained.number, content=trained.content)
    _keep(tx.connection, trained.model_id, row, trained.max_bytes)


@locks(the_model)
def log_rewards(tx: Transaction, model_id: str, step: int, rewards: Mapping[bytes, float], max_bytes: int) -> None:
    metrics.written(tx.connection, model_id)  # raises an error if there is no such run
    before = _REWARDS.first(tx.connection, model=model_id, step=step)
    row = RolloutsRow(step=step, seq_id=OF_CLIENT, number=0, content=with_rewards(before, step, rewards))
    _keep(tx.connection, model_id, row, max_bytes)


def _keep(connection: Connection, model_id: str, row: RolloutsRow, max_bytes: int) -> None:
    key, size = {"model": model_id, "step": row.step, "seq_id": row.seq_id}, row_bytes(model_id, row.content)
    before = _SIZE.first(connection, **key)
    _PUT.run(
        connection,
        model_id=model_id,
        step=row.step,
        seq_id=row.seq_id,
        number=row.number,
        num_bytes=size,
        content=row.content,
    )
    _CHANGE.run(connection, model=model_id, more=size - (before or 0))
    excess = _TOTAL.one(connection, model=model_id) - max_bytes
    while excess > 0 and (oldest := _OLDEST.all(connection, model=model_id)):
        for each in oldest:
            if excess > 0:
                _DELETE.run(connection, model=model_id, step=each.step, seq_id=each.seq_id)
                _CHANGE.run(connection, model=model_id, more=-each.num_bytes)
                excess -= each.num_bytes


def steps(connection: Connection, model_id: str) -> list[int]:
    return _STEPS.all(connection, model=model_id)


def read(connection: Connection, model_id: str, step: int) -> list[RolloutsRow]:
    return _READ.all(connection, model=model_id, step=step)
