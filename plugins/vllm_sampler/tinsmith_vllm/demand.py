"""How vLLM divides its devices, and its demand of each. Arithmetic over the model's configuration: no vLLM.

What vLLM needs beside weights, adapters, the activations of long steps, and keys and values (CUDA graphs, its
workspace, logits) is an allowance, not measured. On a device of its own, vLLM measures it at its start, and takes it
off what is left for keys and values. On a shared one it would measure what others take in the meantime, so it is told
the bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tinsmith import ConfigError, Demand, Placement
from tinsmith_checkpoints.huggingface import (
    DecoderShape,
    HybridShape,
    Json,
    adapter_weights,
    decoder_shape,
    hybrid_shape,
    language_config,
    weight_counts,
)
from tinsmith_vllm.config import VllmConfig

_DECODERS: Final = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
_FLOAT32_STATES: Final = (
    *("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    *("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
)
_HYBRIDS: Final = (*_FLOAT32_STATES, "Qwen3NextForCausalLM")
"""Recurrent states are of the model's dtype, but for those classes whose configurations ask for float32."""
_ALLOWANCE: Final = 3 << 30  # of a GPU, with steps of _SHORT_STEP tokens
_SHORT_STEP: Final = 2048
_LONG_STEP: Final = 8192  # prompts are read in fewer steps
_WHOLE: Final = 0.92  # of a device: what a part gets that has it for itself
_ROOM: Final = 0.45  # of a device that weights may take, if there are more devices to divide them over
_LONG: Final = 8192  # tokens that a sequence may have, whatever the memory
_BLOCK: Final = 128  # tokens of a block of vLLM's cache, at most; on CPUs, unless blocks must be larger
_GPU_BLOCK: Final = 16


@dataclass(frozen=True, slots=True)
class ReplicaLayout:
    replicas: int
    tensor_parallel: int
    full_replicas: int = 0  # further ones, for fully trained models

    @property
    def num_devices(self) -> int:
        return (self.replicas + self.full_replicas) * self.tensor_parallel


@dataclass(frozen=True, slots=True)
class _Cache:
    """vLLM's cache on one device, in blocks.

    In hybrids, a block holds tokens of the layers that attend, or a sequence's states of as many other layers. It has
    as many tokens as make it as large as the states. With prefix caching, vLLM keeps two states of a sequence: the one
    that is read, and the one that is written.
    """

    block_tokens: int
    block_bytes: int  # in all layers that attend
    other_bytes: int  # of a sequence's states, and of a block that vLLM keeps empty

    def holding(self, tokens: int) -> int:
        """Return the bytes that a sequence needs, with the token that vLLM draws after it."""
        return -(-(tokens + 1) // self.block_tokens) * self.block_bytes + self.other_bytes

    def tokens(self, num_bytes: int) -> int:
        """Return the tokens of all blocks for one sequence."""
        return max(0, num_bytes - self.other_bytes) // self.block_bytes * self.block_tokens


def layout_of(config: VllmConfig, shape: DecoderShape | None, placement: Placement) -> ReplicaLayout:
    """Return the settings, or what suits the devices: as few for each replica as leave room beside the weights.

    Raise ConfigError if there are too few devices.
    """
    number = len(placement.devices)
    size = config.tensor_parallel_size or (1 if config.replicas else _smallest(config, shape, placement))
    replicas = config.replicas or max(1, number // size - config.full_replicas)
    layout = ReplicaLayout(replicas, size, config.full_replicas)
    if placement.devices and layout.num_devices > number:
        further = f" and {config.full_replicas} full_replicas" if config.full_replicas else ""
        msg = (
            f"{number} devices are given; {layout.replicas} replicas{further} of tensor_parallel_size {size} need "
            f"{layout.num_devices}"
        )
        raise ConfigError(msg)
    return layout


def _smallest(config: VllmConfig, shape: DecoderShape | None, placement: Placement) -> int:
    if shape is None or placement.device_bytes is None:
        return 1
    weights, size = weight_counts(shape).total_bytes(_item(config, placement)), 1
    while 2 * size <= len(placement.devices) and weights / size > _ROOM * placement.device_bytes:
        size *= 2
    return size


def demand(config: VllmConfig, model: Mapping[str, Json] | None, placement: Placement) -> Demand:
    """See `tinsmith.SamplerSpec`."""
    shape = known_shape(model)
    layout = layout_of(config, shape, placement)
    num_devices = layout.num_devices if config.replicas or config.tensor_parallel_size else None
    further = f" and {layout.full_replicas} for fully trained models," if layout.full_replicas else ""
    told = f"{_counted(layout.replicas, 'replica')}{further} of {_counted(layout.tensor_parallel, 'GPU')}"
    told = told if placement.devices else ""
    asleep = _ALLOWANCE if placement.devices else 0  # at most: part of it is given back
    if shape is None:
        return Demand(num_devices=num_devices, asleep_bytes=asleep, layout=told)
    fixed = _fixed(config, shape, layout, placement, step_tokens(config, shape, layout, placement))
    cache, longest = _cache(config, shape, layout, placement), _least_tokens(config, shape)
    tokens = 0
    if placement.memory_bytes is not None:
        tokens = cache.tokens(placement.memory_bytes - sum(fixed.values()))
    short = int(config.engine_args.get("max_num_batched_tokens", _SHORT_STEP))
    least = sum(_fixed(config, shape, layout, placement, short).values()) + cache.holding(longest)
    if config.gpu_memory_utilization and placement.device_bytes:
        least = max(least, int(config.gpu_memory_utilization * placement.device_bytes))
    return Demand(
        num_devices=num_devices,
        least_bytes=least,
        asleep_bytes=asleep,
        fixed={**fixed, _name_of_cache(shape): cache.holding(tokens - 1 if tokens else longest)},
        max_models=config.max_loras,
        batch_tokens=tokens or longest,
        replicas=layout.replicas,
        layout=told,
    )


def _name_of_cache(shape: DecoderShape) -> str:
    return "keys, values and states" if isinstance(shape, HybridShape) else "keys and values"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def known_shape(model: Mapping[str, Json] | None) -> DecoderShape | None:
    """Return the sizes of the model. None: its weights cannot be counted here; vLLM may serve it all the same."""
    class_name = next(iter((model or {}).get("architectures") or [""]))
    if model is None or class_name not in (*_DECODERS, *_HYBRIDS):
        return None
    read = hybrid_shape if class_name in _HYBRIDS else decoder_shape
    try:
        return read(language_config(model), Path("config.json"), supported=[class_name])
    except ConfigError:  # quantised in a way that vLLM may know: it checks the configuration itself
        return None


def context_that_fits(config: VllmConfig, model: Mapping[str, Any] | None, placement: Placement) -> int | None:
    """Return the longest sequence for which there is memory, or None to leave it to the settings, or to the model."""
    shape = known_shape(model)
    if shape is None or placement.memory_bytes is None or config.max_model_len is not None:
        return None
    tokens = demand(config, model, placement).batch_tokens - 1
    return tokens if tokens < shape.max_position else None


def planned_key_values(config: VllmConfig, model: Mapping[str, Any] | None, placement: Placement) -> int | None:
    """Return the memory for keys and values of a process that has a part of a device's memory, or of the machine's.

    None: vLLM measures what is left of `gpu_memory_utilization`, as nobody else takes memory of its device.
    """
    if placement.memory_bytes is None or config.kv_cache_bytes is not None:
        return None
    if placement.devices and (config.gpu_memory_utilization or (placement.share or 1.0) >= _WHOLE - 0.001):
        return None
    shape = known_shape(model)
    return None if shape is None else demand(config, model, placement).fixed[_name_of_cache(shape)]


def step_tokens(config: VllmConfig, shape: DecoderShape | None, layout: ReplicaLayout, placement: Placement) -> int:
    """Return how many tokens a step on a GPU may have: many, if that leaves room for four of the longest sequences."""
    if (configured := config.engine_args.get("max_num_batched_tokens")) is not None:
        return int(configured)
    if shape is None or placement.memory_bytes is None:
        return _LONG_STEP
    fixed = sum(_fixed(config, shape, layout, placement, _LONG_STEP).values())
    rest = placement.memory_bytes - fixed
    room = 4 * _cache(config, shape, layout, placement).holding(_least_tokens(config, shape))
    return _LONG_STEP if rest >= room else _SHORT_STEP


def _fixed(
    config: VllmConfig, shape: DecoderShape, layout: ReplicaLayout, placement: Placement, steps: int
) -> dict[str, int]:
    """`steps`: tokens of a step, if it is on a GPU."""
    item = _item(config, placement)
    number = 0 if merges(config, experts=shape.experts is not None, on_cpu=not placement.devices) else config.max_loras
    return {
        "base weights": weight_counts(shape).total_bytes(item) // layout.tensor_parallel,
        f"{number} adapters of rank {config.max_lora_rank}": number
        * adapter_weights(shape, config.max_lora_rank)
        * item,
        "vLLM itself": _ALLOWANCE if placement.devices else 0,
        f"longer steps, of {steps} tokens": _activations(shape, layout, steps, item) if placement.devices else 0,
    }


def _activations(shape: DecoderShape, layout: ReplicaLayout, steps: int, item: int) -> int:
    """Return what the widest layer of a step takes beyond one of _SHORT_STEP tokens, which the allowance holds."""
    experts = shape.experts
    inner = shape.intermediate_size
    if experts is not None:
        inner = experts.top_k * experts.intermediate_size + experts.shared_size
    mixed = shape.q_size + 2 * shape.kv_size
    if isinstance(shape, HybridShape):
        mixed = max(mixed + shape.q_size, sum(shape.delta.sizes))
    divided = (mixed + 3 * inner) // layout.tensor_parallel
    return max(0, steps - _SHORT_STEP) * (4 * shape.hidden_size + divided) * item


def merges(config: VllmConfig, *, experts: bool, on_cpu: bool) -> bool:
    """Return whether adapters are merged into the weights: vLLM has no kernels for experts' adapters on CPUs."""
    return config.adapters == "merge" or (config.adapters == "auto" and on_cpu and experts)


def _least_tokens(config: VllmConfig, shape: DecoderShape) -> int:
    return config.max_model_len or min(shape.max_position, _LONG)


def _cache(config: VllmConfig, shape: DecoderShape, layout: ReplicaLayout, placement: Placement) -> _Cache:
    """Return the cache on one device, each of which has one head at least."""
    heads = max(1, shape.num_kv_heads // layout.tensor_parallel)
    item = _item(config, placement)
    token = 2 * heads * shape.head_dim * (1 if config.kv_cache_dtype.startswith("fp8") else item)
    if not isinstance(shape, HybridShape):
        block = _BLOCK * shape.num_layers * token
        return _Cache(_BLOCK, block, block)
    least = int(config.engine_args.get("block_size") or (_GPU_BLOCK if placement.devices else _BLOCK))
    tokens = least * -(-_state_bytes(shape, layout, item) // (least * token))
    attending, others = shape.attending_layers, len(shape.delta_layers)
    fewer, more = sorted((attending, others))
    together = more if more < 1.5 * fewer else fewer  # layers of a block
    blocks, states = (-(-layers // together) for layers in (attending, others))
    one = tokens * token * together
    return _Cache(tokens, blocks * one, (states * (2 if config.prefix_caching else 1) + 1) * one)


def _state_bytes(shape: HybridShape, layout: ReplicaLayout, item: int) -> int:
    """Return the size of a sequence's state in one layer: what the convolution has seen, and the rule's matrices."""
    rule = shape.delta
    of_rule = rule.value_size * rule.key_dim * (4 if shape.class_name in _FLOAT32_STATES else item)
    return (rule.mixed_size * (rule.width - 1) * item + of_rule) // layout.tensor_parallel


def _item(config: VllmConfig, placement: Placement) -> int:
    return 4 if config.dtype == "float32" or (config.dtype is None and not placement.devices) else 2
