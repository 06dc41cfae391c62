"""The memory that the backend needs of its devices, and the choice of devices for JAX. No jax."""

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from tinsmith import Demand, Placement
from tinsmith.machine import find_compiler
from tinsmith_checkpoints.huggingface import Json
from tinsmith_jax import native
from tinsmith_jax.admission import Budget, budget_of, computing_of, least_bytes
from tinsmith_jax.config import JaxConfig, JaxSamplerConfig, as_trainer
from tinsmith_jax.costs import Computing
from tinsmith_jax.families import config_of
from tinsmith_jax.model_config import ModelConfig

_ELSEWHERE: Final = ("scheduler", "ray")  # launchers that choose the devices themselves


def trainer_demand(config: JaxConfig, model: Mapping[str, Json] | None, placement: Placement) -> Demand:
    """See `tinsmith.BackendSpec`.

    What the CPU can multiply is not known here: unless `dtype` is set, float32 is counted, which takes more if the
    kernels in C++ do not keep the model in bfloat16.
    """
    elsewhere = config.launcher in _ELSEWHERE
    simulated = config.simulated_devices is not None or (_told_cpu() and not elsewhere)
    num_devices = 0 if simulated or elsewhere else -(-_size(config) // config.nnodes)
    if model is None:
        return Demand(num_devices=num_devices)
    on_cpu = simulated or not (placement.devices or elsewhere)
    computing = computing_of(config, on_cpu=on_cpu)
    least, budget = _budget(config, model, computing, placement, trains=True, samples=placement.samples)
    return Demand(
        num_devices=num_devices,
        on_host=on_cpu and config.mesh is None and native.on_cpus(os.environ),
        least_bytes=least,
        fixed=_fixed(budget, f"a micro-batch of {budget.micro_tokens} tokens"),
        per_model={"weights, gradients, moments, a snapshot": budget.model},
        max_models=budget.max_models,
        batch_tokens=budget.micro_tokens,
        layout=_layout(config),
    )


def sampler_demand(config: JaxSamplerConfig, model: Mapping[str, Json] | None, placement: Placement) -> Demand:
    num_devices = 0 if _told_cpu() else _size(config)
    if model is None:
        return Demand(num_devices=num_devices)
    whole = as_trainer(config)
    on_cpu = not placement.devices
    computing = computing_of(whole, on_cpu=on_cpu)
    least, budget = _budget(whole, model, computing, placement, trains=False, samples=True)
    return Demand(
        num_devices=num_devices,
        on_host=on_cpu and config.mesh is None and native.on_cpus(os.environ),
        least_bytes=least,
        fixed=_fixed(budget, "a dispatch"),
        per_model={"weights": budget.costs.weights(config.max_lora_rank)},
        max_models=budget.max_snapshots,
        batch_tokens=budget.slots * budget.context_tokens * computing.data * computing.fsdp,
        layout=_layout(config),
    )


def _told_cpu() -> bool:
    """Return whether the operator wants no GPU to be used."""
    return os.environ.get("JAX_PLATFORMS") == "cpu"


def _size(config: JaxConfig | JaxSamplerConfig) -> int:
    return 1 if config.mesh is None else config.mesh.data * config.mesh.fsdp * config.mesh.tensor


def _layout(config: JaxConfig | JaxSamplerConfig) -> str:
    return "" if config.mesh is None else f"a mesh of {_size(config)} devices"


def _budget(
    config: JaxConfig,
    model: Mapping[str, Json],
    computing: Computing,
    placement: Placement,
    *,
    trains: bool,
    samples: bool,
) -> tuple[int, Budget]:
    """Return the least memory that is enough, and what becomes of that which there is."""
    shape = config_of(model, Path("config.json"))
    if computing.on_cpu and _suits_kernels(config, shape):
        stored = None if shape.int8 is not None else shape.dtype
        computing = replace(computing, native=True, stored="bfloat16" if stored == "bfloat16" else None)
    least = least_bytes(config, shape, computing, trains=trains, samples=samples)
    return least, budget_of(config, shape, computing, placement.memory_bytes, trains=trains, samples=samples)


def _suits_kernels(config: JaxConfig, shape: ModelConfig) -> bool:
    """Return whether the kernels in C++ can be compiled, and compute this model."""
    return native.suits(config, shape) and native.trains(config, shape) and find_compiler() is not None


def _fixed(budget: Budget, program: str) -> dict[str, int]:
    """Return the uses of each device's memory: the fixed ones, and as many models as fit."""
    return {
        "base weights": budget.costs.base,
        f"pages and adapters of {budget.slots} slots": budget.sampler,
        "zeros for absent gradients and moments": budget.costs.zeros if budget.trains else 0,
        program: budget.working(budget.max_models),
        "Python, JAX and its programs"
        if budget.costs.computing.on_cpu
        else "the driver, and gaps": budget.costs.runtime,
    }


def tell_jax(placement: Placement, environment: MutableMapping[str, str]) -> None:
    """Say which devices this process and its workers have, before JAX looks for any."""
    if placement.devices:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(placement.devices)
    if placement.share is not None:
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # what it does not use yet, others may
        environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{placement.share:.3f}"
