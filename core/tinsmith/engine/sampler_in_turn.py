"""A sampler that shares its devices with the trainer: each call waits for its turn."""

from tinsmith.backend import Capabilities, SamplingBackend, Snapshot
from tinsmith.engine.device_turns import DeviceTurns
from tinsmith.operations import Failed, Sample, SampleOutput


class SamplerInTurn(SamplingBackend):
    def __init__(self, sampler: SamplingBackend, turns: DeviceTurns) -> None:
        self._sampler = sampler
        self._turns = turns

    @property
    def capabilities(self) -> Capabilities:
        return self._sampler.capabilities

    @property
    def trouble(self) -> str | None:
        return self._sampler.trouble

    async def load_snapshot(self, snapshot: Snapshot) -> None:
        async with self._turns.turn("sampling"):
            await self._sampler.load_snapshot(snapshot)

    async def drop_snapshot(self, snapshot_id: str) -> None:
        async with self._turns.turn("sampling"):
            await self._sampler.drop_snapshot(snapshot_id)

    async def sample(self, op: Sample) -> SampleOutput | Failed:
        async with self._turns.turn("sampling"):
            return await self._sampler.sample(op)
