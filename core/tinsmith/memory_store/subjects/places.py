"""Places on a backend: which models get one, and which are parked."""

from collections import Counter
from datetime import UTC, datetime
from functools import partial

from tinsmith.memory_store.memory import Memory
from tinsmith.memory_store.rows import Run
from tinsmith.memory_store.subjects import engines, runs, submitting
from tinsmith.operations import Failed
from tinsmith.store import (
    SILENCE,
    WAITS_FOR_PLACE,
    Lease,
    PlaceCounts,
    PlaceLimits,
    PlaceMoves,
    PlaceWait,
    RecoveryPointRecord,
    RunState,
)
from tinsmith.store.shares import Applicant, Idle, Taken, decide, place_wait
from tinsmith.store.wakeups import places_topic, work_topic


def admit(memory: Memory, lease: Lease, limits: PlaceLimits) -> PlaceMoves:
    engines.fence(memory, lease)
    taken, waiting = _places(memory, lease.base_model)
    decided = decide(waiting, taken, limits, partial(_idle, memory, lease.base_model))
    for model_id in decided.admitted:
        run = memory.run(model_id)
        run.change(next_seq_id=0)
        run.arrived = -1
        submitting.let_follow(memory, run)
    for model_id in decided.late:
        failure = Failed(message=limits.failure, category="server")
        runs.mark_lost(memory, memory.run(model_id), limits.failure, failure)
    if decided.admitted:
        memory.told.append(work_topic(lease.base_model))
    return decided.moves


def park(memory: Memory, lease: Lease, point: RecoveryPointRecord, *, keep: int) -> bool:
    engines.fence(memory, lease)
    run = memory.runs.get(point.model_id)
    if run is None or run.record.state is not RunState.READY:
        return run is not None and run.is_parked
    if memory.pending(point.model_id) or run.record.applied_seq_id != point.seq_id:
        return False
    run.keep_newest(point, keep)
    run.change(state=RunState.PARKED)
    memory.told.append(places_topic(run.record.base_model))
    return True


def bring_back(memory: Memory, lease: Lease, model_id: str) -> bool:
    engines.fence(memory, lease)
    run = memory.runs.get(model_id)
    if run is None or not run.is_parked:
        return run is not None and run.record.state is RunState.READY
    run.change(state=RunState.READY)
    submitting.let_follow(memory, run)
    memory.told.append(work_topic(run.record.base_model))
    return True


def count(memory: Memory, base_model: str) -> PlaceCounts:
    taken, waiting = _places(memory, base_model)
    return PlaceCounts(taken=taken.by_tenant.total(), waiting=len(waiting))


def wait_of(memory: Memory, run: Run) -> PlaceWait:
    """Return what a model that waits for a place waits for."""
    taken, waiting = _places(memory, run.record.base_model)
    return place_wait(run.record.model_id, run.record.tenant, waiting, taken)


def _places(memory: Memory, base_model: str) -> tuple[Taken, list[Applicant]]:
    """Return the places that are taken, and the models that wait, longest first."""
    by_tenant: Counter[str] = Counter()
    full = 0
    waiting = []
    live = [each for each in memory.runs.values() if each.record.base_model == base_model and each.is_live]
    for run in sorted(live, key=lambda each: (each.record.created_at, each.record.model_id)):
        record, is_full = run.record, run.record.lora.rank == 0
        if record.next_seq_id == WAITS_FOR_PLACE:
            waiting.append(Applicant(record.model_id, record.tenant, record.created_at, full=is_full))
        elif not run.is_parked:
            by_tenant[record.tenant] += 1
            full += is_full
        elif (since := _asked_at(memory, run)) is not None:
            waiting.append(Applicant(record.model_id, record.tenant, since, full=is_full, parked=True))
    waiting.sort(key=lambda each: each.since)
    return Taken(by_tenant, full), waiting


def _asked_at(memory: Memory, run: Run) -> datetime | None:
    """Return when the oldest request of a parked model arrived, None if it has none."""
    early = [each.record for each in memory.pending(run.record.model_id) if each.record.seq_id > run.arrived]
    return min((each.created_at for each in early), default=None)


def _idle(memory: Memory, base_model: str, before: datetime) -> list[Idle]:
    """Return the models that have had nothing to do since before then."""
    found = []
    for run in memory.runs.values():
        record = run.record
        if record.base_model == base_model and record.state is RunState.READY and not memory.pending(record.model_id):
            last = memory.log(record.model_id).get(record.applied_seq_id)
            finished_at = None if last is None else last.record.finished_at
            since = max(record.last_request_at, finished_at or record.last_request_at)
            session = memory.sessions.get(record.session_id)
            abandoned = session is not None and session.record.last_seen_at < datetime.now(UTC) - SILENCE
            if since <= before:
                full, seq_id = record.lora.rank == 0, record.applied_seq_id
                found.append(Idle(record.model_id, record.tenant, since, seq_id, full=full, abandoned=abandoned))
    return found
