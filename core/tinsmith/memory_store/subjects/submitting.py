"""Submitting operations: one row for each (subject_id, seq_id). A repeat finds the first row.

Up to `Run.arrived` nothing of a model is missing. Operations beyond are early, and no claim looks at them. When the
missing operation arrives, those that waited for it alone arrive with it. While a model is parked, nothing arrives.
Only its UnloadModel arrives, if nothing is before it.
"""

from datetime import UTC, datetime

from tinsmith.memory_store.memory import Memory
from tinsmith.memory_store.rows import Operation, Run
from tinsmith.memory_store.subjects import log
from tinsmith.operations import Failed
from tinsmith.store import EngineState, NewOperation, OperationRecord, OperationState, RunState, refusals
from tinsmith.store.request_ids import new_request_id
from tinsmith.store.wakeups import places_topic, work_topic


def submit(memory: Memory, operation: NewOperation) -> str:
    run = memory.run(operation.subject_id) if operation.ordered else None
    same = memory.log(operation.subject_id).get(operation.seq_id)
    if same is not None and same.digest == operation.digest:
        return same.record.request_id
    if same is not None:
        if run is not None:  # an UnloadModel may have been queued under this seq_id
            refuse_ended_session(memory, run.record.session_id)
            _refuse_unloaded(run)
        raise refusals.used_already(operation)
    failed = _hopeless(memory, operation, run) or operation.refused
    row = insert(memory, operation, run, payload=operation.payload if failed is None else None)
    if failed is not None:
        log.finish(memory, row, failed)
        if run is not None and run.record.state is RunState.CREATING and operation.seq_id == 0:
            run.change(state=RunState.LOST, state_reason=failed.message)
    if run is not None:
        run.change(last_request_at=row.record.created_at)
    parked = run is not None and run.is_parked
    memory.told.append((places_topic if parked else work_topic)(operation.base_model))
    return row.record.request_id


def refuse_ended_session(memory: Memory, session_id: str) -> None:
    session = memory.sessions.get(session_id)
    if session is not None and session.record.ended is not None:
        raise refusals.session_ended(session_id, session.record.ended, session.record.end_detail)


def _refuse_unloaded(run: Run) -> None:
    """Call once it is known that the session has not ended: that unloads models as well."""
    if run.unload is not None:
        raise refusals.unloaded(run.record.model_id)


def _hopeless(memory: Memory, operation: NewOperation, run: Run | None) -> Failed | None:
    """Return why an operation can never run, or None. Raise if it cannot even be recorded."""
    if run is not None:
        if operation.seq_id <= run.pruned:
            raise refusals.pruned_already(operation)
        refuse_ended_session(memory, run.record.session_id)
        _refuse_unloaded(run)
        if operation.seq_id < run.record.next_seq_id:
            return refusals.too_late(operation, run.record.next_seq_id)
        if run.record.state is RunState.LOST:
            return refusals.lost(run.record.model_id, run.record.state_reason)
        if run.record.state in (RunState.READY, RunState.PARKED):
            return None  # waits for the next engine if this one has been given up
    engine = memory.engines.get(operation.base_model)
    if engine is not None and engine.state is EngineState.FAILED:
        return refusals.no_engine(operation.base_model, engine.detail)
    return None


def insert(memory: Memory, operation: NewOperation, run: Run | None, *, payload: bytes | None) -> Operation:
    """Insert the row of an operation, and note its arrival. What cannot run needs no payload.

    It comes after everything else, and not before the one before it.
    """
    now = datetime.now(UTC)
    memory.last_id += 1
    before = memory.log(operation.subject_id).get(operation.seq_id - 1) if operation.ordered else None
    record = OperationRecord(
        request_id=new_request_id(now),
        base_model=operation.base_model,
        kind=operation.kind,
        tenant=operation.tenant,
        session_id=operation.session_id,
        subject_id=operation.subject_id,
        seq_id=operation.seq_id,
        ordered=operation.ordered,
        num_tokens=operation.num_tokens,
        num_bytes=operation.num_bytes,
        state=OperationState.QUEUED,
        created_at=now,
        payload=payload,
        traceparent=operation.traceparent,
    )
    arrival = memory.last_id if before is None else max(memory.last_id, before.arrival)
    row = Operation(record, memory.last_id, arrival, operation.digest)
    memory.operations[record.request_id] = memory.unfinished[record.request_id] = row
    memory.of_subject.setdefault(operation.subject_id, {})[operation.seq_id] = row
    if run is not None and operation.seq_id == run.arrived + 1 and _may_arrive(run, operation.seq_id):
        let_follow(memory, run)
    return row


def _may_arrive(run: Run, seq_id: int) -> bool:
    """To unload a parked model, it may stay away."""
    return not run.is_parked or seq_id == run.unload


def let_follow(memory: Memory, run: Run) -> None:
    """Move `arrived` over everything that is there. What waited for the missing operation arrives with it."""
    rows, first = memory.log(run.record.model_id), run.arrived + 1
    while run.arrived + 1 in rows and (run.unload is None or run.arrived < run.unload):
        run.arrived += 1
    moved = [rows[seq_id] for seq_id in range(first, run.arrived + 1)]
    arrival = max((each.arrival for each in moved), default=0)
    for each in moved:
        each.arrival = arrival
