"""Sampling: its sessions, the experts of sampled sequences, and tokens that are being drawn.

Of each tenant, as many bytes of experts are kept as its newest sequences take. Tokens are messages over the channel of
the wake-ups, and no row.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import accumulate

from tinsmith.memory_store.memory import Memory
from tinsmith.store import (
    DrawnTokens,
    ExpertsSampled,
    OperationRecord,
    OperationState,
    SamplingSessionRecord,
    refusals,
)
from tinsmith.store.wakeups import drawn_topic, message


def create(memory: Memory, sampler: SamplingSessionRecord) -> SamplingSessionRecord:
    return memory.samplers.setdefault(sampler.sampling_session_id, sampler)


def get(memory: Memory, sampling_session_id: str) -> SamplingSessionRecord:
    if sampling_session_id not in memory.samplers:
        raise refusals.missing("sampling session", sampling_session_id)
    return memory.samplers[sampling_session_id]


def count_open(memory: Memory, tenant: str) -> int:
    owners = [memory.sessions.get(each.session_id) for each in memory.samplers.values()]
    return sum(each is not None and each.record.tenant == tenant and each.record.ended is None for each in owners)


def list_ids(memory: Memory, session_id: str) -> list[str]:
    return [each.sampling_session_id for each in of_session(memory, session_id)]


def of_session(memory: Memory, session_id: str) -> list[SamplingSessionRecord]:
    """Return the sampling sessions of a session, oldest first."""
    found = [each for each in memory.samplers.values() if each.session_id == session_id]
    return sorted(found, key=lambda each: (each.created_at, each.sampling_session_id))


def samples_of(
    memory: Memory, model_id: str, *, after: datetime, until: datetime, max_bytes: int
) -> tuple[list[OperationRecord], bool]:
    tenant = memory.run(model_id).record.tenant
    samplers = [name for name, each in memory.samplers.items() if (each.model_id, each.tenant) == (model_id, tenant)]
    rows = sorted((row for name in samplers for row in memory.log(name).values()), key=lambda each: each.id)
    found = [row for row in rows if _succeeded_between(row.record, after, until)]
    totals = accumulate(row.size for row in found)
    fitting = [row.record for row, total in zip(found, totals, strict=True) if total <= max_bytes]
    return fitting, len(fitting) < len(found)


def _succeeded_between(record: OperationRecord, after: datetime, until: datetime) -> bool:
    succeeded = record.kind == "sample" and record.state is OperationState.SUCCEEDED
    return succeeded and record.finished_at is not None and after < record.finished_at <= until


def find_experts(memory: Memory, tenant: str, model_id: str, digests: Sequence[bytes]) -> dict[bytes, bytes]:
    keys = {digest: (tenant, model_id, digest) for digest in digests}
    return {digest: memory.experts[key][0] for digest, key in keys.items() if key in memory.experts}


def keep_experts(memory: Memory, sampled: ExpertsSampled) -> None:
    """If tokens are sampled again, their newest experts count."""
    kept, now = memory.experts, datetime.now(UTC)
    for digest, experts in sampled.sequences.items():
        kept.pop((sampled.tenant, sampled.model_id, digest), None)
        kept[sampled.tenant, sampled.model_id, digest] = experts, now
    ours = {key: len(experts) for key, (experts, _) in kept.items() if key[0] == sampled.tenant}
    excess = sum(ours.values()) - sampled.max_bytes
    for key, size in ours.items():  # oldest first
        if excess > 0:
            del kept[key]
            excess -= size


def prune_experts(memory: Memory, before: datetime) -> None:
    memory.experts = {key: each for key, each in memory.experts.items() if each[1] >= before}


def tell(memory: Memory, pieces: Sequence[DrawnTokens]) -> None:
    memory.told += [message(drawn_topic(each.sampling_session_id, each.seq_id), each.encoded()) for each in pieces]
