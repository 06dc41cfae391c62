"""The hooks of tinsmith-vllm. Imported in every process. The parent's side, including this module, imports no vLLM."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tinsmith import BackendContext, Demand, Device, Placement, SamplerSpec, SamplingBackend, hookimpl
from tinsmith_vllm.config import VllmConfig


def create(config: VllmConfig, context: BackendContext) -> SamplingBackend:
    """Start vLLM and wait until it answers."""
    from tinsmith_vllm.sampler import VllmSampler

    return VllmSampler(config, context)


def demand(config: VllmConfig, model: Mapping[str, Any] | None, placement: Placement) -> Demand:
    """Return what vLLM takes of each device."""
    from tinsmith_vllm.demand import demand as counted

    return counted(config, model, placement)


def check(config: VllmConfig, model_path: Path | None) -> Iterable[str]:
    """Say what keeps vLLM from starting in its environment."""
    from tinsmith_vllm.seen import obstacles

    del model_path
    return obstacles(config)


def diagnose(config: VllmConfig, model_path: Path | None) -> Sequence[Device]:
    """Return the devices that vLLM's interpreter sees."""
    from tinsmith_vllm.seen import find_devices

    del model_path
    return find_devices(config)


@hookimpl
def tinsmith_register_samplers() -> SamplerSpec[VllmConfig]:
    return SamplerSpec(
        name="vllm",
        config=VllmConfig,
        create=create,
        description="samples with vLLM in a process of its own, one LoRA adapter per snapshot",
        diagnose=diagnose,
        check=check,
        demand=demand,
    )
