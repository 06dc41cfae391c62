"""Routing replay in the engine. The experts of a sample are recorded beside its result, never in it.

What a training operation replays is part of the operation.
"""

import asyncio
from dataclasses import dataclass, replace

import numpy as np

from tinsmith import operations as ops
from tinsmith.engine.claimed import Claimed, Outcome
from tinsmith.engine.sampling_snapshots import Snapshots
from tinsmith.store import ExpertsSampled
from tinsmith.store.routed_experts import digest_of, encode_experts


@dataclass(frozen=True, slots=True)
class RoutedExpertsKeeper:
    """Keeps the newest `tenant_bytes` of each tenant; None: routing is not replayed, so none are kept."""

    snapshots: Snapshots
    tenant_bytes: int | None

    async def outcome(self, claimed: Claimed, result: ops.Result) -> Outcome:
        """Return a sample's result without experts, which its client does not know, and how they are recorded."""
        if not isinstance(result, ops.SampleOutput) or not isinstance(claimed.operation, ops.Sample):
            return Outcome(result=result)
        answer = replace(result, sequences=tuple(replace(each, routed_experts=None) for each in result.sequences))
        model_id = self.snapshots.model_of(claimed.operation.snapshot_id)
        if self.tenant_bytes is None or model_id is None:
            return Outcome(result=answer)
        encoded = await asyncio.to_thread(_encoded, claimed.operation, result)
        sampled = ExpertsSampled(
            tenant=claimed.record.tenant, model_id=model_id, sequences=encoded, max_bytes=self.tenant_bytes
        )
        return Outcome(result=answer, effects=(sampled,))


def _encoded(operation: ops.Sample, output: ops.SampleOutput) -> dict[bytes, bytes]:
    return {
        digest_of(np.concatenate((operation.prompt_P, each.tokens[:-1]))): encode_experts(each.routed_experts)
        for each in output.sequences
        if each.routed_experts is not None
    }
