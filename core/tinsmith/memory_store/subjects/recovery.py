"""Recovery after an engine: running operations go back into the queue, and models are rebuilt."""

from dataclasses import replace

from tinsmith.memory_store.memory import Memory
from tinsmith.memory_store.rows import Operation, Run
from tinsmith.memory_store.subjects import engines, log, runs, sampling
from tinsmith.operations import INFLIGHT, Failed
from tinsmith.store import Lease, LiveModel, OperationState, RecoveryPointRecord, RunState, refusals
from tinsmith.store.wakeups import work_topic


def requeue(
    memory: Memory,
    lease: Lease,
    *,
    max_attempts: int,
    reason: str | None,
    max_interruptions: int | None = None,
    held: frozenset[str] = frozenset(),
) -> list[str]:
    engines.fence(memory, lease)
    failed = []
    for row in [each for each in memory.unfinished.values() if each.record.base_model == lease.base_model]:
        request_id = row.record.request_id
        if not row.is_running or request_id in held:  # it may have failed with its model
            continue
        row.attempts -= reason is None or max_interruptions is not None
        row.interruptions += max_interruptions is not None
        too_often = row.interruptions >= max_interruptions if max_interruptions else row.attempts >= max_attempts
        if reason is not None and too_often:
            failed.append(request_id)
            total = row.attempts + row.interruptions
            _give_up(memory, row, refusals.ended_too_often(row.record.kind, total, reason))
            continue
        if reason is not None:
            row.alone = row.record.ordered or row.attempts >= max_attempts - 1
        _put_back(memory, row)
    memory.told.append(work_topic(lease.base_model))
    return failed


def _put_back(memory: Memory, row: Operation) -> None:
    row.record = replace(row.record, state=OperationState.QUEUED, started_at=None)
    row.engine_id = None
    if (run := _run_of(memory, row)) is not None:
        run.change(next_seq_id=min(run.record.next_seq_id, row.record.seq_id))


def _give_up(memory: Memory, row: Operation, failure: Failed) -> None:
    """Fail this operation alone. Its seq_id is used up; a model that could not be created is lost."""
    log.finish(memory, row, failure)
    if (run := _run_of(memory, row)) is not None:
        run.change(applied_seq_id=max(run.record.applied_seq_id, row.record.seq_id))
        if row.record.kind == "create_model":
            runs.mark_lost(memory, run, f"it could not be created: {failure.message}")


def _run_of(memory: Memory, row: Operation) -> Run | None:
    return memory.runs.get(row.record.subject_id) if row.record.ordered else None


def live_models(memory: Memory, base_model: str) -> list[LiveModel]:
    of_model = [each for each in memory.runs.values() if each.record.base_model == base_model]
    ready = [each for each in of_model if each.record.state in (RunState.READY, RunState.PARKED)]
    ready.sort(key=lambda each: (each.record.created_at, each.record.model_id))
    return [
        LiveModel(
            run=run.record,
            pruned_seq_id=run.pruned,
            rebuilds=run.rebuilds,
            recovery_points=run.newest_points,
            ephemeral=_ephemeral(memory, run),
        )
        for run in ready
    ]


def _ephemeral(memory: Memory, run: Run) -> tuple[str, ...]:
    """Return the snapshots of a model that its sampling sessions own, oldest first."""
    return tuple(
        each.snapshot_id
        for each in sampling.of_session(memory, run.record.session_id)
        if each.model_id == run.record.model_id
        and each.snapshot_id in (each.sampling_session_id, each.sampling_session_id + INFLIGHT)
    )


def begin_rebuild(memory: Memory, lease: Lease, model_id: str, *, interrupted: bool) -> int:
    engines.fence(memory, lease)
    run = memory.run(model_id)
    if not (interrupted and run.rebuilds):
        run.rebuilds += 1
    return run.rebuilds


def end_rebuild(memory: Memory, lease: Lease, model_id: str) -> None:
    engines.fence(memory, lease)
    memory.run(model_id).rebuilds = 0


def add_recovery_point(memory: Memory, lease: Lease, record: RecoveryPointRecord, *, keep: int) -> None:
    engines.fence(memory, lease)
    run = memory.runs.get(record.model_id)
    if run is None or not run.is_live:
        raise refusals.model_not_live(record)
    if record.seq_id > run.record.applied_seq_id:
        raise refusals.ahead_of_results(record, run.record.applied_seq_id)
    run.keep_newest(record, keep)


def list_recovery_points(memory: Memory, model_id: str) -> list[RecoveryPointRecord]:
    run = memory.runs.get(model_id)
    return list(run.newest_points) if run is not None else []


def drop_recovery_point(memory: Memory, lease: Lease, model_id: str, seq_id: int) -> None:
    engines.fence(memory, lease)
    if (run := memory.runs.get(model_id)) is not None:
        run.recovery_points.pop(seq_id, None)
