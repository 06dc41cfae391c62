"""The toy backend as a sampler of its own, for a trainer that is another object. It can sleep while that one trains."""

from tinsmith.backend import BackendContext, OnTokens, SamplerCapabilities, SamplerSpec, SamplingBackend, Snapshot
from tinsmith.builtin.toy_backend import ToyBackend, ToyConfig
from tinsmith.hookspecs import hookimpl
from tinsmith.operations import Failed, Sample, SampleOutput


class ToySampler(SamplingBackend):
    def __init__(self, config: ToyConfig, context: BackendContext) -> None:
        self._toy = ToyBackend(config, context)

    @property
    def sampler_capabilities(self) -> SamplerCapabilities:
        return self._toy.sampler_capabilities

    async def load_snapshot(self, snapshot: Snapshot) -> None:
        await self._toy.load_snapshot(snapshot)

    async def drop_snapshot(self, snapshot_id: str) -> None:
        await self._toy.drop_snapshot(snapshot_id)

    async def move_samples(self, snapshot_id: str, newer_id: str) -> None:
        await self._toy.move_samples(snapshot_id, newer_id)

    async def sample(self, op: Sample) -> SampleOutput | Failed:
        return await self._toy.sample(op)

    async def sample_streaming(self, op: Sample, on_tokens: OnTokens) -> SampleOutput | Failed:
        return await self._toy.sample_streaming(op, on_tokens)

    async def sleep_sampler(self) -> None:
        self._toy.sleep_trainer()

    async def wake_sampler(self) -> None:
        self._toy.wake_trainer()

    def close(self) -> None:
        self._toy.close()


@hookimpl
def tinsmith_register_samplers() -> SamplerSpec[ToyConfig]:
    return SamplerSpec(
        name="toy",
        config=ToyConfig,
        create=ToySampler,
        description="samples from the toy backend's model, apart from it, and can take turns with it",
    )
