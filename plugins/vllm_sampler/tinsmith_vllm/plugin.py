"""The hooks of tinsmith-vllm. Imported in every process. The parent's side, including this module, imports no vLLM."""

from collections.abc import Mapping
from typing import Any

from tinsmith import BackendContext, Demand, Placement, SamplerSpec, SamplingBackend, hookimpl
from tinsmith_vllm.config import VllmConfig


def create(config: VllmConfig, context: BackendContext) -> SamplingBackend:
    """Start vLLM and wait until it answers."""
    if context.sleeps:
        from tinsmith_vllm.sleepy_sampler import SleepyVllmSampler

        return SleepyVllmSampler(config, context)

    from tinsmith_vllm.sampler import VllmSampler

    return VllmSampler(config, context)


def demand(config: VllmConfig, model: Mapping[str, Any] | None, placement: Placement) -> Demand:  # Any: JSON
    """Return what vLLM takes of each device."""
    from tinsmith_vllm.demand import demand as counted

    return counted(config, model, placement)


@hookimpl
def tinsmith_register_samplers() -> SamplerSpec[VllmConfig]:
    return SamplerSpec(
        name="vllm",
        config=VllmConfig,
        create=create,
        description="samples with vLLM in a process of its own, one LoRA adapter per snapshot",
        demand=demand,
    )
