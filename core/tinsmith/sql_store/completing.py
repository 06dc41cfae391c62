"""Recording what came of operations, and what follows from it, in one transaction."""

from collections.abc import Sequence

import sqlalchemy
from sqlalchemy import bindparam
from sqlmodel import Session

from tinsmith.codec import encode_result
from tinsmith.operations import Failed
from tinsmith.sql_store import log, recovering
from tinsmith.sql_store.tables import (
    OPERATIONS,
    RESULTS,
    RUNNING,
    RUNS,
    CheckpointRow,
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
    OperationState,
    RunStateChanged,
    SamplerCreated,
    SnapshotTaken,
)

_PART = 500  # values of one IN list
_RUNNING = sqlalchemy.select(
    OPERATIONS.c.id, OPERATIONS.c.request_id, OPERATIONS.c.stream, OPERATIONS.c.seq_id, OPERATIONS.c.ordered
).where(OPERATIONS.c.request_id.in_(bindparam("request_ids", expanding=True)), RUNNING)
_FINISH = (
    OPERATIONS.update()
    .where(OPERATIONS.c.id == bindparam("key"))
    .values(state=bindparam("new_state"), finished_at=bindparam("now"))
)
_APPLY = (
    RUNS.update()
    .where(RUNS.c.model_id == bindparam("model"), RUNS.c.applied_seq_id < bindparam("applied"))
    .values(applied_seq_id=bindparam("applied"))
)
_INSERT = RESULTS.insert()


def complete(tx: Transaction, completions: Sequence[Completion]) -> None:
    for start in range(0, len(completions), _PART):
        _complete(tx, {each.request_id: each for each in completions[start : start + _PART]})


def _complete(tx: Transaction, completions: dict[str, Completion]) -> None:
    connection = tx.session.connection()
    finished, results = [], []
    applied: dict[str, int] = {}
    for row in connection.execute(_RUNNING, {"request_ids": list(completions)}).all():
        completion = completions[row.request_id]
        kind, encoded = encode_result(completion.result)
        state = OperationState.FAILED if isinstance(completion.result, Failed) else OperationState.SUCCEEDED
        finished.append({"key": row.id, "new_state": state, "now": tx.now})
        results.append({"operation_id": row.id, "result_kind": kind, "result": encoded})
        if row.ordered:
            applied[row.stream] = max(applied.get(row.stream, -1), row.seq_id)
        for effect in completion.effects:
            _apply(tx.session, effect)
        tx.wake.append(log.done_topic(row.request_id))
    tx.session.flush()
    if finished:
        connection.execute(_FINISH, finished)
        connection.execute(_INSERT, results)
    if applied:
        connection.execute(_APPLY, [{"model": model_id, "applied": seq_id} for model_id, seq_id in applied.items()])


def _apply(session: Session, effect: Effect) -> None:
    """Every effect may be applied twice."""
    match effect:
        case RunStateChanged():
            run = session.get(RunRow, effect.model_id)
            if run is not None:
                run.state, run.state_reason = effect.state, effect.reason
                if effect.state not in log.LIVE:
                    recovering.drop_snapshots(session, effect.model_id)
        case LoraResolved():
            run = session.get(RunRow, effect.model_id)
            if run is not None:
                run.lora = effect.lora
        case CheckpointWritten():
            session.merge(to_row(effect.record, CheckpointRow))
        case SamplerCreated():
            session.merge(to_row(effect.record, SamplerRow))
        case SnapshotTaken():
            recovering.keep_newest(session, effect.record, effect.keep)
