"""The MLP of a layer with experts: routing, and the products of tokens sorted by expert and adapter, with their LoRA.

A router gives each token to its `top_k` experts; their outputs are added, weighted. Router and base weights are frozen.
LoRA follows Tinker's layout: the side of each factor that faces the hidden states is shared by the experts. So the
shared factors work on tiles, as in a dense layer, and only the experts' own ones need the tokens sorted.

Tokens are sorted by expert, then by adapter, and each group is padded to blocks of TILE rows. A block reads the weights
of one expert and one adapter. The bits of a row of such a product depend neither on its place nor on the other rows,
and a token's results are added in an order of its own, so other tenants do not change them.
Gradients of the experts' own factors are added tile by tile in order, as all others are.

On a mesh, a shard of `tensor` has some of the experts, and all tokens. It sorts the choices of its own experts alone,
and the shards' sums are added.

Legend: T = tokens, n = T / TILE tiles, C = experts of a token, P = T * C choices, E = experts, k = adapters,
R = rows of all blocks, b = blocks, H = hidden, I = inner size of an expert, r = padded rank. If experts read latents,
these are in the place of hidden states.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tinsmith_checkpoints.huggingface import ExpertShape
from tinsmith_jax.jax_types import Jax
from tinsmith_jax.kernels import tile_products
from tinsmith_jax.layers import activated, plus_bias
from tinsmith_jax.mesh import ONE, Axes
from tinsmith_jax.model_config import Groups, ModelConfig
from tinsmith_jax.tiles import TILE, Tiles


class Routing(NamedTuple):
    """Which experts compute each token, and how much each counts."""

    chosen_TC: Jax  # int32
    weight_TC: Jax  # float32; for the products, of the dtype of the hidden states

    def of_shard(self, num_experts: int, dtype: Jax, axes: Axes) -> "Routing":
        """Return what a shard with `num_experts` computes. The choices come from `Axes.own_experts`."""
        return Routing(axes.own_experts(self.chosen_TC, num_experts), self.weight_TC.astype(dtype))


class ExpertWeights(NamedTuple):
    """The frozen weights of all layers' experts, and which of them is the first one of the layer at hand."""

    first: Jax
    gate_up: Jax  # [L E, H, 2 I], or [L E, H, I] without gates
    down: Jax  # [L E, I, H]
    gate_up_bias: Jax | None = None  # [L E, 2 I]
    down_bias: Jax | None = None  # [L E, H]

    def of(self, expert: Jax) -> tuple[Jax, Jax]:
        return self.gate_up[self.first + expert], self.down[self.first + expert]

    def to_inner(self, h_xH: Jax, expert: Jax) -> tuple[Jax, ...]:
        """Compute gate and up, or up alone."""
        out = h_xH @ self.gate_up[self.first + expert]
        if self.gate_up_bias is not None:
            out += self.gate_up_bias[self.first + expert]
        return tuple(jnp.split(out, self.gate_up.shape[-1] // self.down.shape[-2], axis=-1))

    def to_hidden(self, inner_xI: Jax, expert: Jax) -> Jax:
        out = inner_xI @ self.down[self.first + expert]
        return out if self.down_bias is None else out + self.down_bias[self.first + expert]


class Block(NamedTuple):
    """TILE rows that one expert computes with one adapter."""

    first: Jax  # of its rows
    tokens: Jax  # T for rows that pad the block
    expert: Jax
    adapter: Jax


class Blocks(NamedTuple):
    """The choices, sorted and padded. Blocks past `num_blocks` are not computed."""

    token_R: Jax
    row_TC: Jax  # where a choice lies among the rows
    expert_b: Jax
    adapter_b: Jax
    num_blocks: Jax


class ExpertLora(NamedTuple):
    """The LoRA of one layer's experts: an (A, B) pair per module. Gradients have the same form."""

    gate: tuple[Jax, Jax] | None  # [k, H, r], [E, k, r, I]; None: there are no gates
    up: tuple[Jax, Jax]  # likewise
    down: tuple[Jax, Jax]  # [E, k, I, r], [k, r, H]

    @property
    def inner(self) -> tuple[tuple[Jax, Jax], ...]:
        """The modules that read the hidden states."""
        return (self.up,) if self.gate is None else (self.gate, self.up)

    def of_block(self, block: Block) -> tuple[Jax, ...]:
        """Return B of gate and up, and A of down."""
        own = (*(B for _, B in self.inner), self.down[0])
        return tuple(factor[block.expert, block.adapter] for factor in own)

    def where_adapted(self, delta: Jax, adapter: Jax) -> Jax:
        del adapter
        return delta


class ResidentLora(NamedTuple):
    """The LoRA of the adapters in the slots, for sampling. The experts' own factors are of all layers, [L E, ...].

    Scales are in B already. The contents of a slot without an adapter are undefined, and may be NaN.
    """

    gate: tuple[Jax, Jax] | None
    up: tuple[Jax, Jax]
    down: tuple[Jax, Jax]
    first: Jax  # expert of the layer at hand
    adapted_k: Jax  # bool: the slot uses its adapter; else the base model

    @property
    def inner(self) -> tuple[tuple[Jax, Jax], ...]:
        return ExpertLora(self.gate, self.up, self.down).inner

    def of_block(self, block: Block) -> tuple[Jax, ...]:
        return ExpertLora(self.gate, self.up, self.down).of_block(block._replace(expert=self.first + block.expert))

    def where_adapted(self, delta: Jax, adapter: Jax) -> Jax:
        """Mask the deltas [..., x, y] of adapters [...] that are not in use."""
        return jnp.where(self.adapted_k[adapter][..., None, None], delta, 0)


class Kept(NamedTuple):
    """Residuals: values of the forward pass for the backward pass."""

    blocks: Blocks
    z_TS: Jax  # scale * h @ A of gate and up, side by side
    low_ntr: Jax  # scale * what the experts give the shared B of down


Stacked = tuple[Jax, ...]
"""The experts' matrices, and biases, of all layers; empty if each layer gathers its own."""

_SMALL = 1e-20  # is added to the sum of a token's weights
_WEIGHTS = ("expert_gate_up", "expert_down", "expert_gate_up_bias", "expert_down_bias")


def take_apart(layers: Mapping[str, Jax], axes: Axes = ONE) -> tuple[Mapping[str, Jax], Stacked | None]:
    """Separate the experts' matrices, of which a layer reads some, from the trees that a layer scan splits.

    They stay there if they are divided over `fsdp`: then a layer gathers all of its own. None: there are no experts.
    """
    if "expert_down" not in layers:
        return layers, None
    stacked = [layers[name] for name in _WEIGHTS if name in layers]
    num_layers, num_experts = stacked[1].shape[:2]
    others = {name: value for name, value in layers.items() if axes.fsdp > 1 or not name.startswith("expert_")}
    others["first_expert"] = jnp.arange(num_layers) * num_experts
    if axes.fsdp > 1:
        return others, ()
    return others, tuple(each.reshape(-1, *each.shape[2:]) for each in stacked)


def of_layer(layer: Mapping[str, Jax], stacked: Stacked, axes: Axes) -> ExpertWeights:
    """Return the experts' weights of one layer, given what `take_apart` returned."""
    if stacked:
        return ExpertWeights(layer["first_expert"], *stacked)
    biases = (layer[name] for name in _WEIGHTS[2:] if name in layer)
    return ExpertWeights(0, axes.whole(layer["expert_gate_up"], 1), axes.whole(layer["expert_down"], 2), *biases)


def route(h_TH: Jax, weights: Mapping[str, Jax], config: ModelConfig, replayed_TC: Jax | None = None) -> Routing:
    """Choose each token's experts by softmax in float32, the most probable first. Gradients pass through weights.

    `replayed_TC` are experts to take instead, weighted by the same softmax; where it is negative, there are none.
    """
    assert config.experts is not None
    if config.mixture.groups is not None:
        return _route_by_groups(h_TH, weights, config.experts, config.mixture.groups, replayed_TC)
    logits_TE = plus_bias(h_TH @ weights["router"], weights, "router_bias")
    probability_TE = jax.nn.softmax(logits_TE.astype(jnp.float32), axis=-1)
    weight_TC, chosen_TC = lax.top_k(probability_TE, config.experts.top_k)
    if replayed_TC is not None:
        chosen_TC = jnp.where(replayed_TC < 0, chosen_TC, replayed_TC.astype(jnp.int32))
        weight_TC, order_TC = lax.top_k(jnp.take_along_axis(probability_TE, chosen_TC, axis=1), chosen_TC.shape[1])
        chosen_TC = jnp.take_along_axis(chosen_TC, order_TC, axis=1)
    if config.experts.normalized:
        weight_TC = weight_TC / sum(weight_TC[:, c : c + 1] for c in range(config.experts.top_k))
    return Routing(chosen_TC, weight_TC)


def _route_by_groups(
    h_TH: Jax, weights: Mapping[str, Jax], experts: ExpertShape, groups: Groups, replayed_TC: Jax | None
) -> Routing:
    """Do as `route` by sigmoid: the experts of the best groups, the best first."""
    logits_TE = jnp.matmul(h_TH, weights["router"], preferred_element_type=jnp.float32)
    score_TE = jax.nn.sigmoid(logits_TE)
    rank_TE = lax.stop_gradient(score_TE) + weights["router_correction"].astype(jnp.float32)
    if groups.chosen < groups.number:
        rank_TgE = rank_TE.reshape(len(h_TH), groups.number, -1)
        of_group_Tg = lax.top_k(rank_TgE, 2)[0].sum(-1)
        _, best_Tc = lax.top_k(of_group_Tg, groups.chosen)
        is_best_Tg = (best_Tc[:, :, None] == jnp.arange(groups.number)).any(axis=1)
        allowed_TE = jnp.repeat(is_best_Tg, rank_TgE.shape[-1], axis=1)
        _, chosen_TC = lax.top_k(jnp.where(allowed_TE, rank_TE, -jnp.inf), experts.top_k)
    else:
        _, chosen_TC = lax.top_k(rank_TE, experts.top_k)
    if replayed_TC is not None:
        chosen_TC = jnp.where(replayed_TC < 0, chosen_TC, replayed_TC.astype(jnp.int32))
        _, order_TC = lax.top_k(jnp.take_along_axis(rank_TE, chosen_TC, axis=1), chosen_TC.shape[1])
        chosen_TC = jnp.take_along_axis(chosen_TC, order_TC, axis=1)
    weight_TC = jnp.take_along_axis(score_TE, chosen_TC, axis=1)
    if experts.normalized:
        weight_TC = weight_TC / (sum(weight_TC[:, c : c + 1] for c in range(experts.top_k)) + _SMALL)
    return Routing(chosen_TC, weight_TC * groups.scale)


def load_by_tile(chosen_TC: Jax, count_n: Jax, num_experts: int) -> Jax:
    """Return how many of each tile's tokens every expert computes, uint8 [n, E]: what pads a tile is left out."""
    tile_T, index_T = jnp.divmod(jnp.arange(chosen_TC.shape[0]), TILE)
    is_token_T = (index_T < count_n[tile_T]).astype(jnp.int32)
    counted = jnp.zeros((len(count_n), num_experts), jnp.int32).at[tile_T[:, None], chosen_TC].add(is_token_T[:, None])
    return counted.astype(jnp.uint8)  # a tile has fewer than 256 tokens


def forward(
    h_TH: Jax,
    routing: Routing,
    weights: ExpertWeights,
    lora: ExpertLora | ResidentLora,
    tiles: Tiles,
    config: ModelConfig,
    axes: Axes = ONE,
) -> tuple[Jax, Kept]:
    """Return the weighted outputs of all experts, [T, H]."""
    dtype, num_adapters = h_TH.dtype, lora.up[0].shape[0]
    assert config.experts is not None
    own = config.experts.num_experts // axes.tensor
    blocks = _sorted(routing.chosen_TC, jnp.repeat(tiles.adapter_n, TILE), own, num_adapters)
    z_TS = _shared_down(h_TH, lora, tiles)

    def compute(block: Block) -> tuple[Jax, Jax]:
        inner = activated(*gate_and_up(block, h_TH, z_TS, weights, lora), config=config)
        low = product(inner, lora.of_block(block)[-1].astype(dtype))
        return weights.to_hidden(inner, block.expert), lora.where_adapted(low, block.adapter)

    num_rows, rank = blocks.token_R.shape[0], lora.down[0].shape[-1]
    empty = (jnp.zeros((num_rows, h_TH.shape[1]), dtype), jnp.zeros((num_rows, rank), jnp.float32))
    y_RH, low_Rr = each_block(blocks, empty, compute)
    out_TH = axes.total(weighted_sum(routing.weight_TC, y_RH, blocks))
    low_Tr = axes.total(weighted_sum(routing.weight_TC, low_Rr, blocks))
    low_ntr = in_tiles(low_Tr) * tiles.scale_n[:, None, None]
    delta = tile_products.up(low_ntr.astype(dtype), lora.down[1].astype(dtype), tiles.adapter_n)
    delta = lora.where_adapted(delta, tiles.adapter_n).reshape(out_TH.shape)
    return out_TH + delta.astype(dtype), Kept(blocks, z_TS, low_ntr)


def gate_and_up(
    block: Block, h_TH: Jax, z_TS: Jax, weights: ExpertWeights, lora: ExpertLora | ResidentLora
) -> tuple[Jax, ...]:
    """Compute both, or up alone, with their LoRA, for one block's rows."""
    dtype = h_TH.dtype
    parts = weights.to_inner(rows(h_TH, block.tokens), block.expert)
    low = jnp.split(rows(z_TS, block.tokens).astype(dtype), len(parts), axis=-1)
    return tuple(
        part + lora.where_adapted(product(z, B.astype(dtype)), block.adapter).astype(dtype)
        for part, z, B in zip(parts, low, lora.of_block(block)[:-1], strict=True)
    )


def _shared_down(h_TH: Jax, lora: ExpertLora | ResidentLora, tiles: Tiles) -> Jax:
    """Compute scale * h @ A of gate and up, side by side: [T, 2 r] in float32; of up alone, [T, r]."""
    A = jnp.concatenate([A for A, _ in lora.inner], axis=-1).astype(h_TH.dtype)
    z = tile_products.down(in_tiles(h_TH), A, tiles.adapter_n) * tiles.scale_n[:, None, None]
    return z.reshape(h_TH.shape[0], -1)


# Rows and blocks ------------------------------------------------------------------------------------------------------


def _sorted(chosen_TC: Jax, adapter_T: Jax, num_experts: int, num_adapters: int) -> Blocks:
    """Sort the choices. Those of experts past the last one have no block; their row is past the last one."""
    num_tokens, top_k = chosen_TC.shape
    num_choices, num_groups = num_tokens * top_k, num_experts * num_adapters
    group_P = (chosen_TC * num_adapters + adapter_T[:, None]).reshape(-1)
    size_g = jnp.zeros(num_groups, jnp.int32).at[group_P].add(1)
    blocks_g = (size_g + TILE - 1) // TILE
    end_g = jnp.cumsum(blocks_g)
    order_P = jnp.argsort(group_P, stable=True)
    sorted_P = group_P[order_P]
    index_P = jnp.arange(num_choices) - (jnp.cumsum(size_g) - size_g)[sorted_P]
    most = num_choices // TILE + min(num_groups, num_choices)
    row_P = jnp.where(sorted_P < num_groups, (end_g - blocks_g)[sorted_P] * TILE + index_P, most * TILE)
    group_b = jnp.minimum(jnp.searchsorted(end_g, jnp.arange(most), side="right"), num_groups - 1)
    return Blocks(
        token_R=jnp.full(most * TILE, num_tokens, jnp.int32).at[row_P].set(order_P // top_k),
        row_TC=jnp.zeros(num_choices, jnp.int32).at[order_P].set(row_P).reshape(num_tokens, top_k),
        expert_b=group_b // num_adapters,
        adapter_b=group_b % num_adapters,
        num_blocks=end_g[-1],
    )


def rows(x_T: Jax, index: Jax) -> Jax:
    """Take rows, by indices of any shape; those past the end are 0."""
    return jnp.take(x_T, index, axis=0, mode="fill", fill_value=0)


def each_block(blocks: Blocks, results: tuple[Jax, ...], compute: Callable[[Block], tuple[Jax, ...]]) -> Jax:
    """Fill arrays [R, ...] with what `compute` returns for each block."""

    def step(b: Jax, results: tuple[Jax, ...]) -> tuple[Jax, ...]:
        first = b * TILE
        tokens = lax.dynamic_slice_in_dim(blocks.token_R, first, TILE)
        new = compute(Block(first, tokens, blocks.expert_b[b], blocks.adapter_b[b]))
        return tuple(
            lax.dynamic_update_slice_in_dim(result, part.astype(result.dtype), first, 0)
            for result, part in zip(results, new, strict=True)
        )

    with jax.named_scope("experts"):
        return lax.fori_loop(0, blocks.num_blocks, step, results)


def weighted_sum(weight_TC: Jax, values_R: Jax, blocks: Blocks) -> Jax:
    """Add up the rows of a token's choices, most probable first."""
    parts = (weight_TC[:, c, None] * rows(values_R, blocks.row_TC[:, c]) for c in range(weight_TC.shape[1]))
    return sum(parts, start=next(parts))


def in_tiles(x_T: Jax) -> Jax:
    return x_T.reshape(-1, TILE, *x_T.shape[1:])


def product(a: Jax, b: Jax) -> Jax:
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def product_T(a: Jax, b: Jax) -> Jax:
    """Compute a @ b.T in float32."""
    return jnp.einsum("xo,io->xi", a, b, preferred_element_type=jnp.float32)
