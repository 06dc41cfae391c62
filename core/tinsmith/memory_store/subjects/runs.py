"""Models, which the REST API calls training runs: their creation, their loss, and their log."""

from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime

from tinsmith.memory_store.memory import Memory
from tinsmith.memory_store.rows import Operation, Run, newest_first
from tinsmith.memory_store.subjects import engines, log, submitting
from tinsmith.operations import Failed
from tinsmith.store import (
    Lease,
    LoggedOperation,
    LogTotals,
    NewOperation,
    OperationState,
    Origin,
    RunLog,
    RunRecord,
    RunState,
    TimedOperation,
    refusals,
)
from tinsmith.store.refusals import refuse_large_metadata
from tinsmith.store.wakeups import places_topic


def create(memory: Memory, run: RunRecord, operation: NewOperation) -> str:
    refuse_large_metadata(run.user_metadata)
    if run.model_id not in memory.runs:
        submitting.refuse_ended_session(memory, run.session_id)
        memory.runs[run.model_id] = Run(run, arrived=run.next_seq_id - 1)
        memory.told.append(places_topic(run.base_model))
    return submitting.submit(memory, operation)


def add_unloaded(memory: Memory, run: RunRecord, origin: Origin | None = None) -> RunRecord:
    """Its UnloadModel counts as queued, so all operations are refused."""
    unloaded = Run(run, arrived=run.next_seq_id - 1, unload=run.next_seq_id)
    if origin is not None:
        unloaded.origins[origin.seq_id] = origin
    return memory.runs.setdefault(run.model_id, unloaded).record


def count_live(memory: Memory, tenant: str) -> int:
    return sum(each.record.tenant == tenant and each.is_live for each in memory.runs.values())


def get(memory: Memory, model_id: str) -> RunRecord:
    return memory.run(model_id).record


def list_all(
    memory: Memory, tenant: str | None, *, session_id: str | None = None, limit: int, offset: int
) -> tuple[list[RunRecord], int]:
    found = [each.record for each in memory.runs.values() if tenant in (None, each.record.tenant)]
    found = [each for each in found if session_id in (None, each.session_id)]
    found = newest_first(found, lambda each: (each.created_at, each.model_id))
    return found[offset : offset + limit], len(found)


def lose(memory: Memory, lease: Lease, model_id: str, reason: str) -> None:
    engines.fence(memory, lease)
    if (run := memory.runs.get(model_id)) is not None and run.is_live:
        mark_lost(memory, run, reason)


def mark_lost(memory: Memory, run: Run, reason: str, failure: Failed | None = None) -> None:
    """Lose a model, and fail its pending operations as well."""
    change_state(memory, run, RunState.LOST, reason)
    for row in memory.pending(run.record.model_id):
        log.finish(memory, row, failure or refusals.lost(run.record.model_id, reason))


def change_state(memory: Memory, run: Run, state: RunState, reason: str | None) -> None:
    """A model that is no longer live needs no recovery points, and its place is free."""
    run.change(state=state, state_reason=reason)
    if not run.is_live:
        run.recovery_points.clear()
        memory.told.append(places_topic(run.record.base_model))


def note(memory: Memory, lease: Lease, model_id: str, note: str) -> None:
    engines.fence(memory, lease)
    if (run := memory.runs.get(model_id)) is not None and run.is_live:
        run.change(state_reason=note)


# a model's log, for people


def run_log(memory: Memory, model_id: str) -> RunLog:
    run = memory.run(model_id)
    return RunLog(run=run.record, pruned_seq_id=run.pruned, recovery_points=run.newest_points)


def list_log(memory: Memory, model_id: str, *, from_seq_id: int | None, limit: int) -> list[LoggedOperation]:
    rows = memory.log(model_id)
    seq_ids = sorted(seq_id for seq_id in rows if from_seq_id is None or seq_id >= from_seq_id)
    return [_logged(rows[each]) for each in (seq_ids[-limit:] if from_seq_id is None else seq_ids[:limit])]


def list_times(
    memory: Memory, session_id: str, *, model_id: str | None = None, after: datetime | None = None, limit: int
) -> list[TimedOperation]:
    wanted = (None, model_id) if model_id is not None else None
    subjects = [
        name for name, run in memory.runs.items() if run.record.session_id == session_id and model_id in (None, name)
    ]
    subjects += [
        name
        for name, sampler in memory.samplers.items()
        if sampler.session_id == session_id and (wanted is None or sampler.model_id in wanted)
    ]
    rows = [row for name in subjects for row in memory.log(name).values()]
    if after is not None:
        rows = [row for row in rows if row.record.finished_at is None or row.record.finished_at >= after]
    return [_timed(row, early=_is_early(memory, row)) for row in sorted(rows, key=lambda each: each.id)[-limit:]]


def _is_early(memory: Memory, row: Operation) -> bool:
    run = memory.runs.get(row.record.subject_id)
    return run is not None and row.is_queued and row.record.seq_id > run.arrived


def log_totals(memory: Memory, model_id: str) -> list[LogTotals]:
    kinds: defaultdict[tuple[str, OperationState], list[LoggedOperation]] = defaultdict(list)
    for row in memory.log(model_id).values():
        kinds[row.record.kind, row.record.state].append(_logged(row))
    return [_totals(kind, state, logged) for (kind, state), logged in sorted(kinds.items())]


def _logged(row: Operation) -> LoggedOperation:
    record = row.record
    return LoggedOperation(
        seq_id=record.seq_id,
        request_id=record.request_id,
        kind=record.kind,
        state=record.state,
        num_tokens=record.num_tokens,
        created_at=record.created_at,
        started_at=record.started_at,
        finished_at=record.finished_at,
        attempts=row.attempts,
        interruptions=row.interruptions,
        payload_bytes=len(record.payload or b""),
        result_bytes=len(record.result or b""),
        result_kind=record.result_kind,
        result=record.result,
    )


def _timed(row: Operation, *, early: bool) -> TimedOperation:
    record = row.record
    return TimedOperation(
        request_id=record.request_id,
        subject_id=record.subject_id,
        seq_id=record.seq_id,
        ordered=record.ordered,
        kind=record.kind,
        state=record.state,
        early=early,
        num_tokens=record.num_tokens,
        created_at=record.created_at,
        started_at=record.started_at,
        ran_at=row.ran_at,
        run_s=row.run_s,
        first_token_s=row.first_token_s,
        finished_at=record.finished_at,
    )


def _totals(kind: str, state: OperationState, logged: Sequence[LoggedOperation]) -> LogTotals:
    started = [(each, each.started_at) for each in logged]
    finished = [(at, each.finished_at) for each, at in started]
    return LogTotals(
        kind=kind,
        state=state,
        number=len(logged),
        num_tokens=sum(each.num_tokens for each in logged),
        payload_bytes=sum(each.payload_bytes for each in logged),
        result_bytes=sum(each.result_bytes for each in logged),
        queued_s=sum((at - each.created_at).total_seconds() for each, at in started if at is not None),
        run_s=sum((end - at).total_seconds() for at, end in finished if at is not None and end is not None),
        retried=sum(each.attempts > 1 or each.interruptions > 0 for each in logged),
    )
