"""The report of `tinsmith runs show` on one run: plain values, without the tensors of its operations."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from tinsmith import operations as ops
from tinsmith.commands.open_store import find_run
from tinsmith.engine.replay import oldest_reachable
from tinsmith.errors import ServerError
from tinsmith.store import (
    CheckpointRecord,
    LoggedOperation,
    LogTotals,
    OperationState,
    RecoveryPointRecord,
    RequestStore,
    RunRecord,
)
from tinsmith.store.codec import decode_result


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationReport:
    """One line of the log. `metrics` and `notes` depend on the kind of the operation."""

    seq_id: int
    request_id: str
    kind: str
    state: OperationState
    num_tokens: int
    created_at: datetime
    queued_s: float | None  # from arrival to claim
    run_s: float | None  # from claim to record
    attempts: int
    interruptions: int
    payload_bytes: int
    result_bytes: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    run: RunRecord
    pruned_seq_id: int
    oldest_replayable: int | None  # the lowest seq_id that `tinsmith replay` can rebuild
    recovery_points: tuple[RecoveryPointRecord, ...]
    checkpoints: list[CheckpointRecord]
    num_logged: int
    first_seq_id: int | None
    last_seq_id: int | None
    operations: list[OperationReport]
    totals: list[LogTotals]


async def report(store: RequestStore, run: str, *, from_seq_id: int | None, limit: int) -> RunReport:
    """Read a run and a page of its log, by default the last page. Raise TinsmithError as `find_run` does."""
    model_id = await find_run(store, run)
    log = await store.run_log(model_id)
    checkpoints, _ = await store.list_checkpoints(None, model_id=model_id)
    totals = await store.log_totals(model_id)
    first = await store.list_log(model_id, from_seq_id=0, limit=1)
    last = await store.list_log(model_id, from_seq_id=None, limit=1)
    operations = await store.list_log(model_id, from_seq_id=from_seq_id, limit=limit)
    return RunReport(
        run=log.run,
        pruned_seq_id=log.pruned_seq_id,
        oldest_replayable=oldest_reachable(log),
        recovery_points=log.recovery_points,
        checkpoints=checkpoints,
        num_logged=sum(each.number for each in totals),
        first_seq_id=first[0].seq_id if first else None,
        last_seq_id=last[0].seq_id if last else None,
        operations=[_operation(each) for each in operations],
        totals=totals,
    )


def _operation(logged: LoggedOperation) -> OperationReport:
    metrics, notes, error = _outcome(logged)
    return OperationReport(
        seq_id=logged.seq_id,
        request_id=logged.request_id,
        kind=logged.kind,
        state=logged.state,
        num_tokens=logged.num_tokens,
        created_at=logged.created_at,
        queued_s=_between(logged.created_at, logged.started_at),
        run_s=_between(logged.started_at, logged.finished_at),
        attempts=logged.attempts,
        interruptions=logged.interruptions,
        payload_bytes=logged.payload_bytes,
        result_bytes=logged.result_bytes,
        metrics=metrics,
        notes=notes,
        error=error,
    )


def _outcome(logged: LoggedOperation) -> tuple[Mapping[str, float], tuple[str, ...], str | None]:
    """Return the metrics, notes and error of a result."""
    if logged.result_kind is None or logged.result is None:
        return {}, (), None
    try:
        result = decode_result(logged.result_kind, logged.result)
    except ServerError as error:
        return {}, (), str(error)
    match result:
        case ops.Failed():
            return {}, (), f"{result.category}: {result.message}"
        case ops.ForwardBackwardOutput() | ops.OptimStepOutput():
            return result.metrics, (), None
        case ops.WeightsSaved():
            named = tuple(each for each in (result.path, result.sampling_session_id) if each)
            return *_compared(result.consistency, named), None
        case ops.WeightsLoaded():
            return {}, (result.path,), None
        case _:
            return {}, (), None


def _compared(found: ops.Consistency | None, named: tuple[str, ...]) -> tuple[Mapping[str, float], tuple[str, ...]]:
    """Add what the consistency gate found."""
    if found is None:
        return {}, named
    measured = {"max_difference": found.max_difference, "mean_difference": found.mean_difference}
    differences = {name: value for name, value in measured.items() if value is not None}
    return differences, (*named, found.verdict if found.reason is None else f"{found.verdict}: {found.reason}")


def _between(start: datetime | None, end: datetime | None) -> float | None:
    return None if start is None or end is None else (end - start).total_seconds()
