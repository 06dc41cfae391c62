"""Claiming operations: which ones an engine gets, within each tenant's share."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime

from tinsmith.memory_store.memory import Memory
from tinsmith.memory_store.rows import Operation
from tinsmith.memory_store.subjects import engines
from tinsmith.store import Claim, Claimable, ClaimRoom, Lease, OperationRecord, OperationState


def ready(memory: Memory, base_model: str) -> Iterator[Operation]:
    """Yield what an engine could claim."""
    for row in memory.unfinished.values():
        if row.is_queued and row.record.base_model == base_model:
            run = memory.runs.get(row.record.subject_id) if row.record.ordered else None
            if run is None or row.record.seq_id <= run.arrived:
                yield row


def arrival(row: Operation) -> tuple[int, int]:
    """The order in which operations are claimed."""
    return row.arrival, row.record.seq_id


def claim(memory: Memory, lease: Lease, *, training: ClaimRoom, samples: ClaimRoom) -> Claim:
    engines.fence(memory, lease)
    found = sorted(ready(memory, lease.base_model), key=arrival)
    chosen: list[Operation] = []
    for ordered, room in ((True, training), (False, samples)):
        waiting: defaultdict[str, list[Claimable[Operation]]] = defaultdict(list)
        for row in found:
            if row.record.ordered is ordered:
                claimable = Claimable(key=row, num_bytes=row.record.num_bytes, arrival=row.arrival)
                waiting[row.record.tenant].append(claimable)
        limits = room.limits(waiting)
        chosen += room.choose({tenant: waiting[tenant][:number] for tenant, number in limits.items()})
    records = [_start(memory, row, lease) for row in chosen]
    return Claim(records=records, left_some=len(records) < len(found))


def claim_suspect(memory: Memory, lease: Lease) -> OperationRecord | None:
    engines.fence(memory, lease)
    found = sorted(ready(memory, lease.base_model), key=lambda each: each.record.seq_id)
    first = {each.record.subject_id: each for each in reversed(found) if each.record.ordered}
    suspects = [each for each in found if each.alone and first.get(each.record.subject_id, each) is each]
    return _start(memory, min(suspects, key=lambda each: each.id), lease) if suspects else None


def _start(memory: Memory, row: Operation, lease: Lease) -> OperationRecord:
    row.record = replace(row.record, state=OperationState.RUNNING, started_at=datetime.now(UTC))
    row.engine_id = lease.engine_id
    row.attempts += 1
    if row.record.ordered:
        memory.runs[row.record.subject_id].change(next_seq_id=row.record.seq_id + 1)
    return row.record
