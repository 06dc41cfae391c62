"""Causal attention over a packed stream, one query tile at a time: the variant for CPUs.

Computes the same sums as attention.py, in shapes that do not depend on the length of the stream. XLA:CPU compiles a
reduction over a batch differently once the batch exceeds some size, and then rounds differently, so that a sequence's
bits would depend on its neighbours. A loop over tiles keeps every shape inside it constant, and visits only the key
tiles that a query tile can see. It has at least two rounds, because the smallest stream has two tiles; XLA would unroll
a loop of one.

Legend: n = tiles, c = TILE, N = kv heads, g = query heads per kv head, d = head_dim.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tinsmith_jax.layers import TILE, kept

# Any below: jax arrays.


@jax.custom_vjp
def attend(q: Any, k: Any, v: Any, first_n: Any) -> Any:
    """Map q [n, N, g * c, d] and k, v [n, N, c, d] to float32 [n, N, g * c, d]."""
    return _forward(q, k, v, first_n)[0]


def _forward(q: Any, k: Any, v: Any, first_n: Any) -> tuple[Any, Any]:
    def one_tile(query: tuple[Any, Any, Any]) -> tuple[Any, Any]:
        q_i, i, first = query

        def step(j: Any, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            high, total, out = carry
            scores = _scores(q_i, k[i - j], j)
            new_high = jnp.maximum(high, scores.max(axis=-1))
            shrink = jnp.exp(high - new_high)
            p = jnp.exp(scores - new_high[..., None])
            total = total * shrink + p.sum(axis=-1)
            out = out * shrink[..., None] + _dot("hqk,hkd->hqd", p.astype(q_i.dtype), v[i - j])
            return new_high, total, out

        floor = jnp.full(q_i.shape[:2], -1e30, jnp.float32)
        start = (floor, jnp.zeros(q_i.shape[:2], jnp.float32), jnp.zeros(q_i.shape, jnp.float32))
        high, total, out = jax.lax.fori_loop(0, i - first + 1, step, start)
        return out / total[..., None], high + jnp.log(total)

    tiles = jnp.arange(q.shape[0], dtype=jnp.int32)
    out, lse = kept(jax.lax.map(one_tile, (q, tiles, first_n)))
    return out, (q, k, v, first_n, out, lse)


def _backward(saved: Any, d_out: Any) -> tuple[Any, Any, Any, None]:
    q, k, v, first_n, out, lse = saved
    dtype, scale = q.dtype, q.shape[-1] ** -0.5

    def one_tile(sums: tuple[Any, Any], query: tuple[Any, ...]) -> tuple[tuple[Any, Any], Any]:
        q_i, out_i, lse_i, d_out_i, i, first = query
        delta = (out_i * d_out_i).sum(axis=-1)
        d_out_i = d_out_i.astype(dtype)

        def step(j: Any, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            d_q, d_k, d_v = carry
            p = jnp.exp(_scores(q_i, k[i - j], j) - lse_i[..., None])
            d_p = _dot("hqd,hkd->hqk", d_out_i, v[i - j])
            d_s = (p * (d_p - delta[..., None]) * scale).astype(dtype)
            d_q = d_q + _dot("hqk,hkd->hqd", d_s, k[i - j])
            d_k = _add(d_k, i - j, _dot("hqk,hqd->hkd", d_s, q_i))
            d_v = _add(d_v, i - j, _dot("hqk,hqd->hkd", p.astype(dtype), d_out_i))
            return d_q, d_k, d_v

        d_q, d_k, d_v = jax.lax.fori_loop(0, i - first + 1, step, (jnp.zeros(q_i.shape, jnp.float32), *sums))
        return (d_k, d_v), d_q

    tiles = jnp.arange(q.shape[0], dtype=jnp.int32)
    zeros = jnp.zeros(k.shape, jnp.float32)
    (d_k, d_v), d_q = jax.lax.scan(one_tile, (zeros, zeros), (q, out, lse, d_out, tiles, first_n))
    return d_q.astype(dtype), d_k.astype(dtype), d_v.astype(dtype), None


attend.defvjp(_forward, _backward)


def _scores(q_i: Any, k_j: Any, j: Any) -> Any:
    causal = jnp.asarray(np.arange(q_i.shape[1])[:, None] % TILE >= np.arange(TILE)[None, :])
    scores = _dot("hqd,hkd->hqk", q_i, k_j) * q_i.shape[-1] ** -0.5
    return jnp.where(causal | (j > 0), scores, -jnp.inf)


def _add(sums: Any, i: Any, value: Any) -> Any:
    return jax.lax.dynamic_update_index_in_dim(sums, sums[i] + value, i, 0)


def _dot(form: str, a: Any, b: Any) -> Any:
    return jnp.einsum(form, a, b, preferred_element_type=jnp.float32)
