"""The memory of training and sampling on one device, calculated from the model's configuration. No jax.

Arrays kept between calls (weights, states of adapters, pages, rows of adapters) are counted exactly. What a compiled
program needs while it runs is a fit to the compiler's own plan: of XLA for CPUs in float32, and for accelerators of
libtpu in bfloat16, as no GPU was at hand. test_jax_costs.py compares the first with real programs. The kernels in C++
take less of a CPU's memory than XLA's programs, with the rooms of their own that XLA does not see.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from tinsmith_checkpoints.huggingface import (
    ATTENTION,
    DELTA,
    HEAD,
    LATENT,
    SHARED_EXPERT,
    SHARED_EXPERTS,
    weight_counts,
)
from tinsmith_jax.model_config import ModelConfig
from tinsmith_jax.rank_classes import class_of, rank_classes
from tinsmith_jax.tiles import MAX_ADAPTERS, TILE

FLOAT: Final = 4  # bytes of what adapters, gradients and moments are kept in
ITEM: Final = {"float32": 4, "bfloat16": 2}  # of base weights and activations
_BY_INPUTS: Final = frozenset({"self_attn.o_proj", "mlp.down_proj", SHARED_EXPERT[2], SHARED_EXPERTS[2]})
"""The modules whose inputs `tensor` divides; of the others it divides the outputs."""
_BY_TENSOR: Final = frozenset({"qkv_bias", "gate_up_bias", "sinks"})
"""The vectors of layers that `tensor` divides."""

_TARGET: Final = 24  # per token and target: what a loss takes and gives
_RUNTIME: Final = {True: 1 << 29, False: 1 << 30}
"""Allowances: on a CPU for Python, JAX and its programs; on accelerators for the driver, and gaps of the allocator."""
_DRAWN: Final = {True: 8, False: 24}  # per row of a decoding dispatch and token of the vocabulary
_READ_TILES: Final = {True: 2, False: 8}  # of prompts at a time

_KEPT: Final = {True: (8, 8, 8, 8, 56), False: (12, 14, 6, 8, 56)}
"""Bytes per token that a layer keeps for its backward pass without `recompute`, for each of its hidden, inner, q and kv
size and rank: on CPU, and on accelerators."""

_DIFFERENTIATED: Final = {True: (33, 24, 28, 27, 24), False: (0, 10, 33, 0, 0)}
"""The memory of a layer in the backward pass: on CPU in addition to that, on accelerators with `recompute` all."""

_PERIOD: Final = 1.7
"""How many times as much XLA for CPUs has of a layer in the backward pass, if one round of a loop computes layers of
several kinds."""

_PART_KEPT: Final = {True: (8, 8, 8, 4, 4, 4), False: (18, 12, 12, 5, 19, 4)}
"""As `_KEPT`, of layers that mix tokens or have an MLP, but not both: per hidden, q, kv and inner size, per channel and
value of a recurrence, and per rank of each module. True: only results of long computations are kept, as on a CPU
without experts. In float32."""

_PART_DIFFERENTIATED: Final = (0, 14, 28, 8, 15, 40)
"""Likewise, of each layer that one round of a loop computes. On a CPU."""

_STACKED: Final = {True: 3.0, False: 2.45}
"""Copies of each adapter in a micro-batch: its weights and sums, side by side, and results on their way."""
_STACKED_BY_FSDP: Final = 1.4
_SIDE_BY_SIDE: Final = 200  # per token of an accelerator and rank of all adapters in the micro-batch
_VOCABULARY: Final = 2.4  # copies of the head and the embedding in the layout that an accelerator wants
_GATHERED_VOCABULARY: Final = 1.25
_CPU_LOGITS: Final = 1 << 22  # of one chunk, as in head.py
_PER_LOGIT: Final = {"float32": 5, "bfloat16": 6}  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Computing:
    """How devices compute, and how they share the work."""

    on_cpu: bool
    dtype: str
    recompute: bool
    native: bool = False  # by the kernels in C++
    stored: str | None = None  # what base weights are kept in, if that is not `dtype`
    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    @property
    def item(self) -> int:
        return ITEM[self.dtype]

    @property
    def base_item(self) -> int:
        """Bytes of a base weight."""
        return ITEM[self.stored or self.dtype]

    @property
    def value_item(self) -> int:
        """Bytes of a number that the model computes. On a CPU, at most."""
        return FLOAT if self.on_cpu else self.item

    @property
    def num_devices(self) -> int:
        return self.data * self.fsdp * self.tensor


class _Factor(NamedTuple):
    """One of the two matrices of a LoRA."""

    size: int  # inputs of A, outputs of B
    number: int  # of such matrices in the model
    tensor: int  # shards among which `tensor` divides it
    same_axis: bool  # as `size`, which fsdp divides


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Bytes on one device."""

    shape: ModelConfig
    computing: Computing
    max_lora_rank: int

    # Between calls

    @property
    def base(self) -> int:
        """The weights. Norms and routers are whole on every device, biases and sinks lie with what they belong to."""
        counts, linear = weight_counts(self.shape), self.shape.linear_shapes()
        plain = {path: number * linear[path][0] * linear[path][1] for path, number in self._modules.items()}
        undivided = sum(size for path, size in plain.items() if self._is_undivided(path))
        by_fsdp = undivided + self.shape.frozen_matrices
        by_both = counts.embedding + counts.head + sum(plain.values()) - undivided
        by_both += self.shape.expert_layers * counts.experts
        fsdp, tensor, by_tensor = self.computing.fsdp, self.computing.tensor, self._divided_by_tensor
        whole = counts.total - by_fsdp - by_both - by_tensor
        own = whole + by_fsdp // fsdp + by_both // (fsdp * tensor) + by_tensor // tensor
        return own * self.computing.base_item

    def _is_undivided(self, path: str) -> bool:
        """Return whether `tensor` leaves a module whole: those of the gated delta rule, and of attention by latents."""
        of_latents = self.shape.attention.latent is not None and path in (*LATENT, *ATTENTION)
        return of_latents or path in DELTA

    @property
    def _divided_by_tensor(self) -> int:
        """Return the numbers in vectors that `tensor` alone divides."""
        own = ((name, size) for name, (_, size) in self.shape.vectors().items() if name in _BY_TENSOR)
        found = sum(len(self.shape.layers_with(name)) * size for name, size in own)
        if self.shape.experts is None or not self.shape.mixture.bias:
            return found
        each = 2 * self.shape.experts.intermediate_size + self.shape.hidden_size
        return found + self.shape.expert_layers * self.shape.experts.num_experts * each

    def weights(self, rank: int) -> int:
        """An adapter's weights."""
        found = sum(each.size * each.number // each.tensor for each in self._factors())
        return self._padded(rank) * FLOAT * found

    def state(self, rank: int) -> int:
        """Its gradients, and either of its moments: like its weights, and also divided over `fsdp` where possible."""
        total = 0
        for each in self._factors():
            parts = self.computing.fsdp
            even = each.size % (parts * (each.tensor if each.same_axis else 1)) == 0
            total += each.size * each.number // each.tensor // (parts if even else 1)
        return self._padded(rank) * FLOAT * total

    def model(self, rank: int) -> int:
        """The memory of a model from its first step on."""
        return self.weights(rank) + 3 * self.state(rank)

    @property
    def zeros(self) -> int:
        """An adapter of each class, which all share that have no gradients or moments yet."""
        if self.computing.native:
            return 0  # nobody writes them
        ranks = rank_classes(self.max_lora_rank)
        return sum(self.weights(rank) + (self.state(rank) if self.computing.fsdp > 1 else 0) for rank in ranks)

    def rows(self, slots: int) -> int:
        """The adapters of a shard's slots, and one row that stays empty."""
        return (slots + 1) * self.weights(self.max_lora_rank) // FLOAT * self.computing.value_item

    def pages(self, slots: int, context: int) -> int:
        """Keys and values: of a sequence in each slot, and a page to copy from; one page has no owner.

        And recurrent states, in the rows of `SamplingShape.states_per_shard`.
        """
        number = 1 + slots * (-(-context // TILE) + 1)
        parts = self.computing.tensor if self.shape.attention.latent is None else 1
        values = self.shape.attending_layers * self.shape.cached_size // parts
        states = (1 + 4 * slots) * self.shape.state_size * FLOAT
        return number * TILE * values * self.computing.value_item + states

    # While a program runs

    @property
    def runtime(self) -> int:
        return _RUNTIME[self.computing.on_cpu]

    def kept(self, tokens: int) -> int:
        """The activations of all layers that a pass of this many tokens keeps for its backward pass."""
        number = self.shape.num_layers
        if self.computing.recompute:
            return tokens * number * self.shape.hidden_size * self.computing.value_item
        if self._in_parts:
            return tokens * sum(map(self._kept_by_part, range(number)))
        return tokens * number * self._of_layer(_KEPT)

    def micro_batch(self, tokens: int, adapters: int, targets: int = 1) -> int:
        """A pass with gradients over a stream of `tokens`, with room for `adapters` of the largest rank.

        The kernels in C++ take adapters one by one, but for the head's, of which there is room for all.
        """
        on_cpu, layer = self.computing.on_cpu, self._differentiated()
        if self.computing.recompute and on_cpu:
            layer += sum(map(self._kept_by_part, self._round)) if self._in_parts else self._of_layer(_KEPT)
        at_most = tokens * layer + self._stacked(adapters) + self._padding_rows(tokens, adapters)
        if on_cpu:
            logits = min(max(_CPU_LOGITS, TILE * self.shape.vocab_size), tokens * self.shape.vocab_size)
            of_head = logits * _PER_LOGIT[self.computing.dtype] // self.computing.tensor
            at_most = max(at_most, self._stacked(adapters, head=True) + of_head)
        results = adapters * self.state(self.max_lora_rank) + tokens * _TARGET * targets
        return self.kept(tokens) + at_most + self._copied_base(tokens, adapters) + results

    def step(self, adapters: int) -> int:
        """The optimizer steps of `adapters` of the largest rank. Old states stay until all steps are made."""
        rank = self.max_lora_rank
        return adapters * (self.weights(rank) + 2 * self.state(rank))

    def sampling(self, slots: int, *, gathers_once: bool) -> int:
        """A decoding dispatch, or the reading of prompts."""
        on_cpu, item, parts = self.computing.on_cpu, self.computing.item, self.computing.fsdp
        vocabulary = self.shape.vocab_size // self.computing.tensor
        read = _READ_TILES[on_cpu] * TILE * self._of_layer(_KEPT)
        own = max(_DRAWN[on_cpu] * slots * vocabulary, read + self._prompt_rows(slots))
        if parts > 1 and gathers_once:
            return own + self.base * parts
        layer = (self._round_weights() if on_cpu and self._in_parts else self._bodies * self._layer_weights()) * item
        layer = layer if parts > 1 or on_cpu else 0
        return own + layer + (vocabulary * self.shape.hidden_size * item if parts > 1 else 0)

    def _stacked(self, adapters: int, *, head: bool = False) -> int:
        """Return what adapters take side by side. On a CPU, the head's have gone when layers are differentiated."""
        on_cpu, fsdp = self.computing.on_cpu, self.computing.fsdp
        own = self.weights(self.max_lora_rank) - (self._head_weights() if on_cpu and not head else 0)
        if self.computing.native:
            adapters, own = MAX_ADAPTERS, self._head_weights()
        return int((_STACKED[on_cpu] if fsdp == 1 else _STACKED_BY_FSDP) * adapters * own)

    def _head_weights(self) -> int:
        own = self.shape.hidden_size + self.shape.vocab_size // self.computing.tensor
        return self.max_lora_rank * FLOAT * own

    def _copied_base(self, tokens: int, adapters: int) -> int:
        """Return a pass's base weights in addition to the shards; on accelerators, LoRAs' inner values, too."""
        computing = self.computing
        vocabulary = self.shape.vocab_size * self.shape.hidden_size * computing.item // computing.tensor
        if computing.on_cpu:
            return 0 if computing.fsdp == 1 else vocabulary + self._layer_weights() * computing.item
        inner = tokens * _SIDE_BY_SIDE * self.max_lora_rank * adapters // computing.tensor
        return int((_VOCABULARY if computing.fsdp == 1 else _GATHERED_VOCABULARY) * vocabulary) + inner

    def _layer_weights(self) -> int:
        return weight_counts(self.shape).layer // self.computing.tensor

    def _differentiated(self) -> int:
        """Return bytes per token, as `_of_layer`. Keys and values that are made of latents take no more than these."""
        found = self._of_layer(_DIFFERENTIATED)
        if not self.computing.on_cpu:
            return found
        if self._in_parts:
            return sum(self._of_part(layer, _PART_DIFFERENTIATED) for layer in self._round)
        if self.shape.attention.latent is not None:
            found -= _DIFFERENTIATED[True][3] * self.shape.kv_size // self.computing.tensor
        return int(found * _PERIOD) if self.shape.period > 1 else found

    def _prompt_rows(self, slots: int) -> int:
        """Return what rows of experts take on a CPU while prompts are read: each tile has an adapter of its own.

        Where every layer has attention, the weights of a whole layer are counted, which is more.
        """
        experts = self.shape.experts
        if experts is None or not (self.computing.on_cpu and self._in_parts):
            return 0
        choices = _READ_TILES[True] * TILE * experts.top_k
        blocks = choices // TILE + min(experts.num_experts // self.computing.tensor * (slots + 1), choices)
        return 2 * TILE * blocks * self.shape.expert_input * FLOAT

    def _round_weights(self) -> int:
        """Return the weights of the layers that one round of a loop computes, but for the routed experts'."""
        linear, found = self.shape.linear_shapes(), 0
        for layer in self._round:
            rule = self.shape.kinds[self.shape.pattern[layer]].recurrence
            paths = self.shape.modules_of(layer) if rule is None else rule.linear_shapes(self.shape.hidden_size)
            found += sum(linear[path][0] * linear[path][1] for path in paths)
        return found // self.computing.tensor

    @property
    def _in_parts(self) -> bool:
        """Return whether layers mix tokens or have an MLP, but not both."""
        return not all(kind.mixer and kind.mlp for kind in self.shape.kinds)

    @property
    def _bodies(self) -> int:
        """Return how many unlike layers a loop takes out of its stacks: those that attend, and those that recur."""
        return len({self.shape.kinds[self.shape.pattern[layer]].attends for layer in self._round})

    @property
    def _round(self) -> range:
        """Return the layers that one round of a loop computes."""
        return range(self.shape.period)

    def _kept_by_part(self, layer: int) -> int:
        few = self.computing.on_cpu and self.shape.experts is None
        return self._of_part(layer, _PART_KEPT[few]) * self.computing.value_item // FLOAT

    def _of_part(self, layer: int, factors: tuple[int, ...]) -> int:
        """Return bytes per token of a layer that has one part."""
        hidden, q, kv, inner, recurrent, rank = factors
        shape, kind = self.shape, self.shape.kinds[self.shape.pattern[layer]]
        whole = hidden * shape.hidden_size + rank * self.max_lora_rank * len(shape.modules_of(layer))
        if (rule := kind.recurrence) is not None:
            return whole + recurrent * (rule.mixed_size + rule.value_size)
        divided = q * shape.q_size + kv * shape.kv_size if kind.attends else inner * self._inner_size
        return whole + divided // self.computing.tensor

    @property
    def _inner_size(self) -> int:
        """Return the inner values of a token: with experts, of all that compute it."""
        experts = self.shape.experts
        if experts is None:
            return self.shape.intermediate_size
        return experts.intermediate_size * experts.top_k + experts.shared_size

    def _padding_rows(self, tokens: int, adapters: int) -> int:
        """Return what the rows take that pad the blocks of experts: one for each expert and adapter, at most.

        Of a row there are the hidden and inner values, and those of the adapters' ranks.
        """
        experts = self.shape.experts
        if experts is None:
            return 0
        blocks = min(experts.num_experts // self.computing.tensor * adapters, tokens * experts.top_k)
        numbers = self.shape.expert_input + experts.intermediate_size + 3 * self.max_lora_rank
        return TILE * blocks * numbers * FLOAT

    def _of_layer(self, factors: Mapping[bool, tuple[int, ...]]) -> int:
        """Return bytes per token. With experts, a token's are taken to be as one MLP of their size together."""
        shape, parts = self.shape, self.computing.tensor
        whole, *divided, rank = factors[self.computing.on_cpu]
        sizes = (self._inner_size, shape.linear_shapes().get(ATTENTION[0], (0, shape.q_size))[1], shape.kv_size)
        in_parts = sum(factor * size for factor, size in zip(divided, sizes, strict=True)) // parts
        return whole * shape.hidden_size + in_parts + rank * self.max_lora_rank

    @property
    def _modules(self) -> Counter[str]:
        """Return how many layers have each linear module, but for the routed experts'."""
        return Counter(path for layer in range(self.shape.num_layers) for path in self.shape.modules_of(layer))

    def _padded(self, rank: int) -> int:
        return class_of(rank, self.max_lora_rank)

    def _factors(self) -> Iterator[_Factor]:
        shape, parts = self.shape, self.computing.tensor
        linear = shape.linear_shapes()
        for path, layers in self._modules.items():
            inputs, outputs = linear[path]
            by_inputs, own = path in _BY_INPUTS, 1 if self._is_undivided(path) else parts
            yield _Factor(inputs, layers, own if by_inputs else 1, same_axis=True)
            yield _Factor(outputs, layers, 1 if by_inputs else own, same_axis=True)
        if shape.experts is not None:  # gate, up, down: of each, the factor that faces the hidden states is shared
            own = shape.expert_layers * shape.experts.num_experts
            for _ in shape.mlp_modules:
                yield _Factor(shape.expert_input, shape.expert_layers, 1, same_axis=True)
                yield _Factor(shape.experts.intermediate_size, own, parts, same_axis=False)
        yield _Factor(shape.hidden_size, 1, 1, same_axis=True)
        yield _Factor(linear[HEAD][1], 1, parts, same_axis=True)
