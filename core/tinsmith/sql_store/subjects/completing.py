"""Recording the results of operations and their effects, in one transaction."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import Connection

from tinsmith.operations import Failed
from tinsmith.sql_store.group_commit import locks
from tinsmith.sql_store.statements import Change, Query, chunks, values_of
from tinsmith.sql_store.subjects import (
    checkpoints,
    engines,
    log,
    metrics,
    models,
    origins,
    rollouts,
    sampling,
)
from tinsmith.sql_store.transaction import Transaction
from tinsmith.store import (
    CheckpointWritten,
    Completed,
    Completion,
    Effect,
    ExpertsSampled,
    Lease,
    LoraResolved,
    OperationState,
    Origin,
    RecoveryPointTaken,
    RolloutsTrained,
    RunStateChanged,
    SamplingSessionCreated,
)
from tinsmith.store.codec import encode_result
from tinsmith.store.metrics import row_bytes
from tinsmith.store.refusals import taken
from tinsmith.store.wakeups import places_topic


class _First(NamedTuple):
    snapshot_id: str | None
    base_model: str


@dataclass(slots=True)
class _Applied:
    """How far the results of one transaction take a model."""

    seq_id: int = -1
    steps: int = 0
    metric_bytes: int = 0


_RUNNING = Query(
    f"{log.OPERATION} WHERE request_id IN :request_ids AND operations.state = 'running' AND engine_id = :engine "
    "ORDER BY id FOR UPDATE",
    log.Operation,
)
_MODELS = Query("SELECT subject_id FROM operations WHERE request_id IN :request_ids AND ordered", str)
_APPLY = Change(
    "UPDATE runs SET applied_seq_id = CASE WHEN applied_seq_id < :applied THEN :applied ELSE applied_seq_id END, "
    "steps = CASE WHEN steps < :steps THEN :steps ELSE steps END, metric_bytes = metric_bytes + :more "
    "WHERE model_id = :model"
)
_CHANGE_STATE = Change("UPDATE runs SET state = :state, state_reason = :reason WHERE model_id = :model")
_RESOLVE_LORA = Change("UPDATE runs SET lora = :lora WHERE model_id = :model")
_SAMPLING_SESSION = Query("SELECT FIELDS FROM sampling_sessions WHERE sampling_session_id = :wanted", _First)


def _models_of(connection: Connection, _: Lease, completions: Sequence[Completion]) -> set[str]:
    request_ids = [each.request_id for each in completions]
    return {model for chunk in chunks(request_ids) for model in _MODELS.all(connection, request_ids=chunk)}


@locks(_models_of)
def complete(tx: Transaction, lease: Lease, completions: Sequence[Completion]) -> None:
    engines.fence(tx, lease)
    for chunk in chunks(completions):
        _complete(tx, lease.engine_id, {each.request_id: each for each in chunk})


def _complete(tx: Transaction, engine_id: str, completions: dict[str, Completion]) -> None:
    ended, done = [], list[Completed]()
    applied: dict[str, _Applied] = {}
    measured: list[metrics.Row] = []
    for row in _RUNNING.all(tx.connection, request_ids=list(completions), engine=engine_id):
        completion = _unless_taken(tx.connection, completions[row.request_id])
        has_failed = isinstance(completion.result, Failed) and not completion.applied
        state = OperationState.FAILED if has_failed else OperationState.SUCCEEDED
        kind, result = encode_result(completion.result)
        times = completion.ran_at, completion.run_s, completion.first_token_s
        ended.append(log.Ended(row, state, kind, result, *times))
        if row.ordered:
            reached = applied.setdefault(row.subject_id, _Applied())
            reached.seq_id, reached.steps = max(reached.seq_id, row.seq_id), max(reached.steps, completion.steps)
            if completion.measured is not None:
                measured.append(metrics.row_of(tx, row.subject_id, row.seq_id, completion.measured))
                reached.metric_bytes += row_bytes(row.subject_id, measured[-1]["numbers"])
        for effect in completion.effects:
            _apply(tx, effect)
        done.append(
            Completed(row.request_id, row.tenant, row.base_model, row.subject_id, row.seq_id, row.ordered, completion)
        )
    metrics.INSERT.run_each(tx.connection, measured)
    log.finish_many(tx, ended)
    for tell in tx.packages.completed:
        tell(tx, done)
    rows = [
        {"model": model_id, "applied": each.seq_id, "steps": each.steps, "more": each.metric_bytes}
        for model_id, each in applied.items()
    ]
    _APPLY.run_each(tx.connection, rows)


def _unless_taken(connection: Connection, completion: Completion) -> Completion:
    """Return the completion, or a failure if it creates a sampling session that exists."""
    for effect in completion.effects:
        if isinstance(effect, SamplingSessionCreated):
            wanted = effect.record.sampling_session_id
            first = _SAMPLING_SESSION.first(connection, wanted=wanted)
            if first is not None:
                error = taken(wanted, first.snapshot_id or first.base_model)
                return Completion(
                    request_id=completion.request_id, result=Failed(message=str(error), category=error.category)
                )
    return completion


def _apply(tx: Transaction, effect: Effect) -> None:
    """Applying an effect twice changes nothing."""
    connection = tx.connection
    match effect:
        case RunStateChanged():
            _change_state(tx, effect)
        case LoraResolved():
            _RESOLVE_LORA.run(connection, model=effect.model_id, lora=effect.lora)
        case CheckpointWritten():
            checkpoints.write(tx, effect.record)
        case SamplingSessionCreated():
            sampling.INSERT.run(connection, **values_of(effect.record))
        case RecoveryPointTaken():
            models.keep_newest_points(connection, effect.record, effect.keep)
        case ExpertsSampled():
            sampling.keep_experts(tx, effect)
        case RolloutsTrained():
            rollouts.keep(tx, effect)
        case Origin():
            origins.keep(connection, effect)


def _change_state(tx: Transaction, effect: RunStateChanged) -> None:
    run = models.find(tx.connection, effect.model_id)
    if run is None:
        return
    _CHANGE_STATE.run(tx.connection, model=effect.model_id, state=effect.state, reason=effect.reason)
    if effect.state not in models.LIVE:
        models.DELETE_POINTS.run(tx.connection, model_id=effect.model_id)
        tx.wake.append(places_topic(run.base_model))
