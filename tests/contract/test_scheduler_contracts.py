from tinsmith.builtin.fair_scheduler import FairConfig, FairScheduler
from tinsmith.builtin.schedulers import FifoConfig, FifoScheduler
from tinsmith.scheduler import Scheduler
from tinsmith.testing.scheduler_contract import SchedulerContract


class TestFairScheduler(SchedulerContract):
    def make_scheduler(self) -> Scheduler:
        return FairScheduler(FairConfig())


class TestFifoScheduler(SchedulerContract):
    def make_scheduler(self) -> Scheduler:
        return FifoScheduler(FifoConfig())
