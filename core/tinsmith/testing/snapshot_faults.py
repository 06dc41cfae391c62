"""A sampler that serves other weights than it was given: faults seen in real servers, to plant in tests."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from tinsmith.backend import HostSnapshot, SamplerCapabilities, SamplingBackend, Snapshot
from tinsmith.operations import Failed, Sample, SampleOutput

Fault = Callable[[Snapshot, Mapping[str, Snapshot]], Snapshot]
"""Return the snapshot to load in place of the given one. Earlier snapshots are given oldest first."""


class FaultySampler(SamplingBackend):
    """A real sampler behind a fault; None means no fault. Snapshots of all models pass through it."""

    def __init__(self, sampler: SamplingBackend) -> None:
        self.fault: Fault | None = None
        self._sampler = sampler
        self._seen: dict[str, Snapshot] = {}

    @property
    def sampler_capabilities(self) -> SamplerCapabilities:
        return self._sampler.sampler_capabilities

    async def load_snapshot(self, snapshot: Snapshot) -> None:
        loaded = snapshot if self.fault is None else self.fault(snapshot, self._seen)
        self._seen[snapshot.snapshot_id] = snapshot
        named = HostSnapshot(snapshot.snapshot_id, loaded.lora, loaded.adapter_weights())
        await self._sampler.load_snapshot(snapshot if loaded is snapshot else named)

    async def drop_snapshot(self, snapshot_id: str) -> None:
        await self._sampler.drop_snapshot(snapshot_id)

    async def move_samples(self, snapshot_id: str, newer_id: str) -> None:
        await self._sampler.move_samples(snapshot_id, newer_id)

    async def sample(self, op: Sample) -> SampleOutput | Failed:
        return await self._sampler.sample(op)


def dropped_head_delta(snapshot: Snapshot, _: Mapping[str, Snapshot]) -> Snapshot:
    weights = {
        name: np.zeros_like(array) if ".lm_head.lora_B." in name else array
        for name, array in snapshot.adapter_weights().items()
    }
    return HostSnapshot(snapshot.snapshot_id, snapshot.lora, weights)


def stale_adapter(_: Snapshot, seen: Mapping[str, Snapshot]) -> Snapshot:
    """Serve the previous snapshot."""
    return list(seen.values())[-1]


def wrong_alpha(snapshot: Snapshot, _: Mapping[str, Snapshot]) -> Snapshot:
    """Assume that alpha is twice the rank, as one server does."""
    lora = replace(snapshot.lora, alpha=2.0 * snapshot.lora.rank)
    return HostSnapshot(snapshot.snapshot_id, lora, snapshot.adapter_weights())


def swapped_adapter(_: Snapshot, seen: Mapping[str, Snapshot]) -> Snapshot:
    """Serve the first snapshot ever loaded, which is another model's."""
    return next(iter(seen.values()))


def ignored_adapter(snapshot: Snapshot, _: Mapping[str, Snapshot]) -> Snapshot:
    """Serve the base model."""
    weights = {name: np.zeros_like(array) for name, array in snapshot.adapter_weights().items()}
    return HostSnapshot(snapshot.snapshot_id, snapshot.lora, weights)


FAULTS: Mapping[str, Fault] = {
    "dropped head delta": dropped_head_delta,
    "stale adapter": stale_adapter,
    "wrong alpha": wrong_alpha,
    "swapped adapter": swapped_adapter,
    "ignored adapter": ignored_adapter,
}
