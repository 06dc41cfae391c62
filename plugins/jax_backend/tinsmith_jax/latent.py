"""Attention whose keys and values come from latents (multi-head latent attention, arXiv 2405.04434).

A token has a latent c and a rotated key, which all heads share. A head's key is U c with the rotated key behind it, and
its value is V c. Training computes both. Sampling keeps c and the rotated key alone: q U c is the score of the latent
for the query q U, and sums of values are V times sums of latents.

Legend: h = heads, p = plain and e = rotated numbers of a key, v = numbers of a value, c = numbers of a latent, r = rank
of an adapter.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from tinsmith_jax.jax_types import Jax
from tinsmith_jax.layers import rms_norm, rope, scaled
from tinsmith_jax.model_config import Latent, ModelConfig
from tinsmith_jax.sampling_adapters import AdapterRows

_EPS = 1e-6  # of the norms of latents, whatever config.json says of the others


def of(config: ModelConfig) -> Latent:
    assert config.attention.latent is not None, "the layer has weights of it"
    return config.attention.latent


def inputs(config: ModelConfig) -> tuple[str, str]:
    """Return the modules of adapters that read the input of a layer."""
    return ("q_a" if of(config).query_rank else "q"), "kv_a"


def norm(x: Jax, weight: Jax) -> Jax:
    return rms_norm(x, weight, _EPS)


def split(product: Jax, deltas: tuple[Jax, ...], config: ModelConfig) -> tuple[Jax, Jax, Jax]:
    """Split the fused projection and add the LoRA parts: what queries come from, the latent, the part to rotate."""
    latent, (d_query, d_key) = of(config), deltas
    query, key = jnp.split(product, (product.shape[-1] - latent.cached_dim,), axis=-1)
    c, rotated = jnp.split(key + d_key, (latent.rank,), axis=-1)
    return query + d_query, c, rotated


def queries(q: Jax, angles: tuple[Jax, Jax], config: ModelConfig) -> tuple[Jax, Jax]:
    """Return [..., h, p] and, rotated, [..., h, e]."""
    latent = of(config)
    plain, rotated = jnp.split(q.reshape(*q.shape[:-1], -1, latent.key_dim), (latent.plain_dim,), axis=-1)
    return plain, rotate(rotated, angles, latent)


def rotate(x_he: Jax, angles: tuple[Jax, Jax], latent: Latent) -> Jax:
    """Rotate [..., h, e]. The result has the two numbers of a pair in its two halves."""
    in_halves = jnp.concatenate([x_he[..., ::2], x_he[..., 1::2]], axis=-1) if latent.alternate else x_he
    return rope(in_halves, *angles)


def heads(q: Jax, kv: Jax, rotated: Jax, angles: tuple[Jax, Jax], config: ModelConfig) -> tuple[Jax, Jax, Jax]:
    """Return scaled queries, keys and values [..., h, p + e], [..., h, p + e] and [..., h, v]."""
    latent = of(config)
    plain, value = jnp.split(kv.reshape(*kv.shape[:-1], config.num_heads, -1), (latent.plain_dim,), axis=-1)
    shared = rotate(rotated[..., None, :], angles, latent)
    key = jnp.concatenate([plain, jnp.broadcast_to(shared, (*plain.shape[:-1], latent.rotated_dim))], axis=-1)
    return scaled(jnp.concatenate(queries(q, angles, config), axis=-1), config), key, value


# In sampling ----------------------------------------------------------------------------------------------------------


def keys(c: Jax, rotated: Jax, angles: tuple[Jax, Jax], config: ModelConfig) -> Jax:
    """Return what is kept of tokens, as of one head: [..., 1, c + e]."""
    return jnp.concatenate([c[..., None, :], rotate(rotated[..., None, :], angles, of(config))], axis=-1)


class Products:
    """The products U and V of one layer, in which each tile has its adapter."""

    def __init__(
        self,
        weight_co: jax.Array,
        pair: tuple[jax.Array, jax.Array],
        layer: jax.Array,
        lora: AdapterRows,
        latent: Latent,
    ) -> None:
        """`weight_co` has U and V of each head, [c, h (p + v)]; so has the adapter."""
        self._of_heads_chx = weight_co.reshape(weight_co.shape[0], -1, latent.plain_dim + latent.value_dim)
        self._pair, self._layer, self._lora, self._latent = pair, layer, lora, latent

    def of_queries(self, q_NThp: jax.Array, rotated_NThe: jax.Array, config: ModelConfig) -> jax.Array:
        """Return scaled queries for the kept latents: [N, T, h, c + e]."""
        own_chp = self._of_heads_chx[..., : self._latent.plain_dim]

        def adapted(q_hp: jax.Array, A_cr: jax.Array, B_rhx: jax.Array) -> jax.Array:
            low = _dot("...hp,rhp->...hr", q_hp, B_rhx[..., : self._latent.plain_dim])
            return _dot("...hr,cr->...hc", low, A_cr)

        q_NThc = _dot("nthp,chp->nthc", q_NThp, own_chp) + self._delta(q_NThp, self._latent.rank, adapted)
        found: jax.Array = scaled(jnp.concatenate([q_NThc, rotated_NThe], axis=-1), config)
        return found

    def of_values(self, latents_NTo: jax.Array) -> jax.Array:
        """Return the values [N, T, h v] of sums of latents [N, T, h c]."""
        own_chv = self._of_heads_chx[..., self._latent.plain_dim :]
        x_NThc = latents_NTo.reshape(*latents_NTo.shape[:2], own_chv.shape[1], -1)

        def adapted(x_hc: jax.Array, A_cr: jax.Array, B_rhx: jax.Array) -> jax.Array:
            low = _dot("...hc,cr->...hr", x_hc, A_cr)
            return _dot("...hr,rhv->...hv", low, B_rhx[..., self._latent.plain_dim :])

        out_NThv = _dot("nthc,chv->nthv", x_NThc, own_chv) + self._delta(x_NThc, self._latent.value_dim, adapted)
        return out_NThv.reshape(*latents_NTo.shape[:2], -1)

    def _delta(self, x_NThi: jax.Array, size_out: int, adapted: Callable[..., jax.Array]) -> jax.Array:
        N, T, h, size_in = x_NThi.shape

        def compute(x_Ti: jax.Array, A_cr: jax.Array, B_ro: jax.Array) -> jax.Array:
            found: jax.Array = adapted(
                x_Ti.reshape(*x_Ti.shape[:-1], h, size_in), A_cr, B_ro.reshape(B_ro.shape[0], h, -1)
            )
            return found.reshape((*x_Ti.shape[:-1], h * size_out))

        out = self._lora.apply(compute, x_NThi.reshape(N, T, h * size_in), self._pair, self._layer, h * size_out)
        return out.reshape(N, T, h, size_out)


def _dot(form: str, a: jax.Array, b: jax.Array) -> jax.Array:
    product: jax.Array = jnp.einsum(form, a, b, preferred_element_type=jnp.float32)
    return product.astype(a.dtype)
