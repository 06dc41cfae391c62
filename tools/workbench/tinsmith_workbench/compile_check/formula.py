"""The expected cost of a pass over streams of tokens on one chip: FLOPs of matrix products, and collectives.

Legend: T = tokens of one stream, W = keys that attention computes for a query, M = weights of the layers' matrices on
one chip, t = shards over `tensor`, r = padded rank. A product of [a, b] and [b, c] costs 2abc. The base is frozen, so
the backward pass multiplies once per matrix, for the gradient of its input: 4M per token, where full fine-tuning takes
6M.

FLOPs:

    base           2TM forward, 2TM backward
    attention      4TW * query width / t forward (scores, values), twice if recomputed; 10TW * query width / t backward
                   (the scores again, and the gradients of probabilities, queries, keys and values), and 4 more in
                   splash attention, which computes scores and probabilities for queries and again for keys
    head           2T * hidden * vocabulary / t for the logits, as much for the gradient of the hidden states
    adapters       2Tr(in + out) per module forward, twice that backward (gradients of the input, and of A and B); what
                   `tensor` divides of a module is divided here, too. Where the adapters of a call lie side by side in
                   one matrix, r counts for each of them
    recomputation  base and adapters of the layers forward once more, without the last product (down) and its adapter's
                   B, on which nothing in the backward pass depends

Collectives, in arrays, because the compiler may send several in one operation:

    all-gather over fsdp     a layer's four matrices, forward and again backward; the tokens and the head, once
    all-to-all over fsdp     the tokens' rows of the embedding, once
    all-reduce over tensor   in a layer forward: the results of o and down, and of their A. Recomputed: the same without
                             the result of down. Backward: the gradients of the inputs of attention and of the MLP, and
                             of what the joined A of q, k, v and of gate, up returned. Outside of the layers: the
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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import jax
import jax.numpy as jnp

from tinsmith_checkpoints.huggingface import HEAD
from tinsmith_jax.adapters import HF_MODULES, shapes
from tinsmith_jax.buckets import Bucket
from tinsmith_jax.head import chunk_rows
from tinsmith_jax.kernels.splash import BLOCK
from tinsmith_jax.mesh import FSDP, Axes, Spec, state_specs
from tinsmith_jax.model_config import ModelConfig
from tinsmith_jax.runtime import Limits
from tinsmith_jax.tiles import TILE
from tinsmith_workbench.compile_check.hlo import Trips

Plan = Counter[tuple[str, str]]
"""Numbers of arrays by kind of collective and axis."""

_DIVIDED_INPUTS: Final = frozenset({"o", "down"})
_MATRICES: Final = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))
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

    def trips(self) -> Trips:
        """Return the rounds of the loop over tiles, which lasts as long as the longest sequence."""
        return {"": self._tiles}

    @property
    def _tiles(self) -> int:
        return -(-self.longest // TILE)

    @property
    def attention_is_hidden(self) -> bool:
        return self.limits.kernels.attention == "splash"

    def flops(self) -> dict[str, float]:
        base, adapters = self._base(self._layers()), self._adapters(self._layers())
        head, head_adapters = self._base(self._head()), self._adapters(self._head())
        if not self.gradients:
            return {"base": base, "attention": self._attention(4), "head": head, "adapters": adapters + head_adapters}
        backward, again = 14 if self.attention_is_hidden else 10, 4 if self.limits.recompute else 0
        terms = {
            "base": 2 * base,
            "attention": self._attention(4 + backward + again),
            "head": 2 * head,
            "adapters": 3 * (adapters + head_adapters),
        }
        if self.limits.recompute:
            d_in, d_out = self._module("down")
            last = self._base({"down": (d_in, d_out)}) + self._adapters({"down": (0, d_out)})
            terms["recomputation"] = base + adapters - last
        return terms

    def model_flops(self) -> float:
        """Attention is causal, and each row has its own adapter."""
        terms = self.flops()
        width, keys = self.config.q_size // self.axes.tensor, (self.longest + 1) / 2
        attention = (12 if self.gradients else 4) * self.config.num_layers * self.bucket.num_tokens * keys * width
        return terms["base"] + terms["head"] + terms["adapters"] / self._width() + attention

    def collectives(self) -> Plan:
        layers, axes, streams = self.config.num_layers, self.axes, streams_name(self.axes)
        plan: Counter[tuple[str, str]] = Counter()
        if axes.fsdp > 1:
            plan["all-gather", "fsdp"] += layers * (8 if self.gradients else 4) + 2
            plan["all-to-all", "fsdp"] += 1
        if axes.tensor > 1:
            backward = (4 + (3 if self.limits.recompute else 0)) if self.gradients else 0
            plan["all-reduce", "tensor"] += layers * (4 + backward) + 1 + self._chunks() * (5 if self.gradients else 3)
        if axes.num_streams > 1:
            plan["all-gather", streams] += 2
            plan += self._gradient_sums() if self.gradients else Counter()
        return +plan

    def _gradient_sums(self) -> Counter[tuple[str, str]]:
        divided = _num_divided(self.config, self.axes, self.bucket.padded_rank)
        whole = 2 * (len(HF_MODULES) + 1) - divided
        plan = Counter({("reduce-scatter", "fsdp"): divided})
        plan["all-reduce", "data"] += divided if self.axes.data > 1 else 0
        plan["all-reduce", streams_name(self.axes)] += whole
        return plan

    def _chunks(self) -> int:
        rows = chunk_rows(self.config.vocab_size, self.limits.platform, self.bucket.num_tokens)
        return self.bucket.num_tokens // rows

    def hbm_bytes(self) -> dict[str, float]:
        layers, tokens, tensor = self.config.num_layers, self.bucket.num_tokens, self.axes.tensor
        size, hidden, vocabulary = jnp.dtype(self.limits.dtype).itemsize, *share_of_module(self.config, self.axes, HEAD)
        matrices = shares_of_matrices(self.config, self.axes)
        passes, outer = (3, 2) if self.gradients else (1, 1)
        heads = (self.config.q_size + self.config.kv_size) // tensor
        widths = [*sum(matrices, ()), *([heads * 4 // size] * 2 if self.config.attention.qk_norm is not None else [])]
        moved = sum(max(0, size * tokens * width - _STAYS_BYTES) for width in widths)
        scores = 0.0 if self.attention_is_hidden else 4 * tokens * self._keys() * self.config.num_heads // tensor
        return {
            "base": float(size * (passes * layers * sum(a * b for a, b in matrices) + outer * hidden * vocabulary)),
            "logits": 4.0 * outer * tokens * vocabulary,
            "activations": layers * passes * _MOVES * moved,
            "attention": layers * 2 * (passes + outer - 1) * scores,
        }

    def _layers(self) -> dict[str, tuple[int, int]]:
        return {name: self._module(name) for name in HF_MODULES}

    def _module(self, name: str) -> tuple[int, int]:
        return share_of_module(self.config, self.axes, name)

    def _head(self) -> dict[str, tuple[int, int]]:
        return {HEAD: share_of_module(self.config, self.axes, HEAD)}

    def _base(self, modules: Mapping[str, tuple[int, int]]) -> float:
        return 2 * self.bucket.num_tokens * self._times(modules) * sum(d_in * d_out for d_in, d_out in modules.values())

    def _adapters(self, modules: Mapping[str, tuple[int, int]]) -> float:
        rank = self.bucket.padded_rank * self._width()
        return 2 * self.bucket.num_tokens * rank * self._times(modules) * sum(map(sum, modules.values()))

    def _width(self) -> int:
        """Return how many adapters a product has side by side."""
        return self.bucket.num_adapters if self.limits.kernels.products == "side_by_side" else 1

    def _times(self, modules: Mapping[str, tuple[int, int]]) -> int:
        return 1 if HEAD in modules else self.config.num_layers

    def _attention(self, factor: int) -> float:
        width = self.config.q_size // self.axes.tensor
        return factor * self.config.num_layers * self.bucket.num_tokens * self._keys() * width

    def _keys(self) -> float:
        if not self.attention_is_hidden:
            return self._tiles * TILE
        blocks = -(-self.longest // BLOCK)  # if sequences of that length fill the stream
        return min(BLOCK, self.bucket.num_tokens) * (blocks + 1) / 2


def share_of_module(config: ModelConfig, axes: Axes, name: str) -> tuple[int, int]:
    """Return the inputs and outputs that one chip multiplies of a module, or of the head."""
    d_in, d_out = config.linear_shapes()[HF_MODULES.get(name, name)]
    return (d_in // axes.tensor, d_out) if name in _DIVIDED_INPUTS else (d_in, d_out // axes.tensor)


def shares_of_matrices(config: ModelConfig, axes: Axes) -> list[tuple[int, int]]:
    """Return the inputs and outputs that one chip multiplies of a layer's matrices: qkv, o, gate and up, down."""
    parts = [[share_of_module(config, axes, name) for name in names] for names in _MATRICES]
    return [(each[0][0], sum(d_out for _, d_out in each)) for each in parts]


def _num_divided(config: ModelConfig, axes: Axes, padded_rank: int) -> int:
    """Return how many of an adapter's arrays of gradients and moments are divided over fsdp."""
    specs = state_specs(HF_MODULES, shapes(config, padded_rank), axes)
    leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, Spec))
    return sum(any(FSDP in (name or ()) for name in spec) for spec in leaves)


def streams_name(axes: Axes) -> str:
    """Name the axes over which gradients are summed."""
    if axes.data == 1:
        return "fsdp"
    return "data" if axes.fsdp == 1 else "streams"
