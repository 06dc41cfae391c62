"""Engines: their leases, and what they report."""

from datetime import UTC, datetime, timedelta

from tinsmith.memory_store.memory import Memory
from tinsmith.memory_store.rows import LeaseRow
from tinsmith.memory_store.subjects import log
from tinsmith.store import EngineRecord, EngineState, Lease, LeaseHeld, ReportedFigures, RunState, refusals
from tinsmith.store.wakeups import lease_topic


def acquire(
    memory: Memory, base_model: str, *, engine_id: str, duration_s: float, dead: str | None = None
) -> Lease | LeaseHeld:
    now = datetime.now(UTC)
    row = memory.leases.get(base_model) or LeaseRow(0, None, now)
    if row.engine_id not in (None, engine_id, dead) and now < row.expires_at:
        remaining_s, holder = (row.expires_at - now).total_seconds(), row.engine_id
        return LeaseHeld(base_model=base_model, engine_id=holder, remaining_s=remaining_s, until=row.expires_at)
    epoch = row.epoch if row.engine_id == engine_id else row.epoch + 1
    lease = Lease(base_model=base_model, engine_id=engine_id, epoch=epoch, duration_s=duration_s)
    _extend(memory, lease)
    return lease


def renew(memory: Memory, lease: Lease) -> None:
    fence(memory, lease)
    _extend(memory, lease)


def release(memory: Memory, base_model: str, engine_id: str) -> None:
    row = memory.leases.get(base_model)
    if row is not None and row.engine_id == engine_id:
        row.engine_id = None
        memory.told.append(lease_topic(base_model))


def fence(memory: Memory, lease: Lease) -> None:
    """Raise LeaseLostError if another engine has taken the lease over. Renew the lease if it has expired."""
    row, now = memory.leases.get(lease.base_model), datetime.now(UTC)
    if row is None or (row.epoch, row.engine_id) != (lease.epoch, lease.engine_id):
        raise refusals.lease_lost(lease, row.engine_id if row else None, row.epoch if row else None)
    if row.expires_at <= now:
        _extend(memory, lease)


def _extend(memory: Memory, lease: Lease) -> None:
    until = datetime.now(UTC) + timedelta(seconds=lease.duration_s)
    memory.leases[lease.base_model] = LeaseRow(lease.epoch, lease.engine_id, until)


def report(memory: Memory, record: EngineRecord, *, lease: Lease | None = None) -> None:
    if lease is not None:
        fence(memory, lease)
    elif (held := memory.leases.get(record.base_model)) and held.engine_id and datetime.now(UTC) < held.expires_at:
        return  # a supervisor reports its own engine, but another engine serves
    memory.engines[record.base_model] = record
    if record.state is EngineState.FAILED:
        _fail_pending(memory, record)


def _fail_pending(memory: Memory, engine: EngineRecord) -> None:
    """Fail what waits for an engine that has been given up, unless the next one can go on with it."""
    for row in [each for each in memory.unfinished.values() if each.record.base_model == engine.base_model]:
        run = memory.runs.get(row.record.subject_id) if row.record.ordered else None
        if run is not None and run.record.state in (RunState.READY, RunState.PARKED):
            continue  # the next engine rebuilds it, and continues
        if run is not None and run.record.state is RunState.CREATING:
            run.change(state=RunState.LOST, state_reason=engine.detail)
        log.finish(memory, row, refusals.no_engine(engine.base_model, engine.detail))


def list_all(memory: Memory) -> list[EngineRecord]:
    return [record for _, record in sorted(memory.engines.items())]


def overdue(memory: Memory) -> dict[str, float]:
    now = datetime.now(UTC)
    held = [each for each in memory.leases.values() if each.engine_id is not None]
    return {str(each.engine_id): (now - each.expires_at).total_seconds() for each in held if each.expires_at < now}


def running_since(memory: Memory) -> dict[str, datetime]:
    found: dict[str, datetime] = {}
    for each in memory.unfinished.values():
        if (since := each.record.started_at) is not None and each.is_running:
            found[each.record.base_model] = min(since, found.get(each.record.base_model, since))
    return found


def report_figures(memory: Memory, lease: Lease, report: bytes) -> None:
    fence(memory, lease)
    memory.figures[lease.base_model] = ReportedFigures(
        base_model=lease.base_model, reported_at=datetime.now(UTC), report=report
    )


def list_figures(memory: Memory) -> list[ReportedFigures]:
    return [reported for _, reported in sorted(memory.figures.items())]
