"""From settings to processes: vLLM's arguments, and each replica's environment."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from tinsmith import ConfigError, Placement
from tinsmith_checkpoints.huggingface import DecoderShape, Json, has_experts, language_config, read_model_config
from tinsmith_vllm.compat import overrides
from tinsmith_vllm.config import VllmConfig
from tinsmith_vllm.demand import (
    ReplicaLayout,
    context_that_fits,
    known_shape,
    layout_of,
    merges,
    planned_key_values,
    step_tokens,
)
from tinsmith_vllm.messages import Start
from tinsmith_vllm.replica import Launch, interpreter, package_path
from tinsmith_vllm.seen import REMEDY

_NOWHERE: Final = Placement()
_NO_KERNELS: Final = (
    "the sampler's setting `adapters` is 'apply', but the model has experts, and on CPUs vllm has no kernels for their "
    "adapters: set it to 'auto' or 'merge'"
)
_NO_INT8: Final = (
    "the model's matrices are 8-bit integers, for which vllm has no kernels on CPUs: sample with the jax sampler, or "
    "serve the unquantised model"
)
_CANNOT_MERGE: Final = (
    "the sampler's setting `adapters` is 'merge', but the model's matrices are quantised ({0}), and nothing can be "
    "merged into them: set it to 'auto' or 'apply'"
)
_CANNOT_MERGE_ON_CPU: Final = (
    "the model has experts, whose adapters vllm merges on CPUs, and its matrices are quantised ({0}), so that nothing "
    "can be merged into them: sample with the jax sampler, or serve the unquantised model"
)
_NOT_REPLACED: Final = (
    "adapters of models with experts are merged on CPUs, and vllm cannot replace the experts of GptOssForCausalLM once "
    "it has loaded them: sample with the jax sampler, or give the sampler a GPU"
)
_LONGROPE: Final = (
    "the model's rotary embedding (longrope) has other factors for sequences of more than {0} tokens, and vllm takes "
    "the same for all: set the sampler's max_model_len to at most {0}"
)
_NO_SLEEP: Final = (
    "turns of the model are enabled, and vllm for CPUs cannot sleep: disable them, or give the sampler a GPU"
)
_NOT_EAGER: Final = (
    "routing_replay is enabled, but the sampler's setting enforce_eager is false, and compiled graphs do not tell the "
    "experts that they used: leave it out or set it to true"
)
_ALONE: Final = 0.9  # of a device's memory, if nothing says how much


def launches(
    config: VllmConfig,
    model_path: Path,
    cache_dir: Path,
    placement: Placement = _NOWHERE,
    *,
    routed_experts: bool = False,
    sleeps: bool = False,
) -> Iterator[Launch]:
    """Describe the process of each replica, at last of those for fully trained models.

    `routed_experts`: sequences come with the experts that computed them. `sleeps`: vLLM will be asked to. Raise
    ConfigError if the placement does not suffice for the settings, or settings exclude each other.
    """
    if routed_experts and config.enforce_eager is False:
        raise ConfigError(_NOT_EAGER)
    model = read_model_config(model_path) if (model_path / "config.json").exists() else None
    shape, experts = known_shape(model), model is not None and has_experts(model)
    class_name, quantised = next(iter((model or {}).get("architectures") or ("",))), _quantisation(model)
    if config.adapters == "merge" and quantised:
        raise ConfigError(_CANNOT_MERGE.format(quantised))
    layout = layout_of(config, shape, placement)
    sizes = {
        "max_model_len": config.max_model_len or context_that_fits(config, model, placement),
        "kv_cache_memory_bytes": config.kv_cache_bytes or planned_key_values(config, model, placement),
    }
    _refuse_two_kinds_of_factors(language_config(model or {}), sizes["max_model_len"])
    start = Start(
        engine_args={
            **_engine_args(config, model_path, layout, placement),
            "enable_moe_shared_loras": experts,
            "hf_overrides": overrides(model or {}),
            "enforce_eager": bool(config.enforce_eager) or routed_experts,
            **{name: size for name, size in sizes.items() if size is not None},
            **config.engine_args,
            **({"enable_sleep_mode": True} if sleeps else {}),
            # else a step may give away a sequence's pages before its experts are read
            **({"async_scheduling": False} if routed_experts else {}),
        },
        float32_on_cpu=config.dtype is None,
        eager_on_cpu=config.enforce_eager is None and not routed_experts,
        merge_on_cpu=merges(config, experts=experts, on_cpu=True),
        half_the_memory_on_cpu=config.gpu_memory_utilization is None and placement.share is None,
        step_tokens_on_gpu=step_tokens(config, shape, layout, placement),
        impossible_on_cpu=_impossible_on_cpu(
            config, shape, placement, class_name, quantised, experts=experts, sleeps=sleeps
        ),
        routed_experts=routed_experts,
    )
    package = package_path(cache_dir)
    whole = msgspec.structs.replace(start, engine_args={**start.engine_args, "enable_lora": False})
    for number in range(layout.replicas + config.full_replicas):
        yield Launch(
            python=interpreter(config.python),
            start=start if number < layout.replicas else whole,
            environment=_environment(layout, placement, number),
            log=cache_dir / f"vllm-{number}.log",
            package_path=package,
            start_timeout_s=config.start_timeout_s,
            step_timeout_s=config.step_timeout_s,
        )


def _refuse_two_kinds_of_factors(model: Mapping[str, Json], context: int | None) -> None:
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    if isinstance(rope, dict) and "longrope" in (rope.get("rope_type"), rope.get("type")):
        short = model.get("original_max_position_embeddings") or rope["original_max_position_embeddings"]
        if (context or int(model["max_position_embeddings"])) > int(short):
            raise ConfigError(_LONGROPE.format(short))


def _quantisation(model: Mapping[str, Json] | None) -> str:
    """Return what config.json calls the way in which matrices are quantised; empty if they are not."""
    settings = language_config(model or {}).get("quantization_config") or {}
    return str(settings.get("quant_method", "")) if isinstance(settings, dict) else ""


def _impossible_on_cpu(
    config: VllmConfig,
    shape: DecoderShape | None,
    placement: Placement,
    class_name: str,
    quantised: str,
    *,
    experts: bool,
    sleeps: bool,
) -> str:
    """Return why the model cannot be sampled without a GPU, or an empty string."""
    if placement.devices:
        return f"the sampler has devices {', '.join(placement.devices)}, and this vllm is built for CPUs: {REMEDY}"
    if sleeps:
        return _NO_SLEEP
    if shape is not None and shape.int8 is not None:
        return _NO_INT8
    if merges(config, experts=experts, on_cpu=True):
        if quantised:
            return _CANNOT_MERGE_ON_CPU.format(quantised)
        if class_name == "GptOssForCausalLM":
            return _NOT_REPLACED
    return _NO_KERNELS if config.adapters == "apply" and experts else ""


def _engine_args(
    config: VllmConfig, model_path: Path, layout: ReplicaLayout, placement: Placement
) -> dict[str, object]:
    return {
        "model": str(model_path),
        "dtype": config.dtype or "auto",
        "tensor_parallel_size": layout.tensor_parallel,
        "max_num_seqs": config.max_num_seqs,
        "gpu_memory_utilization": config.gpu_memory_utilization or _share(placement),
        "kv_cache_dtype": config.kv_cache_dtype,
        "enable_prefix_caching": config.prefix_caching,
        "enforce_eager": bool(config.enforce_eager),
        "seed": config.seed,
        "max_logprobs": config.max_topk_logprobs,
        "enable_lora": not merges(config, experts=False, on_cpu=False),
        "max_loras": config.max_loras,
        "max_cpu_loras": config.max_cpu_loras or 2 * config.max_loras,
        "max_lora_rank": config.max_lora_rank,
    }


def _share(placement: Placement) -> float:
    """Return the part of a device's memory that vLLM may take, rounded down."""
    return _ALONE if placement.share is None else math.floor(placement.share * 1000) / 1000


def _environment(layout: ReplicaLayout, placement: Placement, number: int) -> dict[str, str]:
    """Give each replica its own devices, if there are any to choose from."""
    size = layout.tensor_parallel
    devices = placement.devices or tuple(map(str, range(layout.num_devices)))
    if layout.num_devices == size and not placement.devices:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[number * size : (number + 1) * size])}
