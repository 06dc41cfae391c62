"""The schedulers `fair` (default) and `fifo`."""

from typing import Any

from tinsmith.builtin.fair_scheduler import FairConfig, FairScheduler
from tinsmith.builtin.fifo_scheduler import FifoConfig, FifoScheduler
from tinsmith.hookspecs import hookimpl
from tinsmith.scheduler import SchedulerSpec


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
