"""A run and the operations in its log, as people and programs read them: plain values, without tensors."""

import asyncio
from collections.abc import Mapping
from datetime import datetime

from tinsmith import operations as ops
from tinsmith.errors import ServerError
from tinsmith.protocol import wire
from tinsmith.server.lineage import lineage_of, saved_checkpoint
from tinsmith.server.run_views import finite, summary_of
from tinsmith.server.waits import Waits
from tinsmith.store import LoggedOperation, RequestStore
from tinsmith.store.codec import decode_result


async def report(
    store: RequestStore,
    model_id: str,
    tenant: str | None,
    waits: Waits,
    *,
    from_seq_id: int | None,
    limit: int,
    operator: bool = True,
) -> wire.RunReport:
    """Read a run and a page of its log, by default the last page. Raise NotFoundError if there is no such run.

    `tenant`: whose runs its lineage names; None: all. `operator`: who may read the causes of failures.
    """
    log = await store.run_log(model_id)
    checkpoints, _ = await store.list_checkpoints(None, model_id=model_id)
    totals = await store.log_totals(model_id)
    first = await store.list_log(model_id, from_seq_id=0, limit=1)
    last = await store.list_log(model_id, from_seq_id=None, limit=1)
    logged = await store.list_log(model_id, from_seq_id=from_seq_id, limit=limit)
    return wire.RunReport(
        run=await summary_of(store, log.run, waits, operator=operator),
        session_id=log.run.session_id,
        seed=log.run.lora.seed,
        applied_seq_id=log.run.applied_seq_id,
        oldest_replayable=log.oldest_reachable,
        recovery_points=[
            wire.RecoveryPoint(seq_id=each.seq_id, size_bytes=each.size_bytes, created_at=each.created_at)
            for each in log.recovery_points
        ],
        checkpoints=[saved_checkpoint(each) for each in checkpoints],
        lineage=(await lineage_of(store, log.run, tenant)).runs,
        num_logged=sum(each.number for each in totals),
        first_seq_id=first[0].seq_id if first else None,
        last_seq_id=last[0].seq_id if last else None,
        operations=await asyncio.to_thread(lambda: [_operation(each) for each in logged]),
        totals=[wire.LogTotals.model_validate(each, from_attributes=True) for each in totals],
    )


def _operation(logged: LoggedOperation) -> wire.OperationReport:
    metrics, notes, error = _outcome(logged)
    return wire.OperationReport(
        seq_id=logged.seq_id,
        request_id=logged.request_id,
        kind=logged.kind,
        state=logged.state.value,
        num_tokens=logged.num_tokens,
        created_at=logged.created_at,
        queued_s=_between(logged.created_at, logged.started_at),
        run_s=_between(logged.started_at, logged.finished_at),
        attempts=logged.attempts,
        interruptions=logged.interruptions,
        payload_bytes=logged.payload_bytes,
        result_bytes=logged.result_bytes,
        metrics={name: finite(value) for name, value in metrics.items()},
        notes=list(notes),
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
