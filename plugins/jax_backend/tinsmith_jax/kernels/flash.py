"""Attention of a packed stream on GPUs: a Pallas kernel for Triton that visits only the tiles of a tile's own sequence.

One program handles one tile of queries of one head and walks over the tiles of keys from its sequence's first to its
own, with an online softmax (FlashAttention, arXiv 2205.14135); in the backward pass, a second kernel handles one tile
of keys and walks over the queries that see it. No tile holds two sequences, so a foreign value is never read.

Legend: T = tokens, n = tiles, c = tokens of a tile, H = heads, N = kv heads, d = head_dim, a power of two.
"""

from functools import partial
from typing import Final

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tinsmith_jax.jax_types import Jax
from tinsmith_jax.kernels.triton import compiler

_WARPS: Final = 4
_STAGES: Final = 2


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def attend(q_HTd: Jax, k_NTd: Jax, v_NTd: Jax, first_n: Jax, interpret: bool = False) -> Jax:  # noqa: FBT001, FBT002
    """Return [H, T, d] in the dtype of `q`, which is already scaled. H is a multiple of N."""
    return _forward(q_HTd, k_NTd, v_NTd, first_n, interpret)[0]


def _forward(q: Jax, k: Jax, v: Jax, first_n: Jax, interpret: bool) -> tuple[Jax, Jax]:  # noqa: FBT001
    H, T, d = q.shape
    tiles = _Tiles(H, len(k), T, len(first_n), d)
    out, lse = pl.pallas_call(
        _forward_kernel,
        grid=(tiles.n, H),
        in_specs=[tiles.scalars, tiles.of_queries, tiles.all_keys, tiles.all_keys],
        out_specs=[tiles.of_queries, tiles.of_rows],
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((H, T), jnp.float32)],
        **compiler(_WARPS, _STAGES, interpret),
    )(first_n, q, k, v)
    return out, (q, k, v, first_n, out, lse)


def _forward_kernel(first_ref: Jax, q_ref: Jax, k_ref: Jax, v_ref: Jax, out_ref: Jax, lse_ref: Jax) -> None:
    i, q = pl.program_id(0), q_ref[...]
    c, d = q.shape

    def step(t: Jax, carry: tuple[Jax, Jax, Jax]) -> tuple[Jax, Jax, Jax]:
        high, total, out = carry
        scores = _scores(q, k_ref[pl.ds(t * c, c), :], t == i)
        new_high = jnp.maximum(high, scores.max(axis=1))
        shrink = jnp.exp(high - new_high)
        p = jnp.exp(scores - new_high[:, None])
        out = out * shrink[:, None] + _dot(p.astype(q.dtype), v_ref[pl.ds(t * c, c), :])
        return new_high, total * shrink + p.sum(axis=1), out

    # A finite floor instead of -inf: exp(floor - floor) is 1 and exp(-inf - floor) is 0, never NaN.
    start = (jnp.full((c,), -1e30, jnp.float32), jnp.zeros((c,), jnp.float32), jnp.zeros((c, d), jnp.float32))
    high, total, out = jax.lax.fori_loop(first_ref[i], i + 1, step, start)
    out_ref[...] = (out / total[:, None]).astype(out_ref.dtype)
    lse_ref[...] = high + jnp.log(total)


def _backward(interpret: bool, saved: Jax, d_out: Jax) -> tuple[Jax, Jax, Jax, None]:  # noqa: FBT001
    q, k, v, first_n, out, lse = saved
    H, T, d = q.shape
    tiles = _Tiles(H, len(k), T, len(first_n), d)
    delta = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(axis=-1)
    d_q = pl.pallas_call(
        _d_q_kernel,
        grid=(tiles.n, H),
        in_specs=[tiles.scalars, *[tiles.of_queries] * 2, *[tiles.of_rows] * 2, tiles.all_keys, tiles.all_keys],
        out_specs=tiles.of_queries,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        **compiler(_WARPS, _STAGES, interpret),
    )(first_n, q, d_out, lse, delta, k, v)
    d_k, d_v = pl.pallas_call(
        _d_kv_kernel,
        grid=(tiles.n, len(k)),
        in_specs=[tiles.scalars, tiles.of_keys, tiles.of_keys, *[tiles.all_queries] * 2, *[tiles.all_rows] * 2],
        out_specs=[tiles.of_keys, tiles.of_keys],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)],
        **compiler(_WARPS, _STAGES, interpret),
    )(_last(first_n), k, v, q, d_out, lse, delta)
    return d_q, d_k, d_v, None


attend.defvjp(_forward, _backward)


def _d_q_kernel(
    first_ref: Jax, q_ref: Jax, d_out_ref: Jax, lse_ref: Jax, delta_ref: Jax, k_ref: Jax, v_ref: Jax, d_q_ref: Jax
) -> None:
    i, q, d_out, lse, delta = pl.program_id(0), q_ref[...], d_out_ref[...], lse_ref[...], delta_ref[...]
    c = q.shape[0]

    def step(t: Jax, d_q: Jax) -> Jax:
        k, v = k_ref[pl.ds(t * c, c), :], v_ref[pl.ds(t * c, c), :]
        p = jnp.exp(_scores(q, k, t == i) - lse[:, None])
        d_s = p * (_dot(d_out, v.T) - delta[:, None])
        return d_q + _dot(d_s.astype(q.dtype), k)

    d_q_ref[...] = jax.lax.fori_loop(first_ref[i], i + 1, step, jnp.zeros(q.shape, jnp.float32)).astype(d_q_ref.dtype)


def _d_kv_kernel(  # noqa: PLR0913 - what a kernel reads and writes
    last_ref: Jax, k_ref: Jax, v_ref: Jax, q_ref: Jax, d_out_ref: Jax, lse_ref: Jax, delta_ref: Jax,
    d_k_ref: Jax, d_v_ref: Jax,
) -> None:  # fmt: skip
    i, k, v = pl.program_id(0), k_ref[...], v_ref[...]
    c, group = k.shape[0], q_ref.shape[0]
    steps = last_ref[i] + 1 - i

    def step(number: Jax, carry: tuple[Jax, Jax]) -> tuple[Jax, Jax]:
        d_k, d_v = carry
        head, t = number // steps, i + number % steps
        rows = pl.ds(t * c, c)
        q, d_out = q_ref[head, rows, :], d_out_ref[head, rows, :]
        p = jnp.exp(_scores(q, k, t == i) - lse_ref[head, rows][:, None])
        d_s = p * (_dot(d_out, v.T) - delta_ref[head, rows][:, None])
        return d_k + _dot(d_s.astype(k.dtype).T, q), d_v + _dot(p.astype(k.dtype).T, d_out)

    zeros = jnp.zeros(k.shape, jnp.float32)
    d_k, d_v = jax.lax.fori_loop(0, group * steps, step, (zeros, zeros))
    d_k_ref[...], d_v_ref[...] = d_k.astype(d_k_ref.dtype), d_v.astype(d_v_ref.dtype)


class _Tiles:
    """The block of an array for one program: a tile of one head, or all tiles of the heads that share keys."""

    def __init__(self, H: int, N: int, T: int, n: int, d: int) -> None:
        group, c = H // N, T // n
        self.n = n
        self.scalars = pl.BlockSpec((n,), lambda i, h: (0,))  # noqa: ARG005
        self.of_queries = pl.BlockSpec((None, c, d), lambda i, h: (h, i, 0))
        self.of_rows = pl.BlockSpec((None, c), lambda i, h: (h, i))
        self.all_keys = pl.BlockSpec((None, T, d), lambda i, h: (h // group, 0, 0))  # noqa: ARG005
        self.of_keys = self.of_queries  # of a kv head
        self.all_queries = pl.BlockSpec((group, T, d), lambda i, h: (h, 0, 0))  # noqa: ARG005
        self.all_rows = pl.BlockSpec((group, T), lambda i, h: (h, 0))  # noqa: ARG005


def _last(first_n: Jax) -> Jax:
    """Return the last tile of each tile's sequence."""
    tiles = jnp.arange(len(first_n), dtype=jnp.int32)
    return jnp.where(first_n[:, None] == first_n, tiles, 0).max(axis=1)


def _scores(q: Jax, k: Jax, is_diagonal: Jax) -> Jax:
    rows, columns = (jax.lax.broadcasted_iota(jnp.int32, (q.shape[0], k.shape[0]), axis) for axis in (0, 1))
    return jnp.where((rows >= columns) | ~is_diagonal, _dot(q, k.T), -jnp.inf)


def _dot(a: Jax, b: Jax) -> Jax:
    return jax.lax.dot(a, b, preferred_element_type=jnp.float32)
