"""Bytes on one GPU, by part, at the moment of the greatest need.

Legend: T = tokens of a micro-batch of one rank, t = tensor parallel ranks, H = hidden, q, kv = widths of queries and of
keys, d = of one head, F = intermediate size, R = padded rank, G = adapters in the call, E = experts on this rank,
M = T k / t = rows at the experts, if the router is even, b = bytes of an activation.

A layer keeps for the backward pass, in numbers of b bytes for each of T tokens:

    norms      their inputs, divided over t: 2H/t
    inputs     of the matrices, gathered: 2H (of attention and of a dense MLP), for the gradients of adapters or weights
    attention  (4q + 4kv)/t: queries before and after norm and rotation, keys, values, the result; (5q + 3kv)/t on a CPU
    rotation   4d, the cosines and sines of queries and keys
    MLP        5F/t: gate and up (2), silu, up once more (Megatron adds an offset of 0), the product
    adapters   R for each of 7 modules; of the adapters themselves, copies in the dtype of activations (none in float32)
    gate       4q/t more, where attention has one (hybrids)
    latents    in place of inputs and attention: H/t; those of queries before and after their norm, which gathers them;
               likewise those of keys and values, and the rotated part; (4q + v)/t for queries, keys, values, which are
               made as wide as these, the result, and its part that counts, v. Then the rotation
    delta rule in place of attention and rotation: 2 for each channel of the convolution, and 6 for each value (9 in
               bfloat16), over t; and a block of the rule while it is differentiated, see `delta_block_bytes`, over t
    shared     of an expert that computes every token, what an MLP keeps, and its output once more, before its gate
    experts    H/t (what the router reads), and for each of M rows 2H + 5F + 3R; of the adapters, copies spread over
               experts: 3 G E R (H + F)

With recomputation, a layer keeps its input alone: H/t. One layer then has everything, while its backward pass runs.

A stage holds as many micro-batches as stages follow, itself included. The tests compare the sum with measured peaks.
"""

import math
from dataclasses import dataclass, fields
from functools import cache

from tinsmith import LoraConfig
from tinsmith_checkpoints.huggingface import (
    ATTENTION,
    DELTA,
    LATENT,
    MLP,
    SHARED_EXPERT,
    SHARED_EXPERTS,
    DecoderShape,
    HybridShape,
    LatentShape,
)
from tinsmith_megatron.parallel import Layout, Work
from tinsmith_workers import AdapterLayout, ModelPart, delta_block_bytes

_F32 = 4
_RANK_STEP = 8
_CPU_LOGITS, _GPU_LOGITS, _MIN_ROWS = 1 << 22, 1 << 27, 64  # as in head.py
_WHOLE = (LATENT[0], LATENT[2])  # modules whose matrices are not divided
_ROW_PARALLEL = (ATTENTION[3], DELTA[-1], MLP[-1], SHARED_EXPERT[-1], SHARED_EXPERTS[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one GPU."""

    weights: float  # of the base, or of the trained model
    adapters: float  # of all tenants, float32
    moments: float  # and the float32 copy of fully trained weights
    gradients: float  # pending ones
    activations: float
    buffers: float  # adapters side by side in a call, gradients of the call, logits, temporaries

    @property
    def total(self) -> float:
        return float(sum(getattr(self, field.name) for field in fields(self)))


def peak(shape: DecoderShape, layout: Layout, work: Work) -> Memory:
    """Return the memory of the rank that needs most."""
    return max((on_stage(shape, layout, work, stage) for stage in layout.fullest_stages), key=lambda each: each.total)


def on_stage(shape: DecoderShape, layout: Layout, work: Work, stage: int) -> Memory:
    part = layout.part(shape, stage)
    divided, repeated, experts = weights_of(shape, layout, part)
    weights = (divided + repeated + experts) * work.item
    activations, buffers = _activations(shape, layout, work, part), _largest_buffer(shape, layout, work, part)
    if work.full:
        own = divided / layout.dp + repeated / (layout.dp * layout.tp) + experts / layout.expert_copies
        copy = own if work.item != _F32 else 0
        return Memory(
            weights=weights,
            adapters=0,
            moments=(2 * own + copy) * _F32,
            gradients=own * _F32,
            activations=activations,
            buffers=buffers + (divided + repeated + experts) * _F32,
        )
    size = work.tenants * sum(adapter_sizes(shape, part, work.rank)) * _F32
    return Memory(
        weights=weights,
        adapters=size,
        moments=2 * size,
        gradients=size,
        activations=activations,
        buffers=buffers + 2 * size,
    )


def weights_of(shape: DecoderShape, layout: Layout, part: ModelPart) -> tuple[float, float, float]:
    """Return the numbers of weights of one rank that tp divides, that all its ranks hold, and of experts."""
    layers = [_weights_of_layer(shape, layer, layout.tp, len(part.experts)) for layer in part.layers]
    divided, repeated, experts = (float(sum(each)) for each in zip(*layers, strict=True))
    tables = (part.stage == 0) + (part.has_head and not (shape.tied and part.stage == 0))
    divided += tables * shape.vocab_size * shape.hidden_size / layout.tp
    return divided, repeated + part.has_head * shape.hidden_size, experts


@cache
def _weights_of_layer(shape: DecoderShape, layer: int, t: int, num_experts: int) -> tuple[float, float, float]:
    linear, whole = shape.linear_shapes(), 0
    divided = 0.0
    for path in (*shape.mixer_modules(layer), *shape.feed_forward_modules(layer)):
        inputs, outputs = linear[path]
        if path in _WHOLE:
            whole += inputs * outputs
        else:
            divided += inputs * outputs / t
    whole += shape.vector_weights
    if isinstance(shape, HybridShape) and layer in shape.delta_layers:
        rule = shape.delta
        divided += (rule.mixed_size * rule.width + 2 * rule.value_heads) / t
        whole += rule.value_dim - 2 * shape.head_dim
    if shape.experts is None or not shape.has_experts(layer):
        return divided, whole, 0
    whole += shape.hidden_size * (shape.experts.num_experts + shape.experts.shared_gate)
    return divided, whole, 3 * shape.hidden_size * shape.experts.intermediate_size * num_experts


def adapter_sizes(shape: DecoderShape, part: ModelPart, rank: int) -> tuple[int, int]:
    """Return the numbers in this part of one adapter: held by all ranks of a stage, and of experts."""
    number, period = len(part.experts), shape.period
    sizes = [_layer_sizes(shape, layer % period, number, rank, has_head=False) for layer in part.layers]
    first = part.layers.start % period
    with_head, _ = _layer_sizes(shape, first, number, rank, has_head=part.has_head)
    shared, experts = (sum(each) for each in zip(*sizes, strict=True))
    return shared + with_head - sizes[0][0], experts


@cache
def _layer_sizes(shape: DecoderShape, layer: int, num_experts: int, rank: int, *, has_head: bool) -> tuple[int, int]:
    layers = range(layer, layer + 1)
    part = ModelPart(layers=layers, experts=range(num_experts), has_head=has_head, stage=0, is_first_of_stage=True)
    layout = AdapterLayout(LoraConfig(rank=rank, seed=0), shape, part)
    return layout.shared_size, layout.size - layout.shared_size


def _activations(shape: DecoderShape, layout: Layout, work: Work, part: ModelPart) -> float:
    """Return the bytes that are kept for the backward pass, of all micro-batches under way."""
    under_way = min(layout.pp - part.stage, work.micro_batches(layout))
    row = _row(shape, layout, work)
    if layout.recompute:
        layers = len(part.layers) * row
    else:
        layers = sum(_kept_by_layer(shape, layout, work, part, layer) for layer in part.layers)
    sent = row if layout.pp > 1 and not part.has_head else 0
    return under_way * (layers + sent)


def _row(shape: DecoderShape, layout: Layout, work: Work) -> float:
    """Return the bytes of the hidden states between layers."""
    return work.tokens * shape.hidden_size / layout.tp * work.item


def _kept_by_layer(shape: DecoderShape, layout: Layout, work: Work, part: ModelPart, layer: int) -> float:
    hidden, t = shape.hidden_size, layout.tp
    rank, mixing = _padded(work.rank), len(shape.mixer_modules(layer))
    token = 2 * hidden / t + _mixing(shape, layout, work, layer) + mixing * rank
    copies = _copies(shape, layout, work, layer)
    if shape.experts is None or not shape.has_experts(layer):
        token += hidden + 5 * shape.intermediate_size / t + 3 * rank
        return (token * work.tokens + copies) * work.item
    inner = shape.experts.intermediate_size
    token += hidden / t
    if shape.experts.shared_size:
        token += 2 * hidden + 5 * shape.experts.shared_size / t + 3 * rank
    row = 2 * hidden + 5 * inner + 3 * rank
    tenants = 0 if work.full else work.tenants
    spread = 3 * tenants * len(part.experts) * rank * (hidden + inner)
    return (token * work.tokens + row * _rows(shape, layout, work) + spread + copies) * work.item


def _mixing(shape: DecoderShape, layout: Layout, work: Work, layer: int) -> float:
    """Return the numbers that attention keeps for each token with its input, or what a layer has in its place."""
    hidden, t = shape.hidden_size, layout.tp
    if isinstance(shape, HybridShape) and layer in shape.delta_layers:
        values = 6 if work.item == _F32 else 9
        return hidden + (2 * shape.delta.mixed_size + values * shape.delta.value_size) / t
    if isinstance(shape, LatentShape):
        latents = (shape.query_rank or 0) * (1 + 1 / t) + shape.rank + shape.cached_size / t
        heads = 4 * shape.q_size + shape.num_heads * shape.value_dim
        own = hidden / t if shape.query_rank else hidden
        return own + latents + heads / t + 4 * shape.rotated_dim
    q, kv = (5, 3) if work.on_cpu else (4, 4)
    gate = 4 * isinstance(shape, HybridShape)
    return hidden + ((q + gate) * shape.q_size + kv * shape.kv_size) / t + 4 * shape.head_dim


def _rows(shape: DecoderShape, layout: Layout, work: Work) -> float:
    assert shape.experts is not None
    return work.tokens / layout.tp * shape.experts.top_k


def _copies(shape: DecoderShape, layout: Layout, work: Work, layer: int) -> float:
    """Return the numbers in the copies of a layer's adapters, without experts'."""
    if work.item == _F32 or work.full:
        return 0
    linear, sides, t = shape.linear_shapes(), 0.0, layout.tp
    for path in (*shape.mixer_modules(layer), *shape.feed_forward_modules(layer)):
        inputs, outputs = linear[path]
        if path in _WHOLE:
            sides += inputs + outputs
        elif path in _ROW_PARALLEL:
            sides += inputs / t + outputs
        else:
            sides += inputs + outputs / t
    return work.tenants * _padded(work.rank) * sides


def _padded(rank: int) -> int:
    return math.ceil(rank / _RANK_STEP) * _RANK_STEP


def _largest_buffer(shape: DecoderShape, layout: Layout, work: Work, part: ModelPart) -> float:
    """Return what the head needs, or what the last layer needs while it runs, whichever is larger."""
    row = _row(shape, layout, work)
    layer = row + _temporaries(shape, layout, work) * work.item
    if layout.recompute:
        layer += max(_kept_by_layer(shape, layout, work, part, each) for each in part.layers)
    if isinstance(shape, HybridShape):
        layer += delta_block_bytes(shape.delta) / layout.tp
    ends = row + 2 * layout.tp * row  # the last norm's input, what the head reads, and its gradient
    return max(layer, ends + _logits(shape, layout, work) if part.has_head else 0)


def _temporaries(shape: DecoderShape, layout: Layout, work: Work) -> float:
    """Return the numbers in a sublayer's output, what adapters add to it, and their sum; and in rows on their way."""
    hidden, linear = shape.hidden_size, shape.linear_shapes()
    summed = 1 if work.full else 3
    widest = max(hidden, *(linear[path][1] / layout.tp for path in shape.attention_modules))
    if not shape.has_experts(0):
        widest = max(widest, shape.intermediate_size / layout.tp)
    plain = work.tokens * summed * widest
    if shape.experts is None:
        return plain
    return max(plain, _rows(shape, layout, work) * hidden * (2 + (layout.ep > 1) + summed))


def _logits(shape: DecoderShape, layout: Layout, work: Work) -> float:
    """A chunk's logits, what adapters add, and their exponentials, in float32; in bfloat16 also the product itself."""
    columns = shape.vocab_size // layout.tp
    rows = min(work.tokens, max(_MIN_ROWS, (_CPU_LOGITS if work.on_cpu else _GPU_LOGITS) // columns))
    return rows * columns * (3 * _F32 + (work.item if work.item != _F32 else 0))
