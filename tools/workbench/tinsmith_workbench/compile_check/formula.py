"""The expected cost of a pass over streams of tokens on one chip: FLOPs of matrix products, and collectives.

Legend: T = tokens of one stream, W = keys that attention computes for a query, M = weights of the layers' matrices on
one chip, t = shards over `tensor`, r = padded rank. A product of [a, b] and [b, c] costs 2abc. The base is frozen, so
the backward pass multiplies once per matrix, for the gradient of its input: 4M per token, where full fine-tuning takes
6M.

FLOPs:

    base           2TM forward, 2TM backward, of all matrices that every token is multiplied with
    attention      2TW (queries' width + values' width) / t forward, twice if recomputed; 2TW (3 and 2 of them) / t
                   backward (the scores again, and the gradients of probabilities, queries, keys and values), and 4TW
                   more in splash attention, which computes scores and probabilities for queries and again for keys.
                   A window limits W, in whole tiles
    delta rule     layers.py has the products of a chunk; backward, a chunk's corrections are computed again
    Mamba-2        likewise, without corrections
    experts        the router is even. Their rows are in blocks of TILE, of one expert and one adapter each. Forward 6
                   times hidden times inner size for each row; backward 4 for gate and up, which are computed again, 2
                   for what down gives, 4 for what gate and up give. Without gates, 2 less of each but the second; with
                   latents, their size in place of the hidden size
    head           2T * hidden * vocabulary / t for the logits, as much for the gradient of the hidden states
    adapters       2Tr(in + out) per module forward, twice that backward (gradients of the input, and of A and B); what
                   `tensor` divides of a module is divided here, too. Where the adapters of a call lie side by side in
                   one matrix, r counts for each of them. Of experts, the shared factors count likewise; their own ones
                   for each row, forward and twice backward, and for their gradients, all experts for each token
    recomputation  everything in the layers forward once more, without products on which nothing in the backward pass
                   depends: the last one (down, or o in layers without an MLP) and its adapter's B, unless a norm or a
                   gate takes the result

Collectives, in arrays, because the compiler may send several in one operation:

    all-gather over fsdp     a layer's matrices, forward and again backward; the tokens and the head, once
    all-to-all over fsdp     the tokens' rows of the embedding, once
    all-reduce over tensor   in a layer forward: the results of o and down, and of their A. Recomputed: the same without
                             the last result. Backward: the gradients of the inputs of attention and of the MLP, and
                             of what the joined A of q, k, v and of gate, up returned. Experts take the place of the
                             MLP, and a shared one has in addition its results and their A. Outside of the layers: the
                             embedding; for each chunk of the head the maximum, the sum and the targets' logits, and
                             with gradients, those of the hidden states and of A's outputs
    all-gather over streams  the logprobs and losses, at the end
    reduce-scatter over fsdp the gradients of every A and B, stacked over layers, at the end; then an all-reduce of the
                             parts over data. Those that fsdp does not divide: an all-reduce over streams

An optimizer step sends the adapter's new weights (all-gather over fsdp) and the sums of squares of all its
gradients (all-reduce over fsdp and over tensor).

Bytes between HBM and the chip, in which each pass is one over the layers: forward, recomputed, backward:

    base           the layers' matrices once in each pass; the head once forward, and once backward
    logits         written in float32 as often as the head is read
    activations    what goes into each matrix and comes out of it, and twice what is normalized by head, in float32.
                   In each pass the compiler moves them about six times, except for the part that stays on the chip
    attention      without a kernel: the scores in float32, written and read in each pass, and twice as often backward

An optimizer step reads its share of weights, gradients (twice) and moments, and writes the weights' and moments', and
the new weights twice, as they are gathered.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import jax
import jax.numpy as jnp

from tinsmith_jax.adapters import layer_modules, shapes
from tinsmith_jax.buckets import Bucket
from tinsmith_jax.head import chunk_rows
from tinsmith_jax.kernels.splash import BLOCK
from tinsmith_jax.mesh import FSDP, Axes, Spec, state_specs
from tinsmith_jax.model_config import ModelConfig
from tinsmith_jax.runtime import Limits
from tinsmith_jax.tiles import TILE
from tinsmith_workbench.compile_check.hlo import Trips
from tinsmith_workbench.compile_check.layers import Layers, Product

Plan = Counter[tuple[str, str]]
"""Numbers of arrays by kind of collective and axis."""

_MOVES: Final = 6
_STAYS_BYTES: Final = 8e6
"""As in docs/reference/tpu.jsonl: how often activations are moved, without these first bytes of each array."""


class Cost(Protocol):
    """A program's expected cost on one chip."""

    @property
    def tokens(self) -> int:
        """Return the tokens that one call reads or draws, over all chips."""

    @property
    def attention_is_hidden(self) -> bool:
        """Return whether a kernel computes attention, whose arithmetic the program's text does not show."""

    def trips(self) -> Trips:
        """Return the lengths of loops that only the data decide."""

    def flops(self) -> dict[str, float]:
        """Return the FLOPs of matrix products, in terms."""

    def model_flops(self) -> float:
        """Return what remains if nothing is computed twice or for nothing."""

    def collectives(self) -> Plan:
        """Return all collectives."""

    def hbm_bytes(self) -> dict[str, float]:
        """Return the bytes between HBM and the chip, in terms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An optimizer step of an adapter."""

    config: ModelConfig
    axes: Axes
    padded_rank: int
    weights_bytes: int
    state_bytes: int  # of the gradients, or of one of the moments
    tokens: int = 0
    attention_is_hidden: bool = False

    def trips(self) -> Trips:
        return {}

    def flops(self) -> dict[str, float]:
        return {}

    def model_flops(self) -> float:
        return 0

    def collectives(self) -> Plan:
        plan: Counter[tuple[str, str]] = Counter()
        if self.axes.fsdp > 1:
            plan["all-gather", "fsdp"] = _num_divided(self.config, self.axes, self.padded_rank)
            plan["all-reduce", "fsdp"] = 1
        if self.axes.tensor > 1:
            plan["all-reduce", "tensor"] = 1
        return plan

    def hbm_bytes(self) -> dict[str, float]:
        return {"weights": 2.0 * self.weights_bytes, "gradients and moments": 7.0 * self.state_bytes}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A pass over streams of packed sequences."""

    config: ModelConfig
    axes: Axes
    limits: Limits
    bucket: Bucket
    gradients: bool

    @property
    def longest(self) -> int:
        """Return the tokens of the longest sequence: the context, if the stream holds that many."""
        return min(self.limits.max_context_tokens, self.bucket.num_tokens)

    @property
    def tokens(self) -> int:
        return self.bucket.num_tokens * self.axes.num_streams

    @property
    def _work(self) -> Layers:
        return Layers(self.config, self.axes)

    def trips(self) -> Trips:
        """Return the rounds of loops: over the tiles that a query sees, on average over the layers, and over blocks."""
        seen = self._work.seen_tiles(self._tiles) / self.config.attending_layers
        return {"": seen, "experts": self._blocks} if self._work.routed else {"": seen}

    @property
    def _tiles(self) -> int:
        return -(-self.longest // TILE)

    @property
    def _blocks(self) -> int:
        experts = self._work.routed
        assert experts is not None, "the model has experts"
        return self._work.blocks(self.bucket.num_tokens * experts.top_k, self.bucket.num_adapters)

    @property
    def attention_is_hidden(self) -> bool:
        return self.limits.kernels.attention == "splash" and self._work.is_plain

    def flops(self) -> dict[str, float]:
        work, tokens = self._work, self.bucket.num_tokens
        base, low = 2 * tokens * _weights(work.matrices), self._adapters(work.modules)
        head, head_low = 2 * tokens * work.head.weights, self._adapters([work.head])
        rule, experts, own_low = self._rule(), self._experts(), self._expert_adapters()
        forward = {
            "base": base,
            "attention": self._attention(2, 2),
            work.rule_name: rule[0],
            "experts": experts[0],
            "head": head,
            "adapters": low + head_low + own_low[0],
        }
        if not self.gradients:
            return _present(forward)
        of_splash = 2 if self.attention_is_hidden else 0
        return _present(
            {
                "base": 2 * base,
                "attention": forward["attention"] + self._attention(6 + of_splash, 4 + of_splash),
                work.rule_name: sum(rule),
                "experts": sum(experts),
                "head": 2 * head,
                "adapters": 3 * (low + head_low) + sum(own_low),
                "recomputation": self._recomputed(forward, own_low[0]) if self.limits.recompute else 0,
            }
        )

    def _recomputed(self, forward: Mapping[str, float], own_low: float) -> float:
        """Return what the layers compute once more. Of experts, only what their shared B needs."""
        work, tokens = self._work, self.bucket.num_tokens
        gated = work.routed is not None and work.routed.shared_gate
        last = {each.name: each for each in work.last if not (gated and each.name == "shared_down")}
        ends = [replace(each, d_in=0, layers=last[each.name].layers) for each in work.modules if each.name in last]
        dropped = 2 * tokens * _weights(last.values()) + self._adapters(ends)
        layers = self._adapters(work.modules) + own_low
        if work.routed is not None:
            dropped += forward["experts"] / work.expert_matrices
            dropped += 2 * tokens * self.bucket.padded_rank * self.config.expert_layers * self.config.expert_input
        return sum(forward[name] for name in ("base", "attention", work.rule_name, "experts")) + layers - dropped

    def _rule(self) -> tuple[float, float, float]:
        """Return the delta rule, or Mamba-2: forward, what is computed again, and backward."""
        times = self._work.recurrent_layers * self.bucket.num_tokens
        forward, again, backward = (times * each for each in self._work.rule_flops())
        return forward, again, backward

    def _experts(self) -> tuple[float, float]:
        """Return the experts' matrices forward and backward."""
        if self._work.routed is None:
            return 0.0, 0.0
        product, number = self._rows() * self._work.expert_product, self._work.expert_matrices
        return number * product, (2 * number - 1) * product

    def _expert_adapters(self) -> tuple[float, float]:
        """Return their adapters forward and backward."""
        experts = self._work.routed
        if experts is None:
            return 0.0, 0.0
        times = 2 * self.bucket.num_tokens * self.config.expert_layers * self.bucket.padded_rank
        number, inner = self._work.expert_matrices, experts.intermediate_size
        shared, summed = (number * times * each for each in (self.config.expert_input, inner * experts.num_experts))
        own = 2 * self._rows() * self.bucket.padded_rank * inner
        return shared + number * own, 2 * shared + (2 * number - 1) * own + summed // self.axes.tensor

    def _rows(self) -> int:
        """Return the rows of all blocks, in all layers with experts."""
        return TILE * self._blocks * self.config.expert_layers

    def model_flops(self) -> float:
        """Attention is causal, each row has its own adapter, and nothing pads the experts' rows."""
        terms, work, tokens = self.flops(), self._work, self.bucket.num_tokens
        total = terms["base"] + terms["head"] + terms["adapters"] / self._width()
        total += (3 if self.gradients else 1) * (2 * sum(work.widths) * tokens * work.seen_keys(self.longest))
        total += (3 if self.gradients else 1) * self._rule()[0]
        if work.routed is not None:
            choices = tokens * work.routed.top_k * self.config.expert_layers // self.axes.tensor
            total += (2 if self.gradients else 1) * choices * work.expert_matrices * work.expert_product
        return total

    def collectives(self) -> Plan:
        axes, streams, work = self.axes, streams_name(self.axes), self._work
        plan: Counter[tuple[str, str]] = Counter()
        if axes.fsdp > 1:
            plan["all-gather", "fsdp"] += work.gathered * (2 if self.gradients else 1) + 2
            plan["all-to-all", "fsdp"] += 1
        if axes.tensor > 1:
            plan["all-reduce", "tensor"] += self._sums() + 1 + self._chunks() * (5 if self.gradients else 3)
        if axes.num_streams > 1:
            plan["all-gather", streams] += 2 + (work.routed is not None)
            plan += self._gradient_sums() if self.gradients else Counter()
        return +plan

    def _sums(self) -> int:
        """Return the sums over `tensor` in all layers: of attention, and of the MLP or the experts.

        Forward the results and those of A; recomputed, those of A and of attention; backward the gradients of the
        inputs, and those of the joined A. A shared expert has the same input as the others; its result is computed
        again for its gate.
        """
        again = self.limits.recompute and self.gradients
        mixers, last = self._work.divided_mixers, self._work.last_mixers
        parts = [(2, 2, 2)] * (mixers - last) + [(2, 1, 2)] * (last + self._work.mlps)
        if self._work.routed is not None and self._work.routed.shared_size:
            parts += [(2, 2 if self._work.routed.shared_gate else 1, 1)] * self.config.expert_layers
        return sum(first + again * more + self.gradients * back for first, more, back in parts)

    def _gradient_sums(self) -> Counter[tuple[str, str]]:
        divided = _num_divided(self.config, self.axes, self.bucket.padded_rank)
        whole = 2 * (len(layer_modules(self.config)) + 1) - divided
        plan = Counter({("reduce-scatter", "fsdp"): divided})
        plan["all-reduce", "data"] += divided if self.axes.data > 1 else 0
        plan["all-reduce", streams_name(self.axes)] += whole
        return plan

    def _chunks(self) -> int:
        rows = chunk_rows(self.config.vocab_size, self.limits.platform, self.bucket.num_tokens)
        return self.bucket.num_tokens // rows

    def hbm_bytes(self) -> dict[str, float]:
        tokens, tensor, work = self.bucket.num_tokens, self.axes.tensor, self._work
        size, head = jnp.dtype(self.limits.dtype).itemsize, work.head
        passes, outer = (3, 2) if self.gradients else (1, 1)
        heads = (self.config.q_size + self.config.kv_size) // tensor
        widths = [(each.layers, width) for each in work.matrices for width in (each.d_in, each.d_out)]
        normed = 2 * (self.config.attention.qk_norm is not None)
        widths += [(self.config.attending_layers, heads * 4 // size)] * normed
        moved = sum(layers * max(0, size * tokens * width - _STAYS_BYTES) for layers, width in widths)
        seen = TILE * work.seen_tiles(self._tiles)
        scores = 0.0 if self.attention_is_hidden else 4 * tokens * seen * self.config.num_heads // tensor
        return {
            "base": float(size * (passes * (_weights(work.matrices) + self._read_by_blocks()) + outer * head.weights)),
            "logits": 4.0 * outer * tokens * head.d_out,
            "activations": passes * _MOVES * moved,
            "attention": 2 * (passes + outer - 1) * scores,
        }

    def _read_by_blocks(self) -> int:
        """Return the weights that blocks read, each its expert's."""
        if self._work.routed is None:
            return 0
        each = self._work.expert_matrices * self.config.expert_input * self._work.routed.intermediate_size
        return self.config.expert_layers * self._blocks * each

    def _adapters(self, modules: Sequence[Product]) -> float:
        rank = self.bucket.padded_rank * self._width()
        return 2 * self.bucket.num_tokens * rank * sum(each.layers * (each.d_in + each.d_out) for each in modules)

    def _width(self) -> int:
        """Return how many adapters a product has side by side."""
        return self.bucket.num_adapters if self.limits.kernels.products == "side_by_side" else 1

    def _attention(self, queries: int, values: int) -> float:
        """Return so many products of queries' width, and of values'."""
        of_queries, of_values = self._work.widths
        return self.bucket.num_tokens * self._keys() * (queries * of_queries + values * of_values)

    def _keys(self) -> float:
        """Return the keys that a query is multiplied with, in all layers that attend together."""
        if not self.attention_is_hidden:
            return self._work.seen_tiles(self._tiles) * TILE
        blocks = -(-self.longest // BLOCK)  # if sequences of that length fill the stream
        return self.config.attending_layers * min(BLOCK, self.bucket.num_tokens) * (blocks + 1) / 2


def _weights(products: Iterable[Product]) -> int:
    return sum(each.layers * each.weights for each in products)


def _present(terms: Mapping[str, float]) -> dict[str, float]:
    """Leave out what the layers do not have."""
    return {name: flops for name, flops in terms.items() if flops}


def _num_divided(config: ModelConfig, axes: Axes, padded_rank: int) -> int:
    """Return how many of an adapter's arrays of gradients and moments are divided over fsdp."""
    specs = state_specs(layer_modules(config), shapes(config, padded_rank), axes)
    leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, Spec))
    return sum(any(FSDP in (name or ()) for name in spec) for spec in leaves)


def streams_name(axes: Axes) -> str:
    """Name the axes over which gradients are summed."""
    if axes.data == 1:
        return "fsdp"
    return "data" if axes.fsdp == 1 else "streams"
