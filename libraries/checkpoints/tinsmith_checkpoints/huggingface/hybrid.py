"""Decoders of two kinds of layers, as Qwen3.5 and Qwen3-Next: some mix tokens by the gated delta rule, some attend.

Those that attend have a gate: `q_proj` gives each head's query, and what its output is multiplied by.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from itertools import count
from pathlib import Path
from typing import Final

from tinsmith_checkpoints.errors import ConfigError
from tinsmith_checkpoints.huggingface.decoder import ATTENTION, DELTA, MAMBA, DecoderShape, decoder_shape
from tinsmith_checkpoints.values import Json

LINEAR, FULL = "linear_attention", "full_attention"
"""What `layer_types` of a config.json calls the two kinds."""

_MOST_LAYERS: Final = 10_000  # no model has as many, and they are listed one by one
_DEFAULTS: Final[Mapping[str, Json]] = {"head_dim": 256, "norm_topk_prob": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRule:
    """The sizes of layers that mix tokens by the gated delta rule, after a short convolution, in place of attention."""

    key_heads: int
    value_heads: int
    key_dim: int  # of a head
    value_dim: int
    width: int  # tokens that the convolution sees

    @property
    def value_size(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def mixed_size(self) -> int:
        """The channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_size

    @property
    def mixed_sizes(self) -> tuple[int, int, int]:
        """The channels of queries, keys and values."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_size

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Sizes of a layer's projections: the convolved values, the gate, beta, and the decay's input."""
        return self.mixed_size, self.value_size, self.value_heads, self.value_heads

    @property
    def adapted_modules(self) -> tuple[str, ...]:
        """The paths of those linear modules that adapters train."""
        return DELTA

    def linear_shapes(self, hidden_size: int) -> dict[str, tuple[int, int]]:
        """Return (in, out) of each linear module of such a layer."""
        shapes = {path: (hidden_size, size) for path, size in zip(DELTA[:-1], self.sizes, strict=True)}
        return {**shapes, DELTA[-1]: (self.value_size, hidden_size)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba:
    """The sizes of Mamba-2 layers. Heads have values, and share keys and queries (B and C) by groups."""

    key_heads: int  # groups
    value_heads: int
    key_dim: int  # of a head: the rows of its state
    value_dim: int
    width: int  # tokens that the convolution sees
    conv_bias: bool = True

    @property
    def value_size(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def mixed_size(self) -> int:
        """The channels of the convolution: values, keys and queries."""
        return 2 * self.key_heads * self.key_dim + self.value_size

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Sizes of what the first matrix gives: the gate, the convolved values, and the time steps."""
        return self.value_size, self.mixed_size, self.value_heads

    @property
    def adapted_modules(self) -> tuple[str, ...]:
        """The paths of those linear modules that adapters train.

        PEFT refuses the last one: kernels read its matrix and pass its adapter by.
        """
        return MAMBA[:1]

    def linear_shapes(self, hidden_size: int) -> dict[str, tuple[int, int]]:
        """Return (in, out) of each linear module of such a layer."""
        return dict(zip(MAMBA, ((hidden_size, sum(self.sizes)), (self.value_size, hidden_size)), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridShape(DecoderShape):
    delta: DeltaRule
    delta_layers: tuple[int, ...]  # the others attend

    @property
    def attending_layers(self) -> int:
        return self.num_layers - len(self.delta_layers)

    @property
    def other_weights(self) -> tuple[int, int]:
        linear, delta = self.linear_shapes(), self.delta
        own, attention = ([linear[path] for path in paths] for paths in (DELTA, self.attention_modules))
        vectors = delta.mixed_size * delta.width + 2 * delta.value_heads + delta.value_dim - 2 * self.head_dim
        more = sum(i * o for i, o in own) - sum(i * o for i, o in attention) + vectors
        adapted = sum(map(sum, own)) - sum(map(sum, attention))
        return len(self.delta_layers) * more, len(self.delta_layers) * adapted

    @property
    def state_size(self) -> int:
        own = self.delta.value_size * self.delta.key_dim + (self.delta.width - 1) * self.delta.mixed_size
        return len(self.delta_layers) * own

    @property
    def period(self) -> int:
        kinds = [layer in self.delta_layers for layer in range(self.num_layers)]
        return next(n for n in count(1) if kinds == kinds[:n] * (len(kinds) // n))

    def mixer_modules(self, layer: int) -> tuple[str, ...]:
        return DELTA if layer in self.delta_layers else self.attention_modules

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        shapes = {**DecoderShape.linear_shapes(self), **self.delta.linear_shapes(self.hidden_size)}
        return {**shapes, ATTENTION[0]: (self.hidden_size, 2 * self.q_size)}


def hybrid_shape(config: Mapping[str, Json], path: Path, *, supported: Collection[str]) -> HybridShape:
    """Read the sizes of a hybrid; arguments and errors are those of `decoder_shape`."""
    config = {**_DEFAULTS, **config}
    shape = decoder_shape(config, path, supported=supported)
    kinds = mixers(config, path)
    return HybridShape(
        **{each.name: getattr(shape, each.name) for each in fields(shape)},
        delta=delta_rule(config),
        delta_layers=tuple(layer for layer, kind in enumerate(kinds) if kind == LINEAR),
    )


def delta_rule(config: Mapping[str, Json]) -> DeltaRule:
    """Read the sizes of the rule from a hybrid's parsed config.json."""
    return DeltaRule(
        key_heads=int(config.get("linear_num_key_heads", 16)),
        value_heads=int(config.get("linear_num_value_heads", 32)),
        key_dim=int(config.get("linear_key_head_dim", 128)),
        value_dim=int(config.get("linear_value_head_dim", 128)),
        width=int(config.get("linear_conv_kernel_dim", 4)),
    )


def mixers(config: Mapping[str, Json], path: Path) -> tuple[str, ...]:
    """Return the kind of each of a hybrid's layers. `path` names the file in errors."""
    every, number = int(config.get("full_attention_interval") or 4), int(config["num_hidden_layers"])
    if not 0 < number <= _MOST_LAYERS:
        msg = f"{path}: num_hidden_layers is {number}; a model has 1 to {_MOST_LAYERS}"
        raise ConfigError(msg)
    by_default = (FULL if (layer + 1) % every == 0 else LINEAR for layer in range(number))
    kinds = tuple(config.get("layer_types") or by_default)
    if len(kinds) != number or not set(kinds) <= {LINEAR, FULL}:
        msg = f"{path}: layer_types must name {LINEAR} or {FULL} for each of the {number} layers"
        raise ConfigError(msg)
    return kinds
