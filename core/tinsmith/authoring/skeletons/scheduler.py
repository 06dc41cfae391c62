"""A scheduler: one operation at a time, of the tenant that has waited longest for a turn."""

from collections.abc import Mapping, Sequence

import tinsmith
from tinsmith import Batch, Limits, Pending


class SkeletonConfig(tinsmith.BackendConfig):
    """The `scheduler:` section for `plugin: skeleton`. It has no settings yet."""


class SkeletonScheduler(tinsmith.Scheduler):
    def __init__(self, config: SkeletonConfig) -> None:
        del config

    def plan(self, pending: Sequence[Pending], *, limits: Limits, now_s: float, memory: Mapping[str, float]) -> Batch:
        """Keep nothing to yourself: `memory` holds when each tenant that waits last had a turn."""
        del limits  # a single operation always runs
        first_of_model: dict[str, Pending] = {}
        for each in sorted(pending, key=lambda each: each.seq_id):
            first_of_model.setdefault(each.model_id, each)
        if not first_of_model:
            return Batch()
        oldest_first = sorted(first_of_model.values(), key=lambda each: (each.enqueued_at_s, each.model_id))
        waiting_since: dict[str, float] = {}  # a tenant's last turn, or the arrival of its oldest operation
        for each in oldest_first:
            waiting_since.setdefault(each.tenant, memory.get(each.tenant, each.enqueued_at_s))
        chosen = min(oldest_first, key=lambda each: waiting_since[each.tenant])
        turns = {tenant: since for tenant, since in memory.items() if tenant in waiting_since} | {chosen.tenant: now_s}
        return Batch(kind=chosen.kind, request_ids=(chosen.request_id,), memory=turns)


@tinsmith.hookimpl
def tinsmith_register_schedulers() -> tinsmith.SchedulerSpec[SkeletonConfig]:
    return tinsmith.SchedulerSpec(
        name="skeleton",
        config=SkeletonConfig,
        create=SkeletonScheduler,
        description="one operation at a time, tenants in turn",
    )
