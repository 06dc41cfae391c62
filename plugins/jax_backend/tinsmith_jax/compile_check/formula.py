"""What a pass over streams of tokens should cost on one chip: FLOPs of matrix products, and collectives.

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
                             with gradients those of the hidden states and of what A returned
    all-gather over streams  the logprobs and losses, at the end
    all-reduce over streams  the gradients of every A and B, stacked over layers, at the end
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tinsmith.huggingface import HEAD
from tinsmith_jax.adapters import HF_MODULES
from tinsmith_jax.buckets import Bucket
from tinsmith_jax.head import chunk_rows
from tinsmith_jax.kernels.splash import BLOCK
from tinsmith_jax.layers import TILE
from tinsmith_jax.mesh import Axes
from tinsmith_jax.model_config import ModelConfig
from tinsmith_jax.runtime import Limits

Plan = Mapping[tuple[str, str], int]
"""Numbers of arrays by kind of collective and axis."""

_DIVIDED_INPUTS: Final = frozenset({"o", "down"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
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
    def attention_steps(self) -> int:
        """Return the rounds of a loop over tiles that lasts as long as the longest sequence."""
        return -(-self.longest // TILE)

    @property
    def attention_is_hidden(self) -> bool:
        """Return whether a kernel computes attention, whose arithmetic the program's text does not show."""
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
        """Return what remains if nothing is computed twice or for nothing: causal attention, each row's own adapter."""
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
            plan["all-reduce", streams] += 2 * (len(HF_MODULES) + 1) if self.gradients else 0
        return +plan

    def _chunks(self) -> int:
        rows = chunk_rows(self.config.vocab_size, self.limits.platform, self.bucket.num_tokens)
        return self.bucket.num_tokens // rows

    def _layers(self) -> dict[str, tuple[int, int]]:
        return {name: self._module(name) for name in HF_MODULES}

    def _module(self, name: str) -> tuple[int, int]:
        d_in, d_out = self.config.linear_shapes()[HF_MODULES[name]]
        t = self.axes.tensor
        return (d_in // t, d_out) if name in _DIVIDED_INPUTS else (d_in, d_out // t)

    def _head(self) -> dict[str, tuple[int, int]]:
        d_in, d_out = self.config.linear_shapes()[HEAD]
        return {HEAD: (d_in, d_out // self.axes.tensor)}

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
            return self.attention_steps * TILE
        blocks = -(-self.longest // BLOCK)  # if sequences of that length fill the stream
        return min(BLOCK, self.bucket.num_tokens) * (blocks + 1) / 2


def streams_name(axes: Axes) -> str:
    """Name the axes over which gradients are summed."""
    if axes.data == 1:
        return "fsdp"
    return "data" if axes.fsdp == 1 else "streams"
