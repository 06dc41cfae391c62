"""What stands in for the sampler of a base model that can only be trained.

Its capabilities say that it does not sample, so that samples and ephemeral snapshots are refused.
"""

from dataclasses import replace
from typing import Never

from tinsmith.backend import Capabilities, SamplingBackend, Snapshot
from tinsmith.operations import Sample


class NoSampler(SamplingBackend):
    def __init__(self, training: Capabilities) -> None:
        self._capabilities = replace(training, sampling=False)

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    async def load_snapshot(self, snapshot: Snapshot) -> None:
        raise AssertionError(snapshot.snapshot_id)

    async def drop_snapshot(self, snapshot_id: str) -> None:
        """There is none to drop."""

    async def sample(self, op: Sample) -> Never:
        raise AssertionError(op.sampling_session_id)
