"""What clients ask of their requests: results, what a request waits for, and to cancel it."""

from collections import Counter, defaultdict
from dataclasses import replace
from datetime import datetime

from tinsmith.memory_store.memory import Memory
from tinsmith.memory_store.rows import Operation, Samples
from tinsmith.memory_store.subjects import claiming, engines, log, places
from tinsmith.store import (
    FinishedSamples,
    Lease,
    OperationRecord,
    OperationState,
    PendingCounts,
    PendingWork,
    RunRecord,
    Waiting,
    refusals,
)
from tinsmith.store.wakeups import work_topic


def get(memory: Memory, request_id: str) -> OperationRecord:
    return replace(memory.operation(request_id).record, payload=None)


def finished(memory: Memory, subject_id: str, clone: int, cursor: int, limit: int) -> FinishedSamples:
    """Return the samples of a client that finished behind the cursor, and the cursor behind them."""
    samples = memory.samples.get((subject_id, clone), Samples())
    if cursor > samples.last:
        raise refusals.cursor_ahead(subject_id, cursor, samples.last)
    found = [entry for entry in samples.entries if entry[0] > cursor][:limit]
    return FinishedSamples(samples=tuple(each for _, each, _ in found), cursor=found[-1][0] if found else cursor)


def waiting(memory: Memory, request_id: str) -> Waiting:
    row = memory.operation(request_id)
    record, missing, place = row.record, None, None
    if record.ordered:
        run = memory.run(record.subject_id)
        if run.has_no_place and record.seq_id > run.arrived:
            place = places.wait_of(memory, run)
        elif record.seq_id > run.arrived + 1:
            missing = run.arrived + 1 if run.unload is None else min(run.arrived + 1, run.unload)
    num_ahead = min(_num_ahead(memory, row), Waiting.MANY_AHEAD)
    engine = memory.engines.get(record.base_model)
    return Waiting(missing_seq_id=missing, num_ahead=num_ahead, place=place, engine=engine)


def _num_ahead(memory: Memory, row: Operation) -> int:
    """Return how many operations of the same tenant run, or are claimed before this one."""
    record = row.record
    ready = [each for each in claiming.ready(memory, record.base_model) if each.record.ordered == record.ordered]
    ahead = [each for each in ready if claiming.arrival(each) < claiming.arrival(row)]
    running = [each for each in memory.unfinished.values() if each.is_running and each.id < row.id]
    running = [each for each in running if each.record.base_model == record.base_model]
    return sum(each.record.tenant == record.tenant for each in ahead + running)


def pending(memory: Memory, tenant: str) -> PendingCounts:
    found = [each.record for each in memory.unfinished.values() if each.record.tenant == tenant]
    num_bytes = sum(len(each.payload or b"") for each in found)
    return PendingCounts(by_kind=dict(Counter(each.kind for each in found)), num_bytes=num_bytes)


def list_pending(memory: Memory) -> list[PendingWork]:
    found: defaultdict[tuple[str, str, str, OperationState], list[datetime]] = defaultdict(list)
    for each in (each.record for each in memory.unfinished.values()):
        found[each.base_model, each.tenant, each.kind, each.state].append(each.created_at)
    return [
        PendingWork(base_model=base, tenant=who, kind=kind, state=state, number=len(times), oldest_at=min(times))
        for (base, who, kind, state), times in sorted(found.items())
    ]


def next_requests(memory: Memory) -> dict[str, str | datetime]:
    live = [each.record for each in memory.runs.values() if each.is_live]
    live.sort(key=lambda each: (each.created_at, each.model_id))
    return {each.model_id: _next_request(memory, each) for each in live}


def _next_request(memory: Memory, run: RunRecord) -> str | datetime:
    samplers = [each for each in memory.samplers.values() if (each.model_id, each.tenant) == (run.model_id, run.tenant)]
    names = {each.sampling_session_id for each in samplers}
    pending = memory.pending(run.model_id)
    pending += [each for each in memory.unfinished.values() if each.record.subject_id in names]
    if pending:
        return pending[0].record.request_id
    newest = max(samplers, key=lambda each: each.created_at, default=None)
    of_newest = {} if newest is None else memory.log(newest.sampling_session_id)
    last = memory.log(run.model_id).get(run.applied_seq_id), of_newest[max(of_newest)] if of_newest else None
    times = run.last_request_at, *(each.record.finished_at for each in last if each is not None)
    return max(filter(None, times))


def is_awaited(memory: Memory, model_id: str, seq_id: int) -> bool:
    return any(each.is_queued and each.record.seq_id > seq_id for each in memory.pending(model_id))


def cancel(memory: Memory, request_id: str) -> OperationRecord:
    row = memory.operation(request_id)
    if not row.record.ordered and not row.record.state.is_finished:
        if row.is_running:
            memory.untold[row.record.base_model].append(request_id)
            memory.told.append(work_topic(row.record.base_model))
        log.finish(memory, row, refusals.CANCELLED, OperationState.CANCELLED)
    return replace(row.record, payload=None)


def cancelled(memory: Memory, lease: Lease) -> list[str]:
    engines.fence(memory, lease)
    return memory.untold.pop(lease.base_model, [])
