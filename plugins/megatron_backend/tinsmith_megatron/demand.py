"""The backend's demand of its devices, for `tinsmith plan` and for placement. No torch."""

from collections.abc import Mapping
from pathlib import Path

from tinsmith import Demand, Placement
from tinsmith_checkpoints.huggingface import Json
from tinsmith_megatron.admission import Budget, budget_of
from tinsmith_megatron.architecture import architecture_of
from tinsmith_megatron.config import MegatronConfig
from tinsmith_megatron.parallel import check_model, check_ranks, smallest_group


def demand(config: MegatronConfig, model: Mapping[str, Json] | None, placement: Placement) -> Demand:
    """See `tinsmith.BackendSpec`."""
    if model is None:
        return Demand(num_devices=config.num_devices)
    shape = architecture_of(model, Path("config.json")).shape
    check_model(config, shape)
    world = config.world(placement, least=smallest_group(config))
    check_ranks(config, world)
    on_cpu = config.computes_on_cpu(placement)
    budget = budget_of(config, shape, world, placement.memory_bytes, on_cpu=on_cpu)
    smallest = budget_of(config, shape, world, 0, on_cpu=on_cpu)
    return Demand(
        num_devices=config.num_devices,
        least_bytes=smallest.least,
        fixed={
            "base weights": budget.base,
            f"micro-batches of {budget.micro_tokens} tokens": budget.micro_batch,
            "CUDA and NCCL": budget.runtime,
        },
        per_model={"weights, gradients, moments": budget.per_model},
        max_models=budget.max_models,
        batch_tokens=budget.micro_tokens,
        layout=_layout(budget),
    )


def _layout(budget: Budget) -> str:
    each = budget.layout
    kinds = {"tensor": each.tp, "pipeline": each.pp, "expert": each.ep}
    divided = [f"{kind} parallel {size}" for kind, size in kinds.items() if size > 1]
    return ", ".join([f"{each.gpus} rank{'s' if each.gpus > 1 else ''}", *divided])
