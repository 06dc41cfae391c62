"""The adapters that lie beside the sampler's model, and their products with tiles of tokens.

Each adapter in use has a row, whichever sequences use it. Its scale is in B already, except for the kernels in C++.
The contents of a row without an adapter are undefined, and may be NaN, so the products of others with it are dropped,
not multiplied by 0.

Suffixes: N = tiles, T = tokens of a tile, R = rows of adapters; i, r, o = in, rank, out of a LoRA.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tinsmith_jax.jax_types import Jax
from tinsmith_jax.kernels import row_products
from tinsmith_jax.kernels.row_products import RowAdapters
from tinsmith_jax.mesh import Axes
from tinsmith_jax.sampling_values import BASE_MODEL

Pair = tuple[jax.Array, jax.Array]
"""An adapter's A and B."""


class AdapterRows(NamedTuple):
    """The resident adapters, and the row that each tile uses, or BASE_MODEL.

    With `used_N`, the rows in use, each once, products go adapter by adapter: each reads one adapter and computes all
    tiles, in one shape. With `tokens`, the adapters of all tiles' tokens, kernels for GPUs do it. Otherwise each tile
    reads its own.
    """

    resident: Jax
    row_N: jax.Array
    used_N: jax.Array | None = None
    num_used: jax.Array | None = None
    tokens: RowAdapters | None = None
    interpret: bool = False  # the kernels for GPUs

    @classmethod
    def of_tiles(cls, resident: Jax, row_N: jax.Array, num_tokens: int, axes: Axes) -> "AdapterRows":
        """Make the program for tiles of this many tokens."""
        tokens = RowAdapters.of(jnp.repeat(row_N, num_tokens)) if axes.kernels.triton else None
        return cls(resident, row_N, tokens=tokens, interpret=axes.kernels.interpret)

    @classmethod
    def of_rows(cls, resident: Jax, row_B: jax.Array, axes: Axes) -> "AdapterRows":
        """Make the one for a decoding step, in which each tile is a token."""
        if not axes.kernels.equal_blocks:
            return cls.of_tiles(resident, row_B, 1, axes)
        first_B = jnp.argmax(row_B[:, None] == row_B, axis=1) == jnp.arange(row_B.shape[0])
        own_B = first_B & (row_B != BASE_MODEL)
        return cls(resident, row_B, row_B[jnp.argsort(~own_B, stable=True)], jnp.sum(own_B))

    @property
    def adapted_N(self) -> jax.Array:
        return self.row_N != BASE_MODEL

    def delta(self, x_NTi: jax.Array, pair: Pair, layer: jax.Array | None = None) -> jax.Array:
        """Compute x A B, with 0 for tiles of the base model. If all tiles are, the adapters are not even read."""
        return self.deltas(x_NTi, (pair,), layer)[0]

    def deltas(self, x_NTi: jax.Array, pairs: Sequence[Pair], layer: jax.Array | None = None) -> tuple[jax.Array, ...]:
        """Do as `delta` for several modules that read the same input."""
        if self.tokens is not None:
            lows = self._in_place(x_NTi, [A for A, _ in pairs], layer)
            return tuple(self._in_place(low, [B], layer)[0] for low, (_, B) in zip(lows, pairs, strict=True))
        if self.used_N is None:
            return tuple(self.product(self.product(x_NTi, A, layer), B, layer) for A, B in pairs)

        def of(row: jax.Array) -> tuple[jax.Array, ...]:
            lows = [_dot(x_NTi, _factor(A, layer, row)) for A, _ in pairs]
            return tuple(_dot(low, _factor(B, layer, row)) for low, (_, B) in zip(lows, pairs, strict=True))

        return self._each_adapter(of, x_NTi, [B.shape[-1] for _, B in pairs])

    def product(self, x_NTi: jax.Array, factors: jax.Array, layer: jax.Array | None = None) -> jax.Array:
        """Multiply each tile with its own adapter's factor, of [R, i, o] or [L, R, i, o]: [N, T, o]."""
        if self.tokens is not None:
            return self._in_place(x_NTi, [factors], layer)[0]
        if self.used_N is None:
            return self._by_tile(x_NTi, factors, layer)

        def of(row: jax.Array) -> tuple[jax.Array, ...]:
            return (_dot(x_NTi, _factor(factors, layer, row)),)

        return self._each_adapter(of, x_NTi, [factors.shape[-1]])[0]

    def apply(
        self, compute: Callable[..., jax.Array], x_NTi: jax.Array, pair: Pair, layer: jax.Array, size_out: int
    ) -> jax.Array:
        """Compute of each tile with its own adapter's A and B: [N, T, size_out], with 0 for tiles of the base model.

        `compute` takes tokens [T, i] of one tile, or [N, T, i] of all, and the two factors.
        """
        A_LRir, B_LRro = pair
        if self.used_N is not None:

            def of(row: jax.Array) -> tuple[jax.Array, ...]:
                return (compute(x_NTi, _factor(A_LRir, layer, row), _factor(B_LRro, layer, row)),)

            return self._each_adapter(of, x_NTi, [size_out])[0]

        def of_tiles() -> jax.Array:
            factors = (lax.dynamic_index_in_dim(each, layer, keepdims=False) for each in pair)
            out_NTo = jax.vmap(compute)(x_NTi, *(each[jnp.maximum(self.row_N, 0)] for each in factors))
            return jnp.where(self.adapted_N[:, None, None], out_NTo, 0)

        nothing = jnp.zeros((*x_NTi.shape[:2], size_out), x_NTi.dtype)
        out: jax.Array = lax.cond(jnp.any(self.adapted_N), of_tiles, lambda: nothing)
        return out

    def _each_adapter(
        self, compute: Callable[[jax.Array], tuple[jax.Array, ...]], x_NTi: jax.Array, sizes_out: Sequence[int]
    ) -> tuple[jax.Array, ...]:
        """Compute all tiles with one adapter after the other, and keep each tile's own results: [N, T, o] of each."""
        assert self.used_N is not None, "the rows in use are listed"
        used_N, (N, T, _) = self.used_N, x_NTi.shape

        def one(n: jax.Array, kept: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            row = used_N[n]
            own_N11 = (self.row_N == row)[:, None, None]
            return tuple(jnp.where(own_N11, new, old) for new, old in zip(compute(row), kept, strict=True))

        nothing = tuple(jnp.zeros((N, T, size), x_NTi.dtype) for size in sizes_out)
        out: tuple[jax.Array, ...] = lax.fori_loop(0, self.num_used, one, nothing)
        return out

    def _in_place(
        self, x_NTi: jax.Array, factors: Sequence[jax.Array], layer: jax.Array | None
    ) -> tuple[jax.Array, ...]:
        """Do as `product` with factors of one shape."""
        assert self.tokens is not None, "the tokens' adapters are listed"
        N, T, size = x_NTi.shape
        stacked, index = (factors, layer) if layer is not None else ([each[None] for each in factors], jnp.int32(0))
        products = row_products.adapted(
            x_NTi.reshape(N * T, size), stacked, index, self.tokens, interpret=self.interpret
        )
        return tuple(each.reshape(N, T, -1) for each in products)

    def _by_tile(self, x_NTi: jax.Array, factors: jax.Array, layer: jax.Array | None) -> jax.Array:
        def product() -> jax.Array:
            of_layer = factors if layer is None else lax.dynamic_index_in_dim(factors, layer, keepdims=False)
            factor_Nio = of_layer[jnp.maximum(self.row_N, 0)]
            out_NTo = jnp.einsum("nti,nio->nto", x_NTi, factor_Nio, preferred_element_type=jnp.float32)
            return jnp.where(self.adapted_N[:, None, None], out_NTo, 0).astype(x_NTi.dtype)

        shape = (*x_NTi.shape[:2], factors.shape[-1])
        out: jax.Array = lax.cond(jnp.any(self.adapted_N), product, lambda: jnp.zeros(shape, x_NTi.dtype))
        return out


def _factor(factors: jax.Array, layer: jax.Array | None, row: jax.Array) -> jax.Array:
    """Return one adapter's factor [i, o] out of [R, i, o] or [L, R, i, o]."""
    stacked = factors[None] if layer is None else factors
    index = jnp.int32(0) if layer is None else layer
    factor_io: jax.Array = lax.dynamic_slice(stacked, (index, row, 0, 0), (1, 1, *stacked.shape[2:]))[0, 0]
    return factor_io


def _dot(x_NTi: jax.Array, factor_io: jax.Array) -> jax.Array:
    """Multiply all tokens, whatever their tiles: [N, T, o]."""
    N, T, _ = x_NTi.shape
    product = jnp.dot(x_NTi.reshape(N * T, -1), factor_io, preferred_element_type=jnp.float32)
    return product.reshape(N, T, -1).astype(x_NTi.dtype)
