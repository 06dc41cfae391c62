"""Decoders that attend by latents, as DeepSeek V3 and Kimi-K2.

Keys and values are products of a latent that all heads share, and so are queries, of another one. Behind a head's key
is a rotated part, which all heads share, too. The first layers may have a dense MLP in place of experts.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from tinsmith_checkpoints.errors import ConfigError
from tinsmith_checkpoints.huggingface.decoder import ATTENTION, LATENT, MLP, DecoderShape, decoder_shape
from tinsmith_checkpoints.values import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape(DecoderShape):
    """The sizes of a decoder with latents. `head_dim`: of a query and a key, with the rotated part."""

    query_rank: int | None  # of the latent that queries are products of; None: they are products of the input
    rank: int  # of the one for keys and values
    rotated_dim: int
    value_dim: int  # of a head
    dense_layers: int  # the first ones, which have no experts

    @property
    def vector_weights(self) -> int:
        return 2 * self.hidden_size + (self.query_rank or 0) + self.rank

    @property
    def attention_modules(self) -> tuple[str, ...]:
        q, *_, o = ATTENTION
        return (*LATENT, o) if self.query_rank else (q, *LATENT[2:], o)

    @property
    def cached_size(self) -> int:
        return self.rank + self.rotated_dim

    @property
    def period(self) -> int:
        return self.num_layers if self.dense_layers else 1

    @property
    def other_weights(self) -> tuple[int, int]:
        if self.experts is None:
            return 0, 0
        linear, inner, number = self.linear_shapes(), self.experts.intermediate_size, self.experts.num_experts
        dense = [linear[path] for path in MLP]
        shared = [linear[path] for path in self.experts.shared_modules if path in linear]
        own = sum(i * o for i, o in dense) - sum(i * o for i, o in shared)
        own -= self.hidden_size * (number * (3 * inner + 1) + self.experts.shared_gate)
        adapted = sum(map(sum, dense)) - sum(map(sum, shared)) - 3 * (self.hidden_size + number * inner)
        return self.dense_layers * own, self.dense_layers * adapted

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer >= self.dense_layers

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        q_a, q_b, kv_a, kv_b = LATENT
        heads, plain = self.num_heads, self.head_dim - self.rotated_dim
        shapes = DecoderShape.linear_shapes(self)
        if self.query_rank:
            shapes[q_a] = (self.hidden_size, self.query_rank)
            shapes[q_b] = (self.query_rank, self.q_size)
        shapes[kv_a] = (self.hidden_size, self.rank + self.rotated_dim)
        shapes[kv_b] = (self.rank, heads * (plain + self.value_dim))
        shapes[ATTENTION[3]] = (heads * self.value_dim, self.hidden_size)
        return shapes


def latent_shape(config: Mapping[str, Json], path: Path, *, supported: Collection[str]) -> LatentShape:
    """Read the sizes of such a decoder; arguments and errors are those of `decoder_shape`."""
    layers, rotated = int(config["num_hidden_layers"]), int(config.get("qk_rope_head_dim", 64))
    dense = min(int(config.get("first_k_dense_replace", 3)), layers)
    key_dim = int(config.get("qk_nope_head_dim", 128)) + rotated
    if config.get("moe_layer_freq", 1) != 1:
        msg = f"{path}: moe_layer_freq is {config['moe_layer_freq']!r}, supported is 1"
        raise ConfigError(msg)
    config = {"n_shared_experts": 1, "norm_topk_prob": True, **config}
    config |= {"head_dim": key_dim, "num_key_value_heads": config["num_attention_heads"]}
    if dense == layers:
        config["n_routed_experts"] = 0
    shape = decoder_shape(config, path, supported=supported)
    query_rank = config.get("q_lora_rank", 1536)
    return LatentShape(
        **{each.name: getattr(shape, each.name) for each in fields(shape)},
        query_rank=None if query_rank is None else int(query_rank),
        rank=int(config.get("kv_lora_rank", 512)),
        rotated_dim=rotated,
        value_dim=int(config.get("v_head_dim", 128)),
        dense_layers=dense if dense < layers else 0,
    )
