"""What the layers of a description multiply on one chip, whichever family it is of.

Matrices and adapters are those that the backend loads and makes for the description. What mixes tokens, and experts,
have terms of their own. Legend as in formula.py; c = tokens of a chunk, dk and dv = key and value size of a head of a
recurrence, I = inner size of an expert.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from tinsmith_checkpoints.huggingface import HEAD, DeltaRule, ExpertShape, Mamba
from tinsmith_jax import adapters
from tinsmith_jax.attention import kernel_size
from tinsmith_jax.mesh import FSDP, TENSOR, Axes, Spec, adapter_specs, base_specs
from tinsmith_jax.model_config import DENSE, ModelConfig
from tinsmith_jax.sampling_values import PAGE
from tinsmith_jax.tiles import TILE
from tinsmith_jax.weights import base_shapes, plain_matrices

_EXPERT_MODULES: Final = ("gate", "up", "down")
_OF_MLPS: Final = ("down", "shared_down", "routed_out")
_OF_MIXERS: Final = ("o", "delta_o", "mamba_o")
"""The matrices that give what a part of a layer adds."""
_IN_PLACE: Final = 16  # rows of the blocks of a triangular system that are inverted in place, as in gated_delta.py


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A matrix of the layers that have it: the base's, or the two of an adapter's module together."""

    name: str
    layers: int
    d_in: int  # on one chip
    d_out: int
    gathered: bool = False  # over fsdp

    @property
    def weights(self) -> int:
        return self.d_in * self.d_out


@dataclass(frozen=True)
class Layers:
    config: ModelConfig
    axes: Axes

    # Matrices

    @cached_property
    def matrices(self) -> Sequence[Product]:
        """All but the routed experts'."""
        shapes, plain = base_shapes(self.config, "float32")["layers"], plain_matrices(self.config)
        specs = base_specs(list(shapes))["layers"]
        return [self._matrix(name, shapes[name].shape, specs[name]) for name in shapes if name in plain]

    @property
    def last(self) -> Sequence[Product]:
        """Those whose results nothing in their layer reads: what is added to the hidden states at its end."""
        norms, found = self.config.norms, []
        for each in self.matrices:
            name = each.name.removeprefix(DENSE)
            if name in _OF_MLPS and norms.after_mlp is None:
                found.append(each)
            elif name in _OF_MIXERS and norms.after_attention is None:
                found.append(replace(each, layers=self._unread(each.name)))
        return found

    def _unread(self, name: str) -> int:
        """Return in how many layers with such a matrix no MLP reads what it gives."""
        kinds = [self.config.kinds[self.config.pattern[layer]] for layer in self.config.layers_with(name)]
        return len(kinds) if self.config.parallel else sum(not kind.mlp for kind in kinds)

    def _matrix(self, name: str, shape: tuple[int, ...], spec: Spec) -> Product:
        layers, *sizes = (
            size // (self.axes.tensor if axis == TENSOR else 1)
            for size, axis in zip(shape, [*spec, *[None] * (len(shape) - len(spec))], strict=True)
        )
        return Product(name=name, layers=layers, d_in=sizes[0], d_out=sizes[1], gathered=FSDP in spec)

    @cached_property
    def modules(self) -> Sequence[Product]:
        """The modules of an adapter, but for the routed experts'."""
        return [
            self._module(name, *pair, self._adapter_specs[name])
            for name, pair in self._adapters.items()
            if not self.routed or name not in _EXPERT_MODULES
        ]

    @cached_property
    def _adapters(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        found = adapters.shapes(self.config, 1)["layers"]
        return {name: (A.shape, B.shape) for name, (A, B) in found.items()}

    @cached_property
    def _adapter_specs(self) -> dict[str, tuple[Spec, Spec]]:
        found: dict[str, tuple[Spec, Spec]] = adapter_specs(self._adapters)["layers"]
        return found

    def _module(self, name: str, A: tuple[int, ...], B: tuple[int, ...], specs: tuple[Spec, Spec]) -> Product:
        (by_A, by_B), parts = specs, self.axes.tensor
        d_in = A[-2] // (parts if TENSOR in by_A else 1)
        return Product(name=name, layers=A[0], d_in=d_in, d_out=B[-1] // (parts if TENSOR in by_B else 1))

    @property
    def head(self) -> Product:
        d_in, d_out = self.config.linear_shapes()[HEAD]
        return Product(name="head", layers=1, d_in=d_in, d_out=d_out // self.axes.tensor, gathered=True)

    @property
    def gathered(self) -> int:
        """Return how many arrays of all layers are gathered over fsdp."""
        of_experts = 2 * self.config.expert_layers if self.routed is not None else 0
        return sum(each.layers for each in self.matrices if each.gathered) + of_experts

    @property
    def gathered_names(self) -> int:
        """Return how many arrays they are, stacked over layers."""
        return sum(each.gathered for each in self.matrices) + (2 if self.routed is not None else 0)

    # Attention

    @property
    def divided_mixers(self) -> int:
        """Return how many layers mix tokens by what `tensor` divides."""
        return 0 if self.config.attention.latent is not None else self.config.attending_layers

    @property
    def last_mixers(self) -> int:
        """Return how many of them give what nothing in their layer reads."""
        return sum(each.layers for each in self.last if each.name == "o") if self.divided_mixers else 0

    @property
    def mlps(self) -> int:
        """Return how many layers have an MLP, or experts."""
        return sum(self.config.kinds[kind].mlp for kind in self.config.pattern)

    @property
    def is_plain(self) -> bool:
        """Return whether kernels for accelerators know the scores of attention."""
        attention, kinds = self.config.attention, self.config.kinds
        return not attention.sinks and attention.cap is None and all(kind.window is None for kind in kinds)

    @property
    def widths(self) -> tuple[int, int]:
        """Return the sizes of all queries, and of all values, of a token on one chip, as attention computes them."""
        latent, heads = self.config.attention.latent, self.config.num_heads
        if latent is None:
            return (heads * self.config.head_dim // self.axes.tensor,) * 2
        if self.is_plain and latent.key_dim != latent.value_dim:
            size = kernel_size(latent.key_dim, latent.value_dim)
            return heads * size, heads * size
        return heads * latent.key_dim, heads * latent.value_dim

    def seen_tiles(self, tiles: int) -> int:
        """Return the tiles of keys that attention computes for a query, of all layers that attend together.

        The sequence has `tiles`. The number follows from the window of each layer.
        """
        windows = [self.config.kinds[kind].window for kind in self.config.pattern if self._attends(kind)]
        return sum(tiles if each is None else min(tiles, (each + TILE - 2) // TILE + 1) for each in windows)

    def seen_pages(self, pages: int, tokens: int) -> int:
        """Return the pages of keys that sampling reads for `tokens` of one sequence, its last ones, likewise."""
        windows = [self.config.kinds[kind].window for kind in self.config.pattern if self._attends(kind)]
        last = pages * PAGE - tokens
        return sum(pages - (0 if each is None else max(0, last - each + 1) // PAGE) for each in windows)

    def seen_keys(self, longest: int) -> float:
        """Return the keys that a query sees on average, of all layers that attend together, in a full sequence."""
        windows = [self.config.kinds[kind].window for kind in self.config.pattern if self._attends(kind)]
        sizes = [longest if each is None else min(longest, each) for each in windows]
        return sum(size * (2 * longest - size + 1) / (2 * longest) for size in sizes)

    def _attends(self, kind: int) -> bool:
        return self.config.kinds[kind].attends

    # The gated delta rule, and Mamba-2

    @property
    def recurrent_layers(self) -> int:
        return sum(self.config.kinds[kind].recurrence is not None for kind in self.config.pattern)

    def rule_flops(self) -> tuple[float, float, float]:
        """Return what the rule takes of a token in one layer: forward, again before a backward pass, and backward.

        What is computed again, from the state before a chunk, is all but the chunk's results and its new state.
        """
        rule, c = self.config.recurrence, TILE
        if rule is None:
            return 0.0, 0.0, 0.0
        dk, dv = rule.key_dim, rule.value_dim
        scores, decays = c * c * dk * rule.key_heads / rule.value_heads, c**3  # heads of values share keys
        by_state, of_values = c * dk * dv, c * c * dv
        first, backward = _corrections(rule) if isinstance(rule, DeltaRule) else (0, 0)
        first += scores + decays
        results = by_state + of_values + by_state
        backward += 2 * (scores + results) + decays
        each = 2 * rule.value_heads / c
        return each * (first + results), each * first, each * backward

    @property
    def rule_name(self) -> str:
        return "Mamba-2" if isinstance(self.config.recurrence, Mamba) else "delta rule"

    # Experts

    @property
    def routed(self) -> ExpertShape | None:
        return self.config.experts

    @property
    def expert_matrices(self) -> int:
        """Return how many matrices an expert has: three, or two without a gate."""
        return len(self.config.mlp_modules)

    @property
    def expert_product(self) -> int:
        """Return the FLOPs of one of them for a row."""
        assert self.routed is not None, "the model has experts"
        return 2 * self.config.expert_input * self.routed.intermediate_size

    def blocks(self, choices: int, adapters_in_use: int) -> int:
        """Return the blocks of rows that this chip's experts compute, if a router is even: `choices` of all chips'."""
        assert self.routed is not None, "the model has experts"
        own, groups = choices // self.axes.tensor, self.routed.num_experts // self.axes.tensor * adapters_in_use
        return min(own, groups) * -(-own // (groups * TILE))


def _corrections(rule: DeltaRule) -> tuple[float, float]:
    """Return the products of a chunk's corrections in a head of values, and those of their backward pass.

    The inverse of a chunk's system comes of blocks that are inverted in place, and of unions of two.
    """
    c, size = TILE, _IN_PLACE
    inverse = 2 * (size.bit_length() - 2) * size**2 * c
    while size < c:
        inverse += size**2 * c
        size *= 2
    products = c * c * rule.key_dim * rule.key_heads / rule.value_heads + c * rule.value_dim * (rule.key_dim + c)
    return products + inverse, 2 * products
