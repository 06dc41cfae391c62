"""Gaps: seq_ids that have not arrived, and the operations that wait behind them."""

from datetime import UTC, datetime

from tinsmith.memory_store.memory import Memory
from tinsmith.memory_store.rows import Operation, Run
from tinsmith.memory_store.subjects import log, submitting
from tinsmith.store import SILENCE, RunState, refusals
from tinsmith.store.wakeups import work_topic


def fail_gaps(memory: Memory, base_model: str, *, older_than: datetime) -> int:
    runs = [each for each in memory.runs.values() if each.record.base_model == base_model]
    return sum(fail(memory, run, older_than) for run in runs)


def fail(memory: Memory, run: Run, older_than: datetime | None) -> int:
    """Fail what waits behind a missing seq_id for ever, or has waited since before then. Return how many failed."""
    pending = memory.pending(run.record.model_id)
    early = [each for each in pending if each.record.seq_id > run.arrived]
    if run.unload is not None or not run.is_live:
        missing = run.arrived + 1 if run.unload is None else run.unload
        return _fail_behind(memory, run, missing, [each for each in early if each.record.seq_id > missing])
    late = [] if older_than is None else [each for each in early if each.record.created_at < older_than]
    if older_than is None or not late or run.has_no_place or not _was_heard(memory, run, older_than):
        return 0
    if any(run.record.applied_seq_id < each.record.seq_id <= run.arrived for each in pending):
        return 0  # if one of them were requeued, the model would reach the gap again
    last = late[-1].record.seq_id
    failed = _fail_behind(memory, run, run.arrived + 1, [each for each in early if each.record.seq_id <= last])
    run.change(next_seq_id=last + 1, applied_seq_id=last)
    run.arrived = last
    submitting.let_follow(memory, run)
    memory.told.append(work_topic(run.record.base_model))
    return failed


def _was_heard(memory: Memory, run: Run, since: datetime) -> bool:
    """Return whether heartbeats of the client have arrived all the time, so that it could send what is missing."""
    session = memory.sessions.get(run.record.session_id)
    silent_since = datetime.now(UTC) - SILENCE
    return session is None or (session.heard_since < since and session.record.last_seen_at >= silent_since)


def _fail_behind(memory: Memory, run: Run, missing: int, rows: list[Operation]) -> int:
    model_id, state = run.record.model_id, run.record.state
    if state is RunState.LOST:
        failure = refusals.lost(model_id, run.record.state_reason)
    else:
        failure = refusals.behind_a_gap(model_id, missing, state, unloads=run.unload == missing)
    for row in rows:
        row.behind_a_gap = True
        log.finish(memory, row, failure)
    return len(rows)
