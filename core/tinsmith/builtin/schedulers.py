"""The schedulers `fair` (default) and `fifo`."""

from collections.abc import Mapping, Sequence
from typing import Any

from tinsmith.backend import BackendConfig
from tinsmith.builtin.fair_scheduler import FairConfig, FairScheduler
from tinsmith.hookspecs import hookimpl
from tinsmith.scheduler import Batch, Limits, Pending, Scheduler, SchedulerSpec


class FifoConfig(BackendConfig):
    """The `scheduler:` section for `plugin: fifo`. It has no settings."""


class FifoScheduler(Scheduler):
    def __init__(self, config: FifoConfig) -> None:
        del config

    def plan(self, pending: Sequence[Pending], *, limits: Limits, now_s: float, memory: Mapping[str, float]) -> Batch:
        del limits, now_s, memory
        heads: dict[str, Pending] = {}
        for each in sorted(pending, key=lambda each: each.seq_id):
            heads.setdefault(each.model_id, each)
        if not heads:
            return Batch()
        oldest = min(heads.values(), key=lambda each: (each.enqueued_at_s, each.model_id))
        return Batch(kind=oldest.kind, request_ids=(oldest.request_id,))


@hookimpl
def tinsmith_register_schedulers() -> list[SchedulerSpec[Any]]:
    return [
        SchedulerSpec(
            name="fair",
            config=FairConfig,
            create=FairScheduler,
            description="merges tenants' passes up to the token budget, fairly by tokens (default)",
        ),
        SchedulerSpec(
            name="fifo", config=FifoConfig, create=FifoScheduler, description="one operation at a time, oldest first"
        ),
    ]
