"""The memory of a rank in all phases of training, calculated from the model's configuration. No torch.

Weights, gradients, moments and gathered layers are counted exactly. A micro-batch's memory is linear in the sizes of
a layer: of layers that are not compiled, a fit to the program's own tensors in `rehearsal.py`; of compiled
ones, what their graph keeps. test_fsdp_costs.py compares both. Memory that the GPU's driver, NCCL and the allocator's
gaps take is an allowance, not measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tinsmith_checkpoints.huggingface import ATTENTION, MLP, DecoderShape, HybridShape, WeightCounts, weight_counts
from tinsmith_fsdp.config import FsdpConfig
from tinsmith_workers import delta_block_bytes

ADAPTER_BYTES: Final = 16  # per weight: itself, its gradient and two moments, in float32
PASS_BYTES: Final = 4  # per weight: what a pass adds up, beside its micro-batch and the copies in it
STEP_BYTES: Final = 8  # per weight: what an optimizer step computes on a CPU; GPUs have a kernel. No micro-batch then
FULL_BYTES: Final = 16  # per fully trained weight, including its gradient and moments
_RUNTIME: Final = 1 << 30  # of a GPU
_GPU_LOGITS: Final = 1 << 27  # of one chunk, as in tinsmith_workers.torch
_CPU_LOGITS: Final = 1 << 22
_PER_LOGIT: Final = 12  # logits, and an adapter's part before and after it is scaled, in float32
STRICT_SEQUENCES: Final = 8
"""Sequences that run together on a rank if each has a gradient of its own, and memory is counted."""

ITEM: Final = {"float32": 4, "bfloat16": 2}  # bytes per weight of the base model

_KEPT: Final = {"bfloat16": (12, 8, 10, 8, 14), "float32": (19, 16, 14, 10, 28)}
"""Bytes per token that a layer keeps for its backward pass, for each of its hidden, inner, q and kv size and rank."""

_DIFFERENTIATED: Final = {"bfloat16": (2, 4, 0, 0, 0), "float32": (8, 2, 4, 3, 2)}
"""Additional memory while it is differentiated."""

_COMPILED_KEPT: Final = (8, 6, 6, 6, 14)
"""As `_KEPT`, of compiled layers in bfloat16: they compute cheap things again."""

_COMPILED_DIFFERENTIATED: Final = (2, 12, 0, 0, 0)
"""As `_DIFFERENTIATED`. From peaks on an H200: kernels write what they fuse beside all that the layer has kept."""

_EXPERTS_KEPT: Final = {"bfloat16": (8, 10, 10, 8, 14), "float32": (19, 16, 14, 10, 28)}
_EXPERTS_DIFFERENTIATED: Final = {"bfloat16": (3, 3, 0, 0, 0), "float32": (8, 4, 4, 3, 2)}
"""As the above, of layers with experts, compiled or not. The inner size is that of all experts of a token."""

_PAIR_KEPT: Final = {"bfloat16": 4, "float32": 8}
_PAIR_DIFFERENTIATED: Final = {"bfloat16": 5, "float32": 1}
"""In addition, bytes per token, expert of the token, and hidden size."""

_GATE_KEPT: Final = {"bfloat16": (1, 0, 5, 0, 0), "float32": (1, 0, 15, 0, 0)}
"""In addition, in a hybrid's layers that attend: they have a gate."""

_DELTA_KEPT: Final = {"bfloat16": (13, 8, 4, 17, 16), "float32": (19, 16, 8, 21, 32)}
"""As `_KEPT`, of layers with the gated delta rule: for hidden, inner, mixed and value size, and rank."""

_TOP: Final = {"bfloat16": (4, 6), "float32": (8, 8)}
"""Bytes per token and hidden size at the head: for all tokens, and for a tensor-parallel rank's share."""
_PER_TOKEN: Final = 500  # ids, positions, rotations


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """How many ranks there are, and how they compute."""

    dp: int
    shards: int  # of these, how many divide the weights among them
    tp: int
    on_cpu: bool
    dtype: str
    strict: bool
    checkpointing: bool  # recompute activations: as a rule, if they may be kept
    may_keep: bool  # keep them in passes for which there is room: the setting leaves it open
    compiled: bool
    prefetch: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Bytes on one rank."""

    base: int  # its shards of the frozen model
    gathered: int  # layers of all ranks, while they compute, and a matrix of integers that has been converted
    runtime: int
    saved: int  # per token of a micro-batch, by all layers, for the backward pass
    layer: int  # per token, by the layer that is differentiated
    top: int  # per token, at the head
    logits: int  # per token, at the head as well
    head: int  # all logits of one chunk: more are not made at once
    mixing: int  # per token, while a gated delta rule is differentiated; below 0: its MLP's part is free again
    block: int  # by the rule's blocks as well, of which there is one at a time
    copies: int  # for each weight of every adapter in a micro-batch: weight and gradient in its dtype
    stepping: int  # for each weight of an adapter, in an optimizer step
    trained: int  # layers of a fully trained model while they compute, if the base's layers are never gathered
    own_gradients: int  # for each weight of the largest adapter: of single sequences, while they are computed
    exchanged: int  # for each: the addends of the sums, and the buffers to get them from other ranks

    @property
    def fixed(self) -> int:
        return self.base + self.gathered + self.runtime

    @property
    def per_token(self) -> int:
        return self.saved + max(self.layer, self.top, self.mixing)

    def micro_batch(self, tokens: int) -> int:
        """Return the larger peak: at the head, or in the first layer of the backward pass."""
        head = tokens * self.top + min(tokens * self.logits, self.head)
        return tokens * self.saved + max(tokens * self.layer, tokens * self.mixing + self.block, head)


def costs_of(config: FsdpConfig, shape: DecoderShape, ranks: Ranks) -> Costs:
    """Count for one rank. Of unequal shards, the largest."""
    item, weights = ITEM[ranks.dtype], weight_counts(shape)
    layer = (weights.layer_bytes(item) + weights.others * item // weights.num_layers) // ranks.tp  # their mean
    outside = (weights.outside_layers - weights.others) * item // ranks.tp
    gathered = _gathered(config, weights, ranks, layer, outside)
    keeps, takes = _factors(ranks, shape)
    kept = _of_layer(keeps, shape, ranks, config.max_lora_rank, whole=2 * item)
    delta, mixing, block = _of_delta(shape, ranks, config.max_lora_rank)
    delta_layers = shape.num_layers - shape.attending_layers
    more = _of_layer(takes, shape, ranks, config.max_lora_rank, whole=item)
    if shape.experts is not None:
        of_pairs = shape.experts.top_k * shape.hidden_size
        kept, more = kept + _PAIR_KEPT[ranks.dtype] * of_pairs, more + _PAIR_DIFFERENTIATED[ranks.dtype] * of_pairs
    (whole, divided), vocabulary = _TOP[ranks.dtype], shape.vocab_size // ranks.tp
    return Costs(
        base=-(-(outside + weights.num_layers * layer) // ranks.shards),
        gathered=(gathered if ranks.shards > 1 else 0) + _converted(shape) * item // ranks.tp,
        trained=gathered if ranks.shards == 1 else 0,
        stepping=STEP_BYTES if ranks.on_cpu else 0,
        runtime=0 if ranks.on_cpu else _RUNTIME,
        saved=shape.num_layers * (shape.hidden_size * item // ranks.tp)
        if ranks.checkpointing
        else shape.attending_layers * kept + delta_layers * delta,
        layer=_PER_TOKEN + more + (max(kept, delta) if ranks.checkpointing else 0),
        mixing=mixing if ranks.checkpointing else mixing - delta,
        block=block,
        top=_PER_TOKEN + (whole + divided // ranks.tp) * shape.hidden_size,
        logits=_PER_LOGIT * vocabulary,
        head=_PER_LOGIT * max(64 * vocabulary, _CPU_LOGITS if ranks.on_cpu else _GPU_LOGITS),
        copies=0 if ranks.strict else 2 * item,
        own_gradients=4 * STRICT_SEQUENCES if ranks.strict else 0,
        exchanged=4 * STRICT_SEQUENCES * _copies_of_gradients(ranks) if ranks.strict else 4,
    )


def _copies_of_gradients(ranks: Ranks) -> int:
    """Return the peak copies of the gradients: one per rank, and the local one before concatenation.

    With tensor parallelism, the local one takes three.
    """
    if ranks.dp * ranks.tp == 1:
        return 1
    return ranks.dp + (3 if ranks.tp > 1 else 1)


def _gathered(config: FsdpConfig, weights: WeightCounts, ranks: Ranks, layer: int, outside: int) -> int:
    """Count the weights outside of the layers, the computing layer, the next one, and the receive buffers."""
    held = 1 if ranks.shards == 1 else 3
    held = min(held, weights.num_layers) if config.reshard_after_forward else weights.num_layers
    return outside + held * layer


def _converted(shape: DecoderShape) -> int:
    """Count the largest matrix of integers: it is converted to compute with it."""
    if shape.int8 is None:
        return 0
    linear = shape.linear_shapes()
    largest = max(inputs * outputs for inputs, outputs in (linear[path] for path in (*ATTENTION, *MLP)))
    return largest if shape.int8.group_size is None else 2 * largest  # before and after its scales


def _inner_size(shape: DecoderShape) -> int:
    """Return the inner values of a token: of all experts that compute it, if the model has any."""
    if shape.experts is None:
        return shape.intermediate_size
    return shape.experts.top_k * shape.experts.intermediate_size + shape.experts.shared_size


def _of_delta(shape: DecoderShape, ranks: Ranks, lora_rank: int) -> tuple[int, int, int]:
    """Return what a layer with the gated delta rule keeps per token, that without its MLP, and a block's memory."""
    if not isinstance(shape, HybridShape):
        return 0, 0, 0
    hidden, inner, mixed, value, rank = _DELTA_KEPT[ranks.dtype]
    rule = shape.delta
    mixing = hidden * shape.hidden_size // 2 + mixed * rule.mixed_size + value * rule.value_size + rank * lora_rank
    whole = mixing + hidden * shape.hidden_size // 2 + inner * shape.intermediate_size
    if shape.experts is not None:
        at, pairs = _EXPERTS_KEPT[ranks.dtype], _PAIR_KEPT[ranks.dtype] * shape.experts.top_k
        whole = mixing + (at[0] // 2 + pairs) * shape.hidden_size + at[1] * _inner_size(shape)
    return whole, mixing, delta_block_bytes(rule)


def _factors(ranks: Ranks, shape: DecoderShape) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return an attending layer's kept memory and its additional peak, per token and size.

    Code that is compiled around attention (on CPUs, in float32) or collectives counts as if it were not.
    """
    if shape.experts is not None:
        return _with_gate(_EXPERTS_KEPT, shape, ranks), _EXPERTS_DIFFERENTIATED[ranks.dtype]
    if isinstance(shape, HybridShape):
        return _with_gate(_KEPT, shape, ranks), _DIFFERENTIATED[ranks.dtype]
    if ranks.compiled and ranks.dtype == "bfloat16" and ranks.tp == 1 and not ranks.on_cpu:
        return _COMPILED_KEPT, _COMPILED_DIFFERENTIATED
    return _KEPT[ranks.dtype], _DIFFERENTIATED[ranks.dtype]


def _with_gate(kept: Mapping[str, tuple[int, ...]], shape: DecoderShape, ranks: Ranks) -> tuple[int, ...]:
    if not isinstance(shape, HybridShape):
        return kept[ranks.dtype]
    return tuple(each + more for each, more in zip(kept[ranks.dtype], _GATE_KEPT[ranks.dtype], strict=True))


def _of_layer(factors: tuple[int, ...], shape: DecoderShape, ranks: Ranks, lora_rank: int, *, whole: int) -> int:
    """Count for a token. Tensor-parallel ranks divide everything but adapters' products and what linear layers take.

    whole: bytes per hidden size of the latter, of which every rank has all tokens.
    """
    hidden, inner, q, kv, rank = factors
    divided = (hidden - whole) * shape.hidden_size
    divided += inner * _inner_size(shape) + q * shape.q_size + kv * shape.kv_size
    return divided // ranks.tp + whole * shape.hidden_size + rank * lora_rank
