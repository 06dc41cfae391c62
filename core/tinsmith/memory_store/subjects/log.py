"""The log: how operations end, and what of it later steps and recoveries need."""

from dataclasses import replace
from datetime import UTC, datetime

from tinsmith.memory_store.memory import Memory
from tinsmith.memory_store.rows import Operation, Samples
from tinsmith.operations import Failed, Result
from tinsmith.store import CLEARING, PASS, FailedPass, FinishedSample, OperationRecord, OperationState
from tinsmith.store.codec import decode_result, encode_result
from tinsmith.store.wakeups import done_topic, samples_topic


def finish(memory: Memory, row: Operation, result: Result, state: OperationState | None = None) -> None:
    """Record the result of an operation that was queued or running, and wake who waits for it."""
    now, (kind, encoded) = datetime.now(UTC), encode_result(result)
    if state is None:
        state = OperationState.FAILED if isinstance(result, Failed) else OperationState.SUCCEEDED
    row.record = replace(row.record, state=state, finished_at=now, result_kind=kind, result=encoded)
    request_id, subject_id = row.record.request_id, row.record.subject_id
    del memory.unfinished[request_id]
    memory.told.append(done_topic(request_id))
    if not row.record.ordered:
        clone = row.record.seq_id // FinishedSample.SEQ_IDS_PER_CLONE
        samples = memory.samples.setdefault((subject_id, clone), Samples())
        samples.last += 1
        succeeded = state is OperationState.SUCCEEDED
        notice = FinishedSample(request_id=request_id, succeeded=succeeded, size_bytes=len(encoded))
        samples.entries.append((samples.last, notice, now))
        memory.told.append(samples_topic(subject_id, clone))


def failed_pass(memory: Memory, model_id: str, *, after_seq_id: int | None, before_seq_id: int) -> FailedPass | None:
    rows = [row for seq_id, row in sorted(memory.log(model_id).items()) if seq_id < before_seq_id]
    cleared = [row.record.seq_id for row in rows if _clears(row)]
    after = after_seq_id if after_seq_id is not None else max(cleared, default=-1)
    for row in rows:
        if row.record.seq_id > after and _is_failed_pass(row):
            assert row.record.result is not None
            failure = decode_result("failed", row.record.result)
            assert isinstance(failure, Failed)
            return FailedPass(seq_id=row.record.seq_id, request_id=row.record.request_id, failure=failure)
    return None


def replayable(memory: Memory, model_id: str, *, after_seq_id: int, limit: int) -> list[OperationRecord]:
    found = [row.record for seq_id, row in sorted(memory.log(model_id).items()) if seq_id > after_seq_id]
    return [each for each in found if each.state is OperationState.SUCCEEDED][:limit]


def is_done_with(memory: Memory, row: Operation) -> bool:
    """Return whether no step depends on an operation any more, for all that it is a pass that failed."""
    rows, seq_id = memory.log(row.record.subject_id).values(), row.record.seq_id
    return not _is_failed_pass(row) or any(each.record.seq_id > seq_id and _clears(each) for each in rows)


def _clears(row: Operation) -> bool:
    """Return whether an operation has cleared the pending gradient."""
    return row.record.kind in CLEARING and row.record.state is OperationState.SUCCEEDED


def _is_failed_pass(row: Operation) -> bool:
    """Return whether it is a pass that failed, or failed behind a gap, which may have been a pass."""
    return row.record.state is OperationState.FAILED and (row.record.kind == PASS or row.behind_a_gap)
