"""Causal attention over a packed stream of sequences that start on tile boundaries.

In step j of the loop, every query tile attends to the key tile j places before it, if that tile belongs to the same
sequence. The number of steps is the number of tiles of the longest sequence in the batch. Softmax is accumulated online
in float32, starting at the query's own tile and going backwards, so a sequence's result depends on its own tiles alone:
a foreign tile contributes nothing, even if it holds NaN. The reverse pass recomputes the probabilities from the saved
log-sum-exp (FlashAttention, arXiv 2205.14135). CPUs take one query tile after the other, TPUs use the kernel in
kernels/splash.py and GPUs that in kernels/flash.py.

Legend: T = tokens, n = tiles, c = TILE, N = kv heads, g = query heads per kv head, H = g * N heads, d = head_dim,
e = size of a value.
"""

from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tinsmith_jax.jax_types import Jax
from tinsmith_jax.kernels import flash, splash
from tinsmith_jax.kernels.choice import Kernels
from tinsmith_jax.layers import capped, kept
from tinsmith_jax.tiles import TILE

_HUGE: Final = 1e15
"""From here on, a score could overflow in float32."""
_FLASH_SIZES: Final = (16, 32, 64, 128, 256)
"""Head sizes of the kernel for GPUs: what Triton multiplies in one piece."""


class Scoring(NamedTuple):
    """Changes that attention makes to scores in addition to scaling."""

    window: Jax | int | None = None  # number of tokens that a token sees, itself included
    sinks_H: Jax | None = None  # each head's softmax has one more score, which adds nothing and has no gradient
    cap: float | None = None  # scores s become cap * tanh(s / cap)

    @property
    def is_plain(self) -> bool:
        return self.window is None and self.sinks_H is None and self.cap is None


PLAIN: Final = Scoring()


def packed_attention(
    q_THd: Jax,
    k_TNd: Jax,
    v_TNe: Jax,
    first_n: Jax,
    kernels: Kernels,
    scoring: Scoring = PLAIN,
) -> Jax:
    """Attend within each sequence; `first_n` is the first tile of each tile's sequence. Returns [T, heads * e].

    The kernels for accelerators know plain scores alone, and values of the size of keys.
    """
    value_dim = v_TNe.shape[-1]
    if kernels.attention != "tile_by_tile" and scoring.is_plain and value_dim != q_THd.shape[-1]:
        q_THd, k_TNd, v_TNe = _of_one_size(q_THd, k_TNd, v_TNe)
    if not scoring.is_plain:
        out_THe = _in_tiles(kernels, q_THd, k_TNd, v_TNe, first_n, scoring)
    elif kernels.attention == "splash":
        out_THe = _in_blocks(kernels, q_THd, k_TNd, v_TNe, first_n)
    elif kernels.attention == "flash" and q_THd.shape[-1] in _FLASH_SIZES:
        out_THe = _by_head(partial(flash.attend, interpret=kernels.interpret), q_THd, k_TNd, v_TNe, first_n)
    else:
        out_THe = _in_tiles(kernels, q_THd, k_TNd, v_TNe, first_n, PLAIN)
    return out_THe[..., :value_dim].reshape(q_THd.shape[0], -1).astype(q_THd.dtype)


def _of_one_size(q_THd: Jax, k_TNd: Jax, v_TNe: Jax) -> tuple[Jax, Jax, Jax]:
    """Append zeros, so that queries, keys and values have a size of the kernels', and the scores stay as they are."""
    size = kernel_size(q_THd.shape[-1], v_TNe.shape[-1])
    q_THd = (q_THd.astype(jnp.float32) * (size / q_THd.shape[-1]) ** 0.5).astype(q_THd.dtype)
    q, k, v = (jnp.pad(x, [(0, 0), (0, 0), (0, size - x.shape[-1])]) for x in (q_THd, k_TNd, v_TNe))
    return q, k, v


def kernel_size(*sizes: int) -> int:
    """Return the size of heads that kernels compute in place of these, of queries and keys, and of values."""
    largest = max(sizes)
    return next((size for size in _FLASH_SIZES if size >= largest), largest)


def _by_head(attend: Callable[..., Jax], q_THd: Jax, k_TNd: Jax, v_TNd: Jax, first_n: Jax) -> Jax:
    """Call a kernel that takes scaled queries, and heads first."""
    q_THd = (q_THd.astype(jnp.float32) * q_THd.shape[-1] ** -0.5).astype(q_THd.dtype)
    q, k, v = (x.transpose(1, 0, 2) for x in (q_THd, k_TNd, v_TNd))
    return attend(q, k, v, first_n).transpose(1, 0, 2)


def _in_tiles(kernels: Kernels, q_THd: Jax, k_TNd: Jax, v_TNe: Jax, first_n: Jax, scoring: Scoring) -> Jax:
    window = None if scoring.window is None else jnp.asarray(scoring.window, jnp.int32)
    sinks_H = scoring.sinks_H
    T, num_heads, d = q_THd.shape
    num_kv = k_TNd.shape[1]
    n, group = T // TILE, num_heads // num_kv
    q = q_THd.reshape(n, TILE, num_kv, group, d).transpose(0, 2, 3, 1, 4).reshape(n, num_kv, group * TILE, d)
    k, v = (x.reshape(n, TILE, num_kv, -1).transpose(0, 2, 1, 3) for x in (k_TNd, v_TNe))
    attend = _attend_by_tile if kernels.attention == "tile_by_tile" else _attend
    sinks = None if sinks_H is None else jnp.repeat(sinks_H.astype(jnp.float32).reshape(num_kv, group), TILE, axis=1)
    out = attend(q, k, v, first_n, window, sinks, scoring.cap)
    return out.reshape(n, num_kv, group, TILE, -1).transpose(0, 3, 1, 2, 4).reshape(T, num_heads, -1)


# Kernels whose blocks hold several sequences --------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_blocks(kernels: Kernels, q_THd: Jax, k_TNd: Jax, v_TNd: Jax, first_n: Jax) -> Jax:
    """Return [T, H, d].

    Such a kernel multiplies foreign values by zero, which passes on a NaN. Whatever is not finite is therefore taken
    out before, and the results of its own sequence are NaN afterwards.
    """
    return _in_blocks_forward(kernels, q_THd, k_TNd, v_TNd, first_n)[0]


def _in_blocks_forward(kernels: Kernels, *qkv_and_first: Jax) -> tuple[Jax, Jax]:
    *qkv, first_n = qkv_and_first
    broken_n = _broken_sequences(qkv, first_n)
    attend = partial(splash.attend, longest=kernels.longest, interpret=kernels.interpret)
    out, pull_back = jax.vjp(lambda q, k, v: _by_head(attend, q, k, v, first_n), *map(_quiet, qkv))
    return _marked(out, broken_n), (pull_back, broken_n, first_n)


def _in_blocks_backward(kernels: Kernels, saved: Jax, d_out: Jax) -> tuple[Jax, Jax, Jax, None]:
    del kernels
    pull_back, broken_n, first_n = saved
    broken_n = broken_n | _broken_sequences([d_out], first_n)
    d_q, d_k, d_v = (_marked(d, broken_n) for d in pull_back(_quiet(d_out)))
    return d_q, d_k, d_v, None


_in_blocks.defvjp(_in_blocks_forward, _in_blocks_backward)


def _broken_sequences(arrays: Jax, first_n: Jax) -> Jax:
    """Return for each tile whether its sequence holds something that is not finite."""
    n = first_n.shape[0]
    broken_n = jnp.any(jnp.stack([~(jnp.abs(x) < _HUGE).reshape(n, -1).all(axis=1) for x in arrays]), axis=0)
    return ((first_n[:, None] == first_n) & broken_n).any(axis=1)


def _quiet(x: Jax) -> Jax:
    return jnp.where(jnp.abs(x) < _HUGE, x, 0)


def _marked(x: Jax, broken_n: Jax) -> Jax:
    broken_T = jnp.repeat(broken_n, TILE, total_repeat_length=x.shape[0])
    return jnp.where(broken_T[:, None, None], jnp.nan, x).astype(x.dtype)


# Tiles ----------------------------------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attend(
    q: Jax, k: Jax, v: Jax, first_n: Jax, window: Jax | None, sinks: Jax | None, cap: float | None = None
) -> Jax:
    return _attend_forward(q, k, v, first_n, window, sinks, cap)[0]


def _attend_forward(
    q: Jax, k: Jax, v: Jax, first_n: Jax, window: Jax | None, sinks: Jax | None, cap: float | None
) -> tuple[Jax, Jax]:
    """Map q [n, N, g * c, d], k [n, N, c, d] and v [n, N, c, e] to float32 [n, N, g * c, e]."""
    n, _, rows, _ = q.shape
    k_padded, v_padded = _pad_front(k), _pad_front(v)

    def step(j: Jax, carry: tuple[Jax, Jax, Jax]) -> tuple[Jax, Jax, Jax]:
        high, total, out = carry
        same = _same_sequence(first_n, j)
        k_j, v_j = (jnp.where(same, _shifted(x, j, n), 0) for x in (k_padded, v_padded))
        scores = jnp.where(same & _seen(rows, j, window), _scores("nhqd,nhkd->nhqk", q, k_j, cap), -jnp.inf)
        new_high = jnp.maximum(high, scores.max(axis=-1))
        shrink = jnp.exp(high - new_high)
        p = jnp.exp(scores - new_high[..., None])
        total = total * shrink + p.sum(axis=-1)
        out = out * shrink[..., None] + _dot("nhqk,nhkd->nhqd", p.astype(q.dtype), v_j)
        return new_high, total, out

    start = (*_before_keys(q.shape[:3], sinks), jnp.zeros((*q.shape[:3], v.shape[-1]), jnp.float32))
    high, total, out = jax.lax.fori_loop(0, _in_window(_num_steps(first_n), window), step, start)
    out = out / total[..., None]
    return out, (q, k, v, first_n, window, out, high + jnp.log(total))


def _attend_backward(cap: float | None, saved: Jax, d_out: Jax) -> tuple[Jax, Jax, Jax, None, None, None]:
    q, k, v, first_n, window, out, lse = saved
    n, _, rows, d = q.shape
    dtype = q.dtype
    k_padded, v_padded = _pad_front(k), _pad_front(v)
    delta = (out * d_out).sum(axis=-1)
    d_out = d_out.astype(dtype)

    def step(j: Jax, carry: tuple[Jax, Jax, Jax]) -> tuple[Jax, Jax, Jax]:
        d_q, d_k, d_v = carry
        same = _same_sequence(first_n, j)
        k_j, v_j = (jnp.where(same, _shifted(x, j, n), 0) for x in (k_padded, v_padded))
        scores = _scores("nhqd,nhkd->nhqk", q, k_j, cap)
        p = jnp.exp(jnp.where(same & _seen(rows, j, window), scores, -jnp.inf) - lse[..., None])
        d_p = _dot("nhqd,nhkd->nhqk", d_out, v_j)
        d_s = (_below_cap(p * (d_p - delta[..., None]), scores, cap) * d**-0.5).astype(dtype)
        d_q = d_q + _dot("nhqk,nhkd->nhqd", d_s, k_j)
        d_k = _add_shifted(d_k, jnp.where(same, _dot("nhqk,nhqd->nhkd", d_s, q), 0), j, n)
        d_v = _add_shifted(d_v, jnp.where(same, _dot("nhqk,nhqd->nhkd", p.astype(dtype), d_out), 0), j, n)
        return d_q, d_k, d_v

    start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k_padded, v_padded))
    d_q, d_k, d_v = jax.lax.fori_loop(0, _in_window(_num_steps(first_n), window), step, start)
    return d_q.astype(dtype), d_k[n:].astype(dtype), d_v[n:].astype(dtype), None, None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _before_keys(shape: tuple[int, ...], sinks: Jax | None) -> tuple[Jax, Jax]:
    """Return the highest score and the sum of softmax of rows that have seen no key, but perhaps a sink [N, g * c].

    Without one, a finite floor instead of -inf: exp(floor - floor) is 1 and exp(-inf - floor) is 0, never NaN.
    """
    if sinks is None:
        return jnp.full(shape, -1e30, jnp.float32), jnp.zeros(shape, jnp.float32)
    return jnp.broadcast_to(sinks, shape), jnp.ones(shape, jnp.float32)


def _num_steps(first_n: Jax) -> Jax:
    return jnp.max(jnp.arange(first_n.shape[0], dtype=jnp.int32) - first_n) + 1


def _same_sequence(first_n: Jax, j: Jax) -> Jax:
    tiles = jnp.arange(first_n.shape[0], dtype=jnp.int32)
    return (tiles - j >= first_n)[:, None, None, None]


def _scores(form: str, q: Jax, k: Jax, cap: float | None) -> Jax:
    return capped(_dot(form, q, k) * q.shape[-1] ** -0.5, cap)


def _below_cap(d_scores: Jax, scores: Jax, cap: float | None) -> Jax:
    """Differentiate by the scores before the cap."""
    return d_scores if cap is None else d_scores * (1 - jnp.square(scores / cap))


def _seen(rows: int, j: Jax, window: Jax | None) -> Jax:
    """Return which keys [c], j tiles before its own, each row of a query tile sees."""
    query, key = np.arange(rows)[:, None] % TILE, np.arange(TILE)[None, :]
    seen = jnp.asarray(query >= key) | (j > 0)
    return seen if window is None else seen & (jnp.asarray(query - key) + j * TILE < window)


def _in_window(num_tiles: Jax, window: Jax | None) -> Jax:
    """Return how many of the tiles up to its own a query tile has to look at."""
    return num_tiles if window is None else jnp.minimum(num_tiles, (window + TILE - 2) // TILE + 1)


def _pad_front(x: Jax) -> Jax:
    return jnp.concatenate([jnp.zeros_like(x), x])


def _shifted(padded: Jax, j: Jax, n: int) -> Jax:
    return jax.lax.dynamic_slice_in_dim(padded, n - j, n)


def _add_shifted(sums: Jax, values: Jax, j: Jax, n: int) -> Jax:
    return jax.lax.dynamic_update_slice_in_dim(sums, _shifted(sums, j, n) + values, n - j, 0)


def _dot(form: str, a: Jax, b: Jax) -> Jax:
    return jnp.einsum(form, a, b, preferred_element_type=jnp.float32)


# Tiles, one after the other: for CPUs ---------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attend_by_tile(
    q: Jax, k: Jax, v: Jax, first_n: Jax, window: Jax | None, sinks: Jax | None, cap: float | None = None
) -> Jax:
    """Do as `_attend`, in shapes that do not depend on the length of the stream.

    XLA:CPU compiles a reduction over a batch differently once the batch exceeds some size, and then rounds differently,
    so that a sequence's bits would depend on its neighbours. A loop over tiles keeps every shape inside it constant,
    and visits only the key tiles that a query tile can see. It has at least two rounds, because the smallest stream has
    two tiles; XLA would unroll a loop of one.
    """
    return _by_tile_forward(q, k, v, first_n, window, sinks, cap)[0]


def _by_tile_forward(
    q: Jax, k: Jax, v: Jax, first_n: Jax, window: Jax | None, sinks: Jax | None, cap: float | None
) -> tuple[Jax, Jax]:
    def one_tile(query: tuple[Jax, Jax, Jax]) -> tuple[Jax, Jax]:
        q_i, i, first = query

        def step(j: Jax, carry: tuple[Jax, Jax, Jax]) -> tuple[Jax, Jax, Jax]:
            high, total, out = carry
            scores = jnp.where(_seen(q_i.shape[1], j, window), _scores("hqd,hkd->hqk", q_i, k[i - j], cap), -jnp.inf)
            new_high = jnp.maximum(high, scores.max(axis=-1))
            shrink = jnp.exp(high - new_high)
            p = jnp.exp(scores - new_high[..., None])
            total = total * shrink + p.sum(axis=-1)
            out = out * shrink[..., None] + _dot("hqk,hkd->hqd", p.astype(q_i.dtype), v[i - j])
            return new_high, total, out

        start = (*_before_keys(q_i.shape[:2], sinks), jnp.zeros((*q_i.shape[:2], v.shape[-1]), jnp.float32))
        high, total, out = jax.lax.fori_loop(0, _in_window(i - first + 1, window), step, start)
        return out / total[..., None], high + jnp.log(total)

    tiles = jnp.arange(q.shape[0], dtype=jnp.int32)
    out, lse = kept(jax.lax.map(one_tile, (q, tiles, first_n)))
    return out, (q, k, v, first_n, window, out, lse)


def _by_tile_backward(cap: float | None, saved: Jax, d_out: Jax) -> tuple[Jax, Jax, Jax, None, None, None]:
    q, k, v, first_n, window, out, lse = saved
    dtype, scale = q.dtype, q.shape[-1] ** -0.5

    def one_tile(sums: tuple[Jax, Jax], query: tuple[Jax, ...]) -> tuple[tuple[Jax, Jax], Jax]:
        q_i, out_i, lse_i, d_out_i, i, first = query
        delta = (out_i * d_out_i).sum(axis=-1)
        d_out_i = d_out_i.astype(dtype)

        def step(j: Jax, carry: tuple[Jax, Jax, Jax]) -> tuple[Jax, Jax, Jax]:
            d_q, d_k, d_v = carry
            scores = _scores("hqd,hkd->hqk", q_i, k[i - j], cap)
            p = jnp.exp(jnp.where(_seen(q_i.shape[1], j, window), scores, -jnp.inf) - lse_i[..., None])
            d_p = _dot("hqd,hkd->hqk", d_out_i, v[i - j])
            d_s = (_below_cap(p * (d_p - delta[..., None]), scores, cap) * scale).astype(dtype)
            d_q = d_q + _dot("hqk,hkd->hqd", d_s, k[i - j])
            d_k = _add_to(d_k, i - j, _dot("hqk,hqd->hkd", d_s, q_i))
            d_v = _add_to(d_v, i - j, _dot("hqk,hqd->hkd", p.astype(dtype), d_out_i))
            return d_q, d_k, d_v

        d_q, d_k, d_v = jax.lax.fori_loop(
            0, _in_window(i - first + 1, window), step, (jnp.zeros(q_i.shape, jnp.float32), *sums)
        )
        return (d_k, d_v), d_q

    tiles = jnp.arange(q.shape[0], dtype=jnp.int32)
    zeros = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    (d_k, d_v), d_q = jax.lax.scan(one_tile, zeros, (q, out, lse, d_out, tiles, first_n))
    return d_q.astype(dtype), d_k.astype(dtype), d_v.astype(dtype), None, None, None


_attend_by_tile.defvjp(_by_tile_forward, _by_tile_backward)


def _add_to(sums: Jax, i: Jax, value: Jax) -> Jax:
    return jax.lax.dynamic_update_index_in_dim(sums, sums[i] + value, i, 0)
