"""What the backend takes of its devices, and how JAX is told which they are. No jax."""

from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any, Final

from tinsmith import Demand, Placement
from tinsmith.huggingface import adapter_weights, decoder_shape, weight_counts
from tinsmith_jax.config import JaxConfig, JaxSamplerConfig

_ARCHITECTURES: Final = ("LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
_STATE_BYTES: Final = 16  # per weight of an adapter: itself, its gradient and two moments, in float32
_ELSEWHERE: Final = ("scheduler", "ray")  # launchers that choose the devices themselves


def trainer_demand(config: JaxConfig, model: Mapping[str, Any] | None, placement: Placement) -> Demand:  # Any: JSON
    """See `tinsmith.BackendSpec`. Activations and compiled programs' buffers are not counted."""
    if config.simulated_devices is not None or config.launcher in _ELSEWHERE:
        return _demand(config, model, placement, num_devices=0)
    return _demand(config, model, placement, num_devices=-(-_size(config) // config.nnodes))


def sampler_demand(
    config: JaxSamplerConfig, model: Mapping[str, Any] | None, placement: Placement
) -> Demand:  # Any: as above
    return _demand(config, model, placement, num_devices=_size(config))


def _size(config: JaxConfig | JaxSamplerConfig) -> int:
    return 1 if config.mesh is None else config.mesh.data * config.mesh.fsdp * config.mesh.tensor


def _demand(
    config: JaxConfig | JaxSamplerConfig, model: Mapping[str, Any] | None, placement: Placement, *, num_devices: int
) -> Demand:  # Any: as above
    if model is None:
        return Demand(num_devices=num_devices)
    shape = decoder_shape(model, Path("config.json"), supported=_ARCHITECTURES)
    item = 4 if config.dtype == "float32" or (config.dtype is None and not placement.devices) else 2
    shards = 1 if config.mesh is None else config.mesh.fsdp * config.mesh.tensor
    base = weight_counts(shape).total * item // shards
    adapter = adapter_weights(shape, config.max_lora_rank) * (_STATE_BYTES if isinstance(config, JaxConfig) else 4)
    return Demand(
        num_devices=num_devices,
        least_bytes=base + adapter,
        fixed={"base weights": base},
        per_model={"weights, gradients, moments" if isinstance(config, JaxConfig) else "weights": adapter},
        layout="" if config.mesh is None else f"a mesh of {_size(config)} devices",
    )


def tell_jax(placement: Placement, environment: MutableMapping[str, str]) -> None:
    """Say which devices this process and its workers have, before JAX looks for any."""
    if placement.devices:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(placement.devices)
    if placement.share is not None:
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # what it does not use yet, others may
        environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{placement.share:.3f}"
