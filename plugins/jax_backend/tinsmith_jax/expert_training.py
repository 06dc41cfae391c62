"""Training with experts: the gradients of their LoRA.

Legend as in experts.py.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tinsmith_jax import experts
from tinsmith_jax.experts import Block, Blocks, ExpertLora, ExpertWeights, Routing, in_tiles, product_T, rows
from tinsmith_jax.kernels import tile_products
from tinsmith_jax.layers import TILE, Tiles

# Any below: jax arrays and pytrees of them.


def expert_mlp(
    h_TH: Any,
    routing: Routing,
    weights: ExpertWeights,
    lora: ExpertLora,
    tiles: Tiles,
    sums: ExpertLora | None = None,
) -> Any:
    """Return the weighted outputs of the experts, [T, H].

    With `sums`, reverse differentiation by them yields the sums plus this call's gradients, as in layers.lora_delta.
    """
    if sums is None:
        return experts.forward(h_TH, routing, weights, lora, tiles, _num_experts(lora))[0]
    return _summing(h_TH, routing, weights, lora, sums, tiles)


def _num_experts(lora: ExpertLora) -> int:
    return int(lora.down[0].shape[0])


@jax.custom_vjp
def _summing(
    h_TH: Any, routing: Routing, weights: ExpertWeights, lora: ExpertLora, sums: ExpertLora, tiles: Tiles
) -> Any:
    del sums
    return experts.forward(h_TH, routing, weights, lora, tiles, _num_experts(lora))[0]


def _summing_forward(
    h_TH: Any, routing: Routing, weights: ExpertWeights, lora: ExpertLora, sums: ExpertLora, tiles: Tiles
) -> tuple[Any, Any]:
    out, kept = experts.forward(h_TH, routing, weights, lora, tiles, _num_experts(lora))
    return out, (h_TH, routing, weights, lora, sums, tiles, kept)


def _summing_backward(saved: Any, d_TH: Any) -> Any:
    """Compute the experts' inner values again, block by block, instead of having kept them."""
    h_TH, routing, weights, lora, sums, tiles, (blocks, z_TS, low_ntr) = saved
    dtype, which_n, scale = h_TH.dtype, tiles.adapter_n, tiles.scale_n[:, None, None]
    num_adapters = lora.gate[0].shape[0]
    d_ntH = in_tiles(d_TH)
    d_low_Tr = (tile_products.up_backward(d_ntH, lora.down[1].astype(dtype), which_n) * scale).reshape(len(h_TH), -1)
    weight_R = jnp.zeros(blocks.token_R.shape, dtype).at[blocks.row_TC].set(routing.weight_TC)[:, None]

    def compute(block: Block) -> tuple[Any, ...]:
        active, back = jax.vjp(experts.activated, *experts.gate_and_up(block, h_TH, z_TS, weights, lora))
        weight = lax.dynamic_slice_in_dim(weight_R, block.first, TILE)
        gate_up, down = weights.of(block.expert)
        B_gate, B_up, A_down = (factor.astype(dtype) for factor in lora.of_block(block))
        d_active = product_T(rows(d_TH, block.tokens), down)
        d_active += product_T(rows(d_low_Tr, block.tokens).astype(dtype), A_down)
        d_weight = jnp.sum(active * d_active, axis=-1, keepdims=True)
        d_gate, d_up = back((weight * d_active).astype(dtype))
        d_x = product_T(jnp.concatenate((d_gate, d_up), axis=-1), gate_up)
        d_z = jnp.concatenate((product_T(d_gate, B_gate), product_T(d_up, B_up)), axis=-1)
        return d_x, d_z, d_weight, d_gate, d_up, weight * active

    num_rows, inner_size = len(blocks.token_R), weights.down.shape[1]
    sums_of = (jnp.zeros((num_rows, size), jnp.float32) for size in (h_TH.shape[1], z_TS.shape[1], 1))
    values = (jnp.zeros((num_rows, inner_size), dtype) for _ in range(3))
    d_x_RH, d_z_RS, d_weight_R, d_gate_R, d_up_R, inner_R = experts.each_block(blocks, (*sums_of, *values), compute)
    ones = jnp.ones_like(routing.weight_TC, jnp.float32)
    d_z_ntS = in_tiles(experts.weighted_sum(ones, d_z_RS, blocks)) * scale
    A = jnp.concatenate((lora.gate[0], lora.up[0]), axis=-1).astype(dtype)
    through_A = tile_products.down_backward(d_z_ntS.astype(dtype), A, which_n)
    d_h = experts.weighted_sum(ones, d_x_RH, blocks) + through_A.reshape(h_TH.shape)
    d_A = jnp.split(tile_products.outer_A(in_tiles(h_TH), d_z_ntS.astype(dtype), which_n, num_adapters), 2, axis=-1)
    d_B_down = tile_products.outer_B(low_ntr.astype(dtype), d_ntH, which_n, num_adapters)
    z_gate, z_up = jnp.split(in_tiles(z_TS.astype(dtype)), 2, axis=-1)
    of_tile = _RowsOfTiles(routing.chosen_TC, blocks, _num_experts(lora))
    new = ExpertLora(
        gate=(
            tile_products.add(sums.gate[0], d_A[0], which_n),
            of_tile.add("tr,tei->eri", sums.gate[1], z_gate, d_gate_R, which_n),
        ),
        up=(
            tile_products.add(sums.up[0], d_A[1], which_n),
            of_tile.add("tr,tei->eri", sums.up[1], z_up, d_up_R, which_n),
        ),
        down=(
            of_tile.add("tr,tei->eir", sums.down[0], in_tiles(d_low_Tr.astype(dtype)), inner_R, which_n),
            tile_products.add(sums.down[1], d_B_down, which_n),
        ),
    )
    d_routing = Routing(None, d_weight_R[blocks.row_TC, 0].astype(routing.weight_TC.dtype))
    return d_h.astype(dtype), d_routing, None, None, new, None


_summing.defvjp(_summing_forward, _summing_backward)


class _RowsOfTiles(NamedTuple):
    """Finds the rows of a tile's choices, by expert."""

    chosen_TC: Any
    blocks: Blocks
    num_experts: int

    def add(self, form: str, sums: Any, a_ntr: Any, b_RI: Any, which_n: Any) -> Any:
        """Add each tile's products with the rows of its choices to its adapter's gradients [E, k, ...], in tile order.

        The product is that of the whole tile: tokens that an expert does not compute are 0. So the sum over a tile's
        tokens does not depend on what else the call holds.
        """
        row_ntC, chosen_ntC = in_tiles(self.blocks.row_TC), in_tiles(self.chosen_TC)

        def step(n: Any, sums: Any) -> Any:
            nowhere = jnp.full((TILE, self.num_experts), b_RI.shape[0], jnp.int32)
            row_tE = nowhere.at[jnp.arange(TILE)[:, None], chosen_ntC[n]].set(row_ntC[n])
            d = jnp.einsum(form, a_ntr[n], rows(b_RI, row_tE), preferred_element_type=jnp.float32)
            before = lax.dynamic_index_in_dim(sums, which_n[n], 1, keepdims=False)
            return lax.dynamic_update_index_in_dim(sums, before + d, which_n[n], 1)

        return lax.fori_loop(0, len(which_n), step, sums)
