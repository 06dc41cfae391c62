"""A sampler behind whose calls nothing is lost: whatever it raises reaches the engine."""

from functools import partial

from tinsmith.backend import Capabilities, SamplingBackend, Snapshot
from tinsmith.engine.failures import guarded
from tinsmith.operations import Failed, Sample, SampleOutput


class GuardedSampler(SamplingBackend):
    def __init__(self, sampler: SamplingBackend) -> None:
        self._sampler = sampler

    @property
    def capabilities(self) -> Capabilities:
        return self._sampler.capabilities

    async def load_snapshot(self, snapshot: Snapshot) -> None:
        await guarded(partial(self._sampler.load_snapshot, snapshot))

    async def drop_snapshot(self, snapshot_id: str) -> None:
        await guarded(partial(self._sampler.drop_snapshot, snapshot_id))

    async def sample(self, op: Sample) -> SampleOutput | Failed:
        return await guarded(partial(self._sampler.sample, op))
