"""Deleting what is past its retention, except what a recovery could need; shared secrets.

Of sessions that ended long ago, models and sampling sessions go first, if nothing of them is left. What a session still
holds keeps it: operations in the log, checkpoints, a live model.
"""

import secrets
from datetime import datetime, timedelta
from typing import Final

from tinsmith.memory_store.memory import Memory
from tinsmith.memory_store.rows import Operation
from tinsmith.memory_store.subjects import api_keys, checkpoints, log, sampling

_SAMPLES_KEPT_LONGER: Final = timedelta(hours=3)  # the SDK asks for the samples of a client for up to two hours


def secret(memory: Memory, name: str) -> bytes:
    return memory.secrets.setdefault(name, secrets.token_bytes(32))


def prune(memory: Memory, finished_before: datetime, *, idle_since: datetime | None = None) -> int:
    times = [(row, row.record.finished_at) for row in memory.operations.values()]
    old = [row for row, finished_at in times if finished_at is not None and finished_at < finished_before]
    gone = [row for row in old if _is_unneeded(memory, row, idle_since or finished_before, finished_before)]
    for row in gone:
        _delete_operation(memory, row)
    memory.pruned_before = max(finished_before, memory.pruned_before or finished_before)
    for samples in memory.samples.values():
        kept = finished_before - _SAMPLES_KEPT_LONGER
        samples.entries = [entry for entry in samples.entries if entry[2] >= kept]
    checkpoints.prune_deleted(memory, finished_before)
    sampling.prune_experts(memory, finished_before)
    api_keys.prune(memory, finished_before)
    return len(gone)


def _delete_operation(memory: Memory, row: Operation) -> None:
    subject_id, seq_id = row.record.subject_id, row.record.seq_id
    del memory.operations[row.record.request_id]
    rows = memory.of_subject[subject_id]
    del rows[seq_id]
    if not rows:
        del memory.of_subject[subject_id]
    if row.record.ordered and (run := memory.runs.get(subject_id)) is not None:
        run.pruned = max(run.pruned, seq_id)


def _is_unneeded(memory: Memory, row: Operation, idle_since: datetime, finished_before: datetime) -> bool:
    """Return whether no recovery and no step needs an operation any more, and nobody looks at its model's log."""
    run = memory.runs.get(row.record.subject_id)
    if not row.record.ordered or run is None:
        return True
    if idle_since < finished_before and run.record.last_request_at >= idle_since:
        return False
    if not run.is_live:
        return True
    seq_id, oldest_point = row.record.seq_id, min(run.recovery_points, default=-1)
    return seq_id < run.record.next_seq_id and seq_id <= oldest_point and log.is_done_with(memory, row)


def forget_sessions(memory: Memory, last_seen_before: datetime) -> int:
    old = {
        each.record.session_id
        for each in memory.sessions.values()
        if each.record.ended is not None and each.record.last_seen_at < last_seen_before
    }
    forgotten = _forget_samplers(memory, old) + _forget_runs(memory, old)
    used = {run.record.session_id for run in memory.runs.values()}
    used |= {each.session_id for each in memory.samplers.values()}
    unused = old - used
    for session_id in unused:
        del memory.sessions[session_id]
    for session_id, number in [key for key in memory.custom_losses if key[0] in unused]:
        del memory.custom_losses[session_id, number]
    return forgotten + len(unused)


def _forget_samplers(memory: Memory, session_ids: set[str]) -> int:
    """Delete the sampling sessions of these sessions of which the log holds no samples. Return how many."""
    sampled = {subject_id for (subject_id, _), samples in memory.samples.items() if samples.entries}
    unneeded = [
        key
        for key, each in memory.samplers.items()
        if each.session_id in session_ids and key not in memory.of_subject and key not in sampled
    ]
    for key in unneeded:
        del memory.samplers[key]
    for subject_id, clone in [key for key in memory.samples if key[0] in unneeded]:
        del memory.samples[subject_id, clone]
    return len(unneeded)


def _forget_runs(memory: Memory, session_ids: set[str]) -> int:
    """Delete the models of these sessions that have ended, with no operations and no checkpoints. Return how many."""
    saved = {each.model_id for each in memory.checkpoints.values()}
    saved |= {record.model_id for record, _ in memory.deleted_checkpoints.values()}
    unneeded = [
        key
        for key, run in memory.runs.items()
        if run.record.session_id in session_ids
        and not run.is_live
        and key not in memory.of_subject
        and key not in saved
    ]
    for key in unneeded:
        del memory.runs[key]
    return len(unneeded)
