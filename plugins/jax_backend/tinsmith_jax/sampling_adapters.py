"""The adapters that lie beside the sampler's model, and their products with tiles of tokens.

Each adapter in use has a row, whichever sequences use it. Its scale is in B already. What a row without an adapter
holds may be anything, even NaN, so the products of others with it are dropped, not multiplied by 0.

Suffixes: N = tiles, T = tokens of a tile, R = rows of adapters; i, r, o = in, rank, out of a LoRA.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tinsmith_jax.mesh import Axes

BASE_MODEL = -1
"""In the place of an adapter's row."""

# Any: nested dictionaries of arrays (described in adapters.py).
Tree = Any


class AdapterRows(NamedTuple):
    """The resident adapters, and the row that each tile uses, or BASE_MODEL.

    With `used_N`, the rows in use, each once, products go adapter by adapter: each reads one adapter and computes all
    tiles, in one shape. Otherwise each tile reads its own.
    """

    resident: Tree
    row_N: jax.Array
    used_N: jax.Array | None = None
    num_used: jax.Array | None = None

    @classmethod
    def of_tiles(cls, resident: Tree, row_N: jax.Array) -> "AdapterRows":
        return cls(resident, row_N)

    @classmethod
    def of_rows(cls, resident: Tree, row_B: jax.Array, axes: Axes) -> "AdapterRows":
        """Make the one for a decoding step, in which each tile is a token."""
        if not axes.kernels.equal_blocks:
            return cls(resident, row_B)
        first_B = jnp.argmax(row_B[:, None] == row_B, axis=1) == jnp.arange(row_B.shape[0])
        own_B = first_B & (row_B != BASE_MODEL)
        return cls(resident, row_B, row_B[jnp.argsort(~own_B, stable=True)], jnp.sum(own_B))

    @property
    def adapted_N(self) -> jax.Array:
        return self.row_N != BASE_MODEL

    def delta(self, x_NTi: jax.Array, pair: tuple[jax.Array, jax.Array], layer: jax.Array | None = None) -> jax.Array:
        """Compute x A B, with 0 for tiles of the base model. If all tiles are, the adapters are not even read."""
        low_NTr = self.product(x_NTi, pair[0], layer)
        return self.product(low_NTr, pair[1], layer)

    def product(self, x_NTi: jax.Array, factors: jax.Array, layer: jax.Array | None = None) -> jax.Array:
        """Multiply each tile with its own adapter's factor, of [R, i, o] or [L, R, i, o]: [N, T, o]."""
        stacked = factors[None] if layer is None else factors
        place = jnp.int32(0) if layer is None else layer
        if self.used_N is not None:
            return self._by_adapter(x_NTi, stacked, place)
        return self._by_tile(x_NTi, stacked, place)

    def _by_adapter(self, x_NTi: jax.Array, factors: jax.Array, layer: jax.Array) -> jax.Array:
        assert self.used_N is not None, "the rows in use are listed"
        used_N, (N, T, _), size_out = self.used_N, x_NTi.shape, factors.shape[-1]

        def one(n: jax.Array, out_NTo: jax.Array) -> jax.Array:
            row = used_N[n]
            factor_io = lax.dynamic_slice(factors, (layer, row, 0, 0), (1, 1, *factors.shape[2:]))[0, 0]
            product = jnp.dot(x_NTi.reshape(N * T, -1), factor_io, preferred_element_type=jnp.float32)
            own_N11 = (self.row_N == row)[:, None, None]
            return jnp.where(own_N11, product.reshape(N, T, size_out).astype(x_NTi.dtype), out_NTo)

        out: jax.Array = lax.fori_loop(0, self.num_used, one, jnp.zeros((N, T, size_out), x_NTi.dtype))
        return out

    def _by_tile(self, x_NTi: jax.Array, factors: jax.Array, layer: jax.Array) -> jax.Array:
        def product() -> jax.Array:
            factor_Nio = lax.dynamic_index_in_dim(factors, layer, keepdims=False)[jnp.maximum(self.row_N, 0)]
            out_NTo = jnp.einsum("nti,nio->nto", x_NTi, factor_Nio, preferred_element_type=jnp.float32)
            return jnp.where(self.adapted_N[:, None, None], out_NTo, 0).astype(x_NTi.dtype)

        shape = (*x_NTi.shape[:2], factors.shape[-1])
        out: jax.Array = lax.cond(jnp.any(self.adapted_N), product, lambda: jnp.zeros(shape, x_NTi.dtype))
        return out
