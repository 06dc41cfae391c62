"""Training with experts: the gradients of their LoRA.

Legend as in experts.py.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tinsmith_jax import experts
from tinsmith_jax.experts import Block, Blocks, ExpertLora, ExpertWeights, Routing, in_tiles, product_T, rows
from tinsmith_jax.jax_types import Jax
from tinsmith_jax.kernels import tile_products
from tinsmith_jax.layers import activated
from tinsmith_jax.mesh import ONE, Axes
from tinsmith_jax.model_config import ModelConfig
from tinsmith_jax.tiles import TILE, Tiles


def expert_mlp(
    h_TH: Jax,
    routing: Routing,
    weights: ExpertWeights,
    lora: ExpertLora,
    tiles: Tiles,
    config: ModelConfig,
    sums: ExpertLora | None = None,
    axes: Axes = ONE,
) -> Jax:
    """Return the weighted outputs of the experts, [T, H].

    With `sums`, reverse differentiation by them yields the sums plus this call's gradients, as in layers.lora_delta.

    On a mesh, the gradients by `h_TH` and by the routing's weights are this shard's parts; the result is whole.
    """
    if sums is None:
        return experts.forward(h_TH, routing, weights, lora, tiles, config, axes)[0]
    return _summing(h_TH, routing, weights, lora, sums, tiles, config, axes)


def _num_experts(lora: ExpertLora) -> int:
    return int(lora.down[0].shape[0])


@partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _summing(
    h_TH: Jax,
    routing: Routing,
    weights: ExpertWeights,
    lora: ExpertLora,
    sums: ExpertLora,
    tiles: Tiles,
    config: ModelConfig,
    axes: Axes,
) -> Jax:
    del sums
    return experts.forward(h_TH, routing, weights, lora, tiles, config, axes)[0]


def _summing_forward(
    h_TH: Jax,
    routing: Routing,
    weights: ExpertWeights,
    lora: ExpertLora,
    sums: ExpertLora,
    tiles: Tiles,
    config: ModelConfig,
    axes: Axes,
) -> tuple[Jax, Jax]:
    out, kept = experts.forward(h_TH, routing, weights, lora, tiles, config, axes)
    return out, (h_TH, routing, weights, lora, sums, tiles, kept)


def _summing_backward(config: ModelConfig, axes: Axes, saved: Jax, d_TH: Jax) -> Jax:
    """Compute the experts' inner values again, block by block, instead of having kept them."""
    h_TH, routing, weights, lora, sums, tiles, (blocks, z_TS, low_ntr) = saved
    dtype, which_n, scale = h_TH.dtype, tiles.adapter_n, tiles.scale_n[:, None, None]
    num_adapters = lora.up[0].shape[0]
    d_ntH = in_tiles(d_TH)
    d_low_Tr = (tile_products.up_backward(d_ntH, lora.down[1].astype(dtype), which_n) * scale).reshape(len(h_TH), -1)
    weight_R = jnp.zeros(blocks.token_R.shape, dtype).at[blocks.row_TC].set(routing.weight_TC)[:, None]

    def compute(block: Block) -> tuple[Jax, ...]:
        active, back = jax.vjp(
            partial(activated, config=config), *experts.gate_and_up(block, h_TH, z_TS, weights, lora)
        )
        weight = lax.dynamic_slice_in_dim(weight_R, block.first, TILE)
        gate_up, down = weights.of(block.expert)
        *B_inner, A_down = (factor.astype(dtype) for factor in lora.of_block(block))
        d_active = product_T(rows(d_TH, block.tokens), down)
        d_active += product_T(rows(d_low_Tr, block.tokens).astype(dtype), A_down)
        d_weight = jnp.sum(active * d_active, axis=-1, keepdims=True)
        if weights.down_bias is not None:
            bias = weights.down_bias[weights.first + block.expert]
            d_weight += jnp.sum(rows(d_TH, block.tokens) * bias, axis=-1, keepdims=True)
        d_parts = back((weight * d_active).astype(dtype))
        d_x = product_T(jnp.concatenate(d_parts, axis=-1), gate_up)
        d_z = jnp.concatenate([product_T(d, B) for d, B in zip(d_parts, B_inner, strict=True)], axis=-1)
        return d_x, d_z, d_weight, weight * active, *d_parts

    num_rows, inner_size = len(blocks.token_R), weights.down.shape[1]
    sums_of = (jnp.zeros((num_rows, size), jnp.float32) for size in (h_TH.shape[1], z_TS.shape[1], 1))
    values = (jnp.zeros((num_rows, inner_size), dtype) for _ in range(1 + len(lora.inner)))
    d_x_RH, d_z_RS, d_weight_R, inner_R, *d_parts = experts.each_block(blocks, (*sums_of, *values), compute)
    ones = jnp.ones_like(routing.weight_TC, jnp.float32)
    d_z_ntS = in_tiles(experts.weighted_sum(ones, d_z_RS, blocks)) * scale
    A = jnp.concatenate([A for A, _ in lora.inner], axis=-1).astype(dtype)
    through_A = tile_products.down_backward(d_z_ntS.astype(dtype), A, which_n)
    d_h = experts.weighted_sum(ones, d_x_RH, blocks) + through_A.reshape(h_TH.shape)
    every_n = axes.every_stream(which_n)
    every_h, every_d_z = axes.every_stream((in_tiles(h_TH), axes.total(d_z_ntS).astype(dtype)))
    d_A = jnp.split(tile_products.outer_A(every_h, every_d_z, every_n, num_adapters), len(d_parts), axis=-1)
    every_low, every_d = axes.every_stream((low_ntr.astype(dtype), d_ntH))
    d_B_down = tile_products.outer_B(every_low, every_d, every_n, num_adapters)
    z = jnp.split(in_tiles(z_TS.astype(dtype)), len(d_parts), axis=-1)
    of_tile = _RowsOfTiles(routing.chosen_TC, blocks, _num_experts(lora), every_n, axes)
    *of_gate, of_up = (
        (tile_products.add(A, d, every_n), of_tile.add("tr,tei->eri", B, low, d_R))
        for (A, B), d, low, d_R in zip(sums.inner, d_A, z, d_parts, strict=True)
    )
    new = ExpertLora(
        gate=of_gate[0] if of_gate else None,
        up=of_up,
        down=(
            of_tile.add("tr,tei->eir", sums.down[0], in_tiles(d_low_Tr.astype(dtype)), inner_R),
            tile_products.add(sums.down[1], d_B_down, every_n),
        ),
    )
    d_routing = Routing(None, rows(d_weight_R, blocks.row_TC)[..., 0].astype(routing.weight_TC.dtype))
    return d_h.astype(dtype), d_routing, None, None, new, None


_summing.defvjp(_summing_forward, _summing_backward)


class _RowsOfTiles(NamedTuple):
    """Finds the rows of a tile's choices, by expert."""

    chosen_TC: Jax
    blocks: Blocks
    num_experts: int
    every_n: Jax  # the adapters of all tiles whose products are added here
    axes: Axes

    def add(self, form: str, sums: Jax, a_ntr: Jax, b_RI: Jax) -> Jax:
        """Add each tile's products with the rows of its choices to its adapter's gradients [E, k, ...], in tile order.

        The product covers the whole tile: tokens that an expert does not compute are 0. So the sum over a tile's
        tokens does not depend on what else the call holds.
        """
        every_a, b_of_tile = self.axes.every_stream(a_ntr), self._of_tile(b_RI)

        def step(n: Jax, sums: Jax) -> Jax:
            d = jnp.einsum(form, every_a[n], b_of_tile(n), preferred_element_type=jnp.float32)
            before = lax.dynamic_index_in_dim(sums, self.every_n[n], 1, keepdims=False)
            return lax.dynamic_update_index_in_dim(sums, before + d, self.every_n[n], 1)

        return lax.fori_loop(0, len(self.every_n), step, sums)

    def _of_tile(self, b_RI: Jax) -> Callable[[Jax], Jax]:
        """Return what finds the rows [t, E, I] of a tile. If streams are joined, the rows of all choices are."""
        row_ntC, chosen_ntC = in_tiles(self.blocks.row_TC), self.axes.every_stream(in_tiles(self.chosen_TC))
        token_t = jnp.arange(TILE)[:, None]

        def own(n: Jax) -> Jax:
            nowhere = jnp.full((TILE, self.num_experts), b_RI.shape[0], jnp.int32)
            return rows(b_RI, nowhere.at[token_t, chosen_ntC[n]].set(row_ntC[n]))

        if not self.axes.joins_streams:
            return own
        every_ntCI = self.axes.every_stream(rows(b_RI, row_ntC))

        def joined(n: Jax) -> Jax:
            nothing = jnp.zeros((TILE, self.num_experts, b_RI.shape[1]), b_RI.dtype)
            return nothing.at[token_t, chosen_ntC[n]].set(every_ntCI[n])

        return joined
