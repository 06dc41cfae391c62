"""The cost of a step: one GPU's FLOPs and received bytes, and the time at given rates.

Legend as in tinsmith_megatron/memory.py; L = layers of a stage, m = micro-batches, p = stages, n, e = ranks of a group,
w = context / 2, the keys that a token sees on average.

FLOPs of a token forward: 2 for each weight that it meets, 4wq for scores and values in each layer that attends, those
of the gated delta rule in the others, and 2r(in + out) for each adapter's module. Backward: as much again for the
gradients of the inputs, 2.5 times as much in attention, and 3 times in the delta rule, which is computed again; with
all weights trained, as much again for theirs; twice as much for adapters. Recomputation repeats the layers' forward
pass.

Bytes received by one GPU, with rings:

    tensor    (t - 1)/t THb for each gathered or scattered sequence: four in a dense layer, or in one with a shared
              expert, two in one with other experts alone, as many backward, and the forward pass's again if it is
              recomputed; four for embedding and head. Of latents, their own size in place of one H
    expert    the rows of other ranks' tokens: (e - 1)/e MHb to the experts and as much back, and the same backward
    pipeline  THb/t forward and backward
    data      gradients, once a step: 2(n - 1)/n 4 bytes for each weight of an adapter; (n - 1)/n (4 + b) for a fully
              trained one (reduce-scatter of gradients, all-gather of weights)

Nothing is taken to overlap. A pipeline works for m + p - 1 turns on m micro-batches.
"""

import math
from dataclasses import dataclass

from tinsmith_checkpoints.huggingface import DecoderShape, HybridShape, LatentShape
from tinsmith_megatron.memory import adapter_sizes, weights_of
from tinsmith_megatron.parallel import Layout, Work
from tinsmith_workbench.layouts.machine import GB, Machine
from tinsmith_workers import delta_flops

_F32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that one GPU receives in a step."""

    tensor: float
    expert: float
    pipeline: float
    data: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    flops: float  # of one GPU in a step
    traffic: Traffic
    compute_s: float
    links_s: float
    idle_s: float  # stages that wait for others
    tokens_per_s: float  # of all GPUs

    @property
    def step_s(self) -> float:
        return self.compute_s + self.links_s + self.idle_s


def cost(shape: DecoderShape, layout: Layout, work: Work, machine: Machine) -> Cost:
    flops = work.step_tokens * _flops_of_a_token(shape, layout, work) / layout.gpus
    sent = traffic(shape, layout, work)
    compute_s = flops / (machine.tflops * 1e12 * machine.efficiency)
    per_micro_s = sum(
        amount / _rate(span, machine)
        for amount, span in (
            (sent.tensor, layout.tp),
            (sent.expert, layout.ep),
            (sent.pipeline, layout.gpus),
        )
    )
    data_s = sent.data / _rate(layout.tp * layout.dp, machine)
    micros = work.micro_batches(layout)
    idle_s = (compute_s + per_micro_s) * (layout.pp - 1) / micros
    total_s = compute_s + per_micro_s + data_s + idle_s
    return Cost(
        flops=flops,
        traffic=sent,
        compute_s=compute_s,
        links_s=per_micro_s + data_s,
        idle_s=idle_s,
        tokens_per_s=work.step_tokens / total_s,
    )


def _rate(span: int, machine: Machine) -> float:
    """Return the rate of a group of neighbouring ranks, of which the first and the last are so far apart."""
    return GB * (machine.node_gb_s if span <= machine.gpus_per_node else machine.network_gb_s)


def _flops_of_a_token(shape: DecoderShape, layout: Layout, work: Work) -> float:
    attention = 4 * shape.attending_layers * work.context / 2 * shape.q_size
    rule = len(shape.delta_layers) * delta_flops(shape.delta) if isinstance(shape, HybridShape) else 0.0
    layers, head = 2 * _weights_met(shape), 2 * shape.vocab_size * shape.hidden_size
    adapters = 0.0 if work.full else 2 * work.rank * _sides_met(shape)
    passes = 3 if work.full else 2
    again = layers + attention + rule + adapters if layout.recompute else 0
    return passes * (layers + head) + 3.5 * attention + 4 * rule + 3 * adapters + again


def _weights_met(shape: DecoderShape) -> float:
    """Return the weights of all layers by which a token is multiplied."""
    linear, found = shape.linear_shapes(), 0.0
    for layer in range(shape.num_layers):
        found += sum(math.prod(linear[path]) for path in _plain_modules(shape, layer))
        if shape.experts is not None and shape.has_experts(layer):
            found += shape.hidden_size * (shape.experts.num_experts + shape.experts.shared_gate)
            found += 3 * shape.hidden_size * shape.experts.intermediate_size * shape.experts.top_k
    return found


def _sides_met(shape: DecoderShape) -> float:
    """Return in + out of all modules that a token passes."""
    linear, found = shape.linear_shapes(), shape.hidden_size + shape.vocab_size
    for layer in range(shape.num_layers):
        found += sum(sum(linear[path]) for path in _plain_modules(shape, layer))
        if shape.experts is not None and shape.has_experts(layer):
            found += 3 * (shape.hidden_size + shape.experts.intermediate_size) * shape.experts.top_k
    return found


def _plain_modules(shape: DecoderShape, layer: int) -> tuple[str, ...]:
    return (*shape.mixer_modules(layer), *shape.feed_forward_modules(layer))


def traffic(shape: DecoderShape, layout: Layout, work: Work) -> Traffic:
    micros = work.micro_batches(layout)
    stream = work.micro_tokens(layout) * shape.hidden_size * work.item
    passes = 3 if layout.recompute else 2
    sequences = passes * sum(_sequences(shape, layer) for layer in range(shape.num_layers)) / layout.pp + 4
    with_experts = sum(map(shape.has_experts, range(shape.num_layers))) / layout.pp
    rows = 0.0 if shape.experts is None else 2 * passes * with_experts * shape.experts.top_k * stream / layout.tp
    return Traffic(
        tensor=micros * sequences * stream * _others(layout.tp),
        expert=micros * rows * _others(layout.ep),
        pipeline=micros * 2 * stream / layout.tp if layout.pp > 1 else 0,
        data=_gradients(shape, layout, work),
    )


def _sequences(shape: DecoderShape, layer: int) -> float:
    """Return the sequences of hidden states that a layer gathers and scatters forward, or latents as parts of one."""
    gathered = 1.0
    if isinstance(shape, LatentShape):
        gathered = ((shape.query_rank or shape.hidden_size) + shape.cached_size) / shape.hidden_size
    return gathered + 1 + 2 * bool(shape.feed_forward_modules(layer))


def _gradients(shape: DecoderShape, layout: Layout, work: Work) -> float:
    part, whole = layout.part(shape, layout.pp - 1), layout.tp * layout.dp
    if work.full:
        divided, repeated, experts = weights_of(shape, layout, part)
        shared = divided * _others(layout.dp) + repeated * _others(whole)
        return (shared + experts * _others(layout.expert_copies)) * (_F32 + work.item)
    shared, experts = adapter_sizes(shape, part, work.rank)
    own = shared * _others(whole) + experts * _others(layout.expert_copies)
    return 2 * work.tenants * _F32 * own


def _others(ranks: int) -> float:
    """Return the share of a ring's data that comes from other ranks."""
    return (ranks - 1) / ranks
