"""The memory that the backend needs of its devices, for `tinsmith plan` and a server's placement. No torch."""

from collections.abc import Mapping
from pathlib import Path

from tinsmith import ConfigError, Demand, Placement
from tinsmith_checkpoints.huggingface import Json
from tinsmith_fsdp.admission import Budget, budget_of, least_bytes
from tinsmith_fsdp.architecture import architecture_of
from tinsmith_fsdp.config import FsdpConfig
from tinsmith_fsdp.costs import Ranks


def demand(config: FsdpConfig, model: Mapping[str, Json] | None, placement: Placement) -> Demand:
    """See `tinsmith.BackendSpec`."""
    if model is None:
        return Demand(num_devices=config.num_devices, asleep_bytes=0)
    shape = architecture_of(model, Path("config.json"), config.max_context_tokens)
    ranks = resolved_ranks(config, config.world(placement), on_cpu=config.computes_on_cpu(placement))
    budget = budget_of(config, shape, ranks, placement.memory_bytes)
    return Demand(
        num_devices=config.num_devices,
        least_bytes=least_bytes(config, shape, ranks),
        asleep_bytes=budget.costs.runtime,
        fixed=_fixed(budget),
        per_model={"weights, gradients, moments": budget.adapter},
        max_models=budget.max_models,
        batch_tokens=budget.micro_tokens,
        layout=_layout(ranks),
        remarks=_remarks(budget),
    )


def _remarks(budget: Budget) -> tuple[str, ...]:
    """Say whether activations are recomputed in the backward pass, and why. On a CPU by default, there is no choice."""
    if budget.config.activation_checkpointing is not None:
        return (f"activations are {'recomputed' if budget.ranks.checkpointing else 'kept'}, as set",)
    if not budget.ranks.may_keep or budget.memory is None:
        return ()
    most = max(1, budget.max_models)
    kept = [budget.kept_tokens(number * budget.adapter) for number in range(1, most + 1)]
    of_one, of_most = f"{kept[0]} tokens with 1 model in training", f"{kept[-1]} with {most}"
    passes = f"passes of more than {of_one}, {of_most}"
    if budget.gathers:
        why = "smaller micro-batches would gather the layers more often"
        return (f"activations are recomputed on a rank in {passes}: {why}",)
    keeping = sum(tokens >= budget.worth_keeping for tokens in kept)
    if keeping == 0:
        why = f"micro-batches that keep fewer than {budget.worth_keeping} would be slower"
        return (f"activations are recomputed in {passes}: {why}",)
    if keeping == most:
        return (f"activations are kept, in micro-batches of at most {of_one}, {of_most}",)
    models = f"{keeping} model{'s' * (keeping > 1)} in training"
    return (
        f"activations are kept with up to {models}, in micro-batches of {kept[keeping - 1]} to {kept[0]} tokens",
        f"with {most}, passes of up to {kept[-1]} tokens keep theirs; larger ones compute them again, to save memory",
    )


def _layout(ranks: Ranks) -> str:
    world, replicas = ranks.dp * ranks.tp, ranks.dp // ranks.shards
    parts = ["1 rank" if world == 1 else f"{world} ranks"]
    if ranks.tp > 1:
        parts.append(f"tensor parallel {ranks.tp}")
    if replicas > 1:
        parts.append(f"{replicas} replicas of {ranks.shards} shard{'s' * (ranks.shards > 1)}")
    return ", ".join(parts)


def resolved_ranks(config: FsdpConfig, world: int, *, on_cpu: bool) -> Ranks:
    """Resolve the settings that the device decides. Raise ConfigError if they do not divide the ranks."""
    try:
        dp, shards = config.data_parallel(world)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    resolved = config.resolved(on_cpu=on_cpu)
    return Ranks(
        dp=dp,
        shards=shards,
        tp=config.tensor_parallel,
        on_cpu=on_cpu,
        dtype=resolved.dtype,
        strict=resolved.strict,
        checkpointing=resolved.checkpointing,
        may_keep=not on_cpu and config.activation_checkpointing is None,
        compiled=not (on_cpu or resolved.strict) if config.compile is None else config.compile,
        prefetch=not on_cpu if config.prefetch is None else config.prefetch,
    )


def _fixed(budget: Budget) -> dict[str, int]:
    costs = budget.costs
    return {
        "base weights": costs.base,
        "gathered layers": costs.gathered,
        f"a micro-batch of {budget.micro_tokens} tokens": budget.micro_batch,
        "CUDA and NCCL": costs.runtime,
    }
