"""What tenants have used by the hour, and how much is kept of theirs."""

from collections import Counter, defaultdict
from datetime import UTC, datetime

from tinsmith.memory_store.memory import Memory
from tinsmith.store import CheckpointWritten, Completion, KeptBytes, OperationRecord, StoredCheckpoints, UsageRecord


def count(memory: Memory, record: OperationRecord, completion: Completion) -> None:
    """Add what an operation has used to its tenant's sums."""
    used, usage = completion.usage, Counter[str]()
    usage["trained_tokens"], usage["prefilled_tokens"] = used.trained_tokens, used.prefilled_tokens
    usage["sampled_tokens"], usage["engine_us"] = used.sampled_tokens, round(used.engine_s * 1e6)
    sizes = [each.record.size_bytes for each in completion.effects if isinstance(each, CheckpointWritten)]
    usage["checkpoints"], usage["stored_bytes"] = len(sizes), sum(sizes)
    if any(usage.values()):
        memory.usage[_hour(datetime.now(UTC)), record.tenant, record.base_model].update(usage)


def hourly(memory: Memory, tenant: str | None, *, first: datetime, last: datetime) -> list[UsageRecord]:
    found = sorted(memory.usage.items())
    found = [(key, used) for key, used in found if _hour(first) <= key[0] <= last and tenant in (None, key[1])]
    return [_used(of, base_model, hour, used) for (hour, of, base_model), used in found]


def in_all(memory: Memory, tenant: str | None) -> list[UsageRecord]:
    totals: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for (_, of, base_model), used in memory.usage.items():
        totals[of, base_model].update(used)
    return [_used(*key, None, used) for key, used in sorted(totals.items()) if tenant in (None, key[0])]


def stored(memory: Memory, tenant: str | None, *, project_id: str | None = None) -> list[StoredCheckpoints]:
    sizes: defaultdict[tuple[str, str | None], list[int]] = defaultdict(list)
    for each in memory.checkpoints.values():
        run = memory.runs.get(each.model_id)
        session = None if run is None else memory.sessions.get(run.record.session_id)
        project = None if session is None else session.record.project_id
        if tenant in (None, each.tenant) and project_id in (None, project):
            sizes[each.tenant, project].append(each.size_bytes)
    return [
        StoredCheckpoints(tenant=of, project_id=project, number=len(found), num_bytes=sum(found))
        for (of, project), found in sorted(sizes.items(), key=lambda item: (item[0][0], item[0][1] or ""))
    ]


def kept(memory: Memory, tenant: str | None) -> list[KeptBytes]:
    kept: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for row in memory.operations.values():
        kept[row.record.tenant]["log"] += row.size
    for checkpoint in memory.checkpoints.values():
        kept[checkpoint.tenant]["checkpoints"] += checkpoint.size_bytes
    for sampler in memory.samplers.values():
        session = memory.sessions.get(sampler.session_id)
        if session is not None and session.record.ended is None and sampler.num_bytes:
            kept[session.record.tenant]["snapshots"] += sampler.num_bytes
    for run in memory.runs.values():
        for point in run.recovery_points.values():
            kept[run.record.tenant]["recovery_points"] += point.size_bytes
        if num_bytes := run.record.metric_bytes + run.record.rollout_bytes:
            kept[run.record.tenant]["metrics"] += num_bytes
    for (of, _, _), (experts, _) in memory.experts.items():
        kept[of]["routed_experts"] += len(experts)
    return [KeptBytes(tenant=of, **found) for of, found in sorted(kept.items()) if tenant in (None, of)]


def _hour(time: datetime) -> datetime:
    return time.replace(minute=0, second=0, microsecond=0)


def _used(tenant: str, base_model: str, hour: datetime | None, used: Counter[str]) -> UsageRecord:
    counts = dict(used)
    engine_s = counts.pop("engine_us", 0) / 1e6
    return UsageRecord(tenant=tenant, base_model=base_model, hour=hour, engine_s=engine_s, **counts)
