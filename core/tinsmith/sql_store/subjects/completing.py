"""Recording the results of operations and their effects, in one transaction."""

from collections.abc import Sequence
from dataclasses import fields

import sqlalchemy
from sqlalchemy import bindparam
from sqlmodel import Session

from tinsmith.failpoints import durable_boundary
from tinsmith.operations import Failed
from tinsmith.sql_store.prepared import Prepared
from tinsmith.sql_store.subjects import checkpoints, leases, log, recovery_points, routed_experts
from tinsmith.sql_store.subjects.finished_samples import Finished
from tinsmith.sql_store.subjects.transaction import Connections, Transaction
from tinsmith.sql_store.subjects.usage import Counting
from tinsmith.sql_store.tables import (
    OPERATIONS,
    RESULTS,
    RUNNING,
    RUNS,
    SAMPLING_SESSIONS,
    RunRow,
)
from tinsmith.store import (
    CheckpointWritten,
    Completion,
    Effect,
    ExpertsSampled,
    Lease,
    LoraResolved,
    OperationState,
    RecoveryPointTaken,
    RunStateChanged,
    SamplingSessionCreated,
)
from tinsmith.store.codec import encode_result
from tinsmith.store.sampling_sessions import taken

_PART = 500  # values of one IN list
_RUNNING = Prepared(
    sqlalchemy.select(
        OPERATIONS.c.id,
        OPERATIONS.c.request_id,
        OPERATIONS.c.tenant,
        OPERATIONS.c.kind,
        OPERATIONS.c.payload_bytes,
        OPERATIONS.c.base_model,
        OPERATIONS.c.subject_id,
        OPERATIONS.c.seq_id,
        OPERATIONS.c.ordered,
    )
    .where(
        OPERATIONS.c.request_id.in_(bindparam("request_ids", expanding=True)),
        RUNNING,
        OPERATIONS.c.engine_id == bindparam("engine"),
    )
    .order_by(OPERATIONS.c.id)
    .with_for_update()
)
_MODELS = sqlalchemy.select(OPERATIONS.c.subject_id).where(
    OPERATIONS.c.request_id.in_(bindparam("request_ids", expanding=True)), OPERATIONS.c.ordered
)
_FINISH = Prepared(
    OPERATIONS.update()
    .where(OPERATIONS.c.id == bindparam("key"))
    .values(state=bindparam("new_state"), finished_at=bindparam("now"))
)
_APPLY = Prepared(
    RUNS.update()
    .where(RUNS.c.model_id == bindparam("model"), RUNS.c.applied_seq_id < bindparam("applied"))
    .values(applied_seq_id=bindparam("applied"))
)
_INSERT = Prepared(RESULTS.insert())
_SAMPLING_SESSION = sqlalchemy.select(SAMPLING_SESSIONS.c.snapshot_id, SAMPLING_SESSIONS.c.base_model).where(
    SAMPLING_SESSIONS.c.sampling_session_id == bindparam("wanted")
)
_INSERT_SAMPLING_SESSION = SAMPLING_SESSIONS.insert()


@durable_boundary("store.complete")
async def complete_operations(connections: Connections, lease: Lease, completions: Sequence[Completion]) -> None:
    if completions:
        await connections.durable.write_locking(models_of, complete, lease, completions)


def models_of(session: Session, _: Lease, completions: Sequence[Completion]) -> set[str]:
    models: set[str] = set()
    for start in range(0, len(completions), _PART):
        part = [each.request_id for each in completions[start : start + _PART]]
        models.update(session.connection().execute(_MODELS, {"request_ids": part}).scalars())
    return models


def complete(tx: Transaction, lease: Lease, completions: Sequence[Completion]) -> None:
    leases.fence(tx, lease)
    for start in range(0, len(completions), _PART):
        _complete(tx, lease.engine_id, {each.request_id: each for each in completions[start : start + _PART]})


def _complete(tx: Transaction, engine_id: str, completions: dict[str, Completion]) -> None:
    connection = tx.session.connection()
    finished, results = [], []
    applied: dict[str, int] = {}
    used = Counting()
    for row in _RUNNING.all(connection, {"request_ids": list(completions), "engine": engine_id}):
        completion = _unless_taken(tx.session, completions[row.request_id])
        kind, encoded = encode_result(completion.result)
        has_failed = isinstance(completion.result, Failed) and not completion.applied
        state = OperationState.FAILED if has_failed else OperationState.SUCCEEDED
        finished.append({"key": row.id, "new_state": state, "now": tx.now})
        results.append({"operation_id": row.id, "result_kind": kind, "result": encoded})
        if row.ordered:
            applied[row.subject_id] = max(applied.get(row.subject_id, -1), row.seq_id)
        else:
            succeeded = state is OperationState.SUCCEEDED
            tx.finished.append(Finished(row.subject_id, row.seq_id, row.request_id, succeeded, len(encoded)))
        for effect in completion.effects:
            _apply(tx, effect)
        used.add(row.tenant, row.base_model, completion)
        tx.pending.finished([row], result_bytes=len(encoded))
        tx.wake.append(log.done_topic(row.request_id))
    tx.session.flush()
    used.write(tx)
    if finished:
        _FINISH.run(connection, *finished)
        _INSERT.run(connection, *results)
    if applied:
        _APPLY.run(connection, *({"model": model_id, "applied": seq_id} for model_id, seq_id in applied.items()))


def _unless_taken(session: Session, completion: Completion) -> Completion:
    """Return the completion, or a failure if it creates a sampling session that exists."""
    for effect in completion.effects:
        if isinstance(effect, SamplingSessionCreated):
            wanted = effect.record.sampling_session_id
            first = session.connection().execute(_SAMPLING_SESSION, {"wanted": wanted}).first()
            if first is not None:
                error = taken(wanted, first.snapshot_id or first.base_model)
                return Completion(
                    request_id=completion.request_id, result=Failed(message=str(error), category=error.category)
                )
    return completion


def _apply(tx: Transaction, effect: Effect) -> None:
    """Applying an effect twice changes nothing."""
    session = tx.session
    match effect:
        case RunStateChanged():
            run = session.get(RunRow, effect.model_id)
            if run is not None:
                run.state, run.state_reason = effect.state, effect.reason
                if effect.state not in log.LIVE:
                    recovery_points.drop_all(session, effect.model_id)
                    tx.wake.append(log.places_topic(run.base_model))
        case LoraResolved():
            run = session.get(RunRow, effect.model_id)
            if run is not None:
                run.lora = effect.lora
        case CheckpointWritten():
            checkpoints.write(tx, effect.record)
        case SamplingSessionCreated():
            values = {each.name: getattr(effect.record, each.name) for each in fields(effect.record)}
            session.connection().execute(_INSERT_SAMPLING_SESSION, values)
        case RecoveryPointTaken():
            recovery_points.keep_newest(session, effect.record, effect.keep)
        case ExpertsSampled():
            routed_experts.keep(tx, effect)
