"""Building blocks shared by training, prefill and decoding: norm, rotary embedding, linear layers with LoRA.

Legend: T = tokens of a packed stream, n = T / TILE tiles, k = adapters in the call, r = padded rank.

The LoRA of the k adapters in a call is a pair (A [k, in, r], B [k, r, out]); `Tiles` assigns an adapter to each tile of
64 tokens. All adapters of a call share one padded rank, and a matrix product never has fewer than 64 rows, so that a
tenant's numbers do not depend on the other tenants in the call.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from tinsmith_jax.mesh import ONE, Axes

# Any below: jax arrays and pytrees of them.
TILE = 64

Divided = Literal["outputs", "inputs"]
"""What of a module is divided over the mesh's axis `tensor`."""


class Tiles(NamedTuple):
    """For each tile of TILE tokens: its adapter, and that adapter's alpha / rank."""

    adapter_n: Any  # int32 row in the adapter stack
    scale_n: Any  # float32


class Lora(NamedTuple):
    """Several LoRA modules that read the same input (q, k, v; gate, up). `sums` holds gradients to add to, or None."""

    A: tuple[Any, ...]  # each [k, in, r]
    B: tuple[Any, ...]  # each [k, r, out_i]
    sums: tuple[tuple[Any, ...], tuple[Any, ...]] | None = None  # of the same shapes, float32


def rms_norm(x: Any, weight: Any, eps: float) -> Any:
    """Normalise the last axis in float32; the result has the dtype of `x`."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * weight.astype(jnp.float32)).astype(x.dtype)


def by_tile(compute: Callable[[Any], Any], x_T: Any) -> Any:
    """Apply `compute` to [TILE, ...] blocks of the first axis; on a CPU, one after the other.

    XLA:CPU compiles a reduction over more than two axes differently once the array exceeds some size, and then rounds
    differently. Blocks of one size keep a row's bits independent of the number of rows.
    """
    if jax.default_backend() != "cpu":
        return compute(x_T)
    return jax.lax.map(compute, x_T.reshape(-1, TILE, *x_T.shape[1:])).reshape(x_T.shape)


def rope_angles(positions: Any, inv_freq: tuple[float, ...], factor: float) -> tuple[Any, Any]:
    """Return cos and sin, float32, of shape positions.shape + [head_dim / 2]."""
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(inv_freq, jnp.float32)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rope(x: Any, cos: Any, sin: Any) -> Any:
    """Rotate [..., heads, head_dim] by angles [..., head_dim / 2] (halves, as Hugging Face stores them)."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def lora_delta(x_TI: Any, lora: Lora, tiles: Tiles, axes: Axes = ONE, divided: Divided = "outputs") -> tuple[Any, ...]:
    """Compute scale * x @ A @ B per module, each [T, out_i] in the dtype of `x`.

    With `lora.sums`, reverse differentiation by the sums yields the sums plus this call's gradients, added tile by tile
    in order. This is a left fold over a tenant's tiles: neither the other tenants in the call nor how the tenant's data
    were split into calls affect it.

    On a mesh, the gradient by `x` is this shard's part if outputs are divided; if inputs are, the result is whole.
    """
    if lora.sums is None:
        return _delta(x_TI, lora.A, lora.B, tiles, axes, divided)[0]
    return _summing_delta(x_TI, lora.A, lora.B, lora.sums, tiles, axes, divided)


def _delta(
    x_TI: Any, A: tuple[Any, ...], B: tuple[Any, ...], tiles: Tiles, axes: Axes, divided: Divided
) -> tuple[tuple[Any, ...], Any]:
    dtype = x_TI.dtype
    x = x_TI.reshape(-1, TILE, x_TI.shape[-1])
    joined = jnp.concatenate(A, axis=-1).astype(dtype)[tiles.adapter_n]
    z = _matmul("nti,nir->ntr", x, joined) * tiles.scale_n[:, None, None]  # float32
    if divided == "inputs":
        z = axes.total(z)
    parts = jnp.split(z.astype(dtype), len(A), axis=-1)
    deltas = [
        _matmul("ntr,nro->nto", part, b.astype(dtype)[tiles.adapter_n]).astype(dtype)
        for part, b in zip(parts, B, strict=True)
    ]
    return tuple(delta.reshape(x_TI.shape[0], -1) for delta in deltas), z


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _summing_delta(x_TI: Any, A: Any, B: Any, sums: Any, tiles: Tiles, axes: Axes, divided: Divided) -> tuple[Any, ...]:
    del sums
    return _delta(x_TI, A, B, tiles, axes, divided)[0]


def _summing_forward(
    x_TI: Any, A: Any, B: Any, sums: Any, tiles: Tiles, axes: Axes, divided: Divided
) -> tuple[Any, Any]:
    deltas, z = _delta(x_TI, A, B, tiles, axes, divided)
    return deltas, (x_TI, z, A, B, sums, tiles)


def _summing_backward(
    axes: Axes, divided: Divided, saved: Any, d_deltas: tuple[Any, ...]
) -> tuple[Any, Any, Any, Any, Any]:
    x_TI, z, A, B, (sums_A, sums_B), tiles = saved
    dtype = x_TI.dtype
    x = x_TI.reshape(-1, TILE, x_TI.shape[-1])
    which = axes.every_stream(tiles.adapter_n)
    d_parts, new_B = [], []
    for d_delta, part, b, total in zip(d_deltas, jnp.split(z, len(A), axis=-1), B, sums_B, strict=True):
        d = d_delta.reshape(-1, TILE, d_delta.shape[-1])
        d_parts.append(_matmul("nto,nro->ntr", d, b.astype(dtype)[tiles.adapter_n]) * tiles.scale_n[:, None, None])
        every_part, every_d = axes.every_stream((part.astype(dtype), d))
        new_B.append(add_tiles(total, _matmul("ntr,nto->nro", every_part, every_d), which))
    d_z = jnp.concatenate(d_parts, axis=-1)
    joined = jnp.concatenate(A, axis=-1).astype(dtype)[tiles.adapter_n]
    d_x = _matmul("ntr,nir->nti", d_z.astype(dtype), joined).astype(dtype).reshape(x_TI.shape)
    if divided == "outputs":
        d_z = axes.total(d_z)
    every_x, every_d_z = axes.every_stream((x, d_z.astype(dtype)))
    d_joined = _matmul("nti,ntr->nir", every_x, every_d_z)
    new_A = [
        add_tiles(total, part, which) for total, part in zip(sums_A, jnp.split(d_joined, len(A), axis=-1), strict=True)
    ]
    return d_x, None, None, (tuple(new_A), tuple(new_B)), None


_summing_delta.defvjp(_summing_forward, _summing_backward)


def add_tiles(sums_kXY: Any, tile_values_nXY: Any, adapter_n: Any) -> Any:
    """Add each tile's values to its adapter's row, in tile order."""

    def add(i: Any, sums: Any) -> Any:
        row = jax.lax.dynamic_index_in_dim(sums, adapter_n[i], 0, keepdims=False)
        value = jax.lax.dynamic_index_in_dim(tile_values_nXY, i, 0, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(sums, row + value, adapter_n[i], 0)

    return jax.lax.fori_loop(0, tile_values_nXY.shape[0], add, sums_kXY)


def _matmul(form: str, a: Any, b: Any) -> Any:
    return jnp.einsum(form, a, b, preferred_element_type=jnp.float32)
