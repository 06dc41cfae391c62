"""Products of tiles of rows with the matrices of their adapters: Pallas kernels for Triton, for GPUs.

A program handles one tile, and reads its adapter's matrix in place: nothing is gathered, and the arithmetic is that of
one adapter, however many there are. For gradients, tiles are sorted by adapter; a program adds up the products of one
adapter's tiles in their order. No adapter's results depend on others' values, be they NaN.

The methods are the functions of tile_products.py, which documents them.

Legend: n = tiles, t = rows of a tile, k = adapters; X and Y = the two other sizes of a product.
"""

from functools import partial
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tinsmith_jax.jax_types import Jax
from tinsmith_jax.kernels.triton import compiler

_LEAST: Final = 16  # rows and columns of a product on tensor cores
_MOST: Final = 64


class GroupedProducts(NamedTuple):
    interpret: bool = False

    def down(self, x_ntI: Jax, A_kIr: Jax, which_n: Jax) -> Jax:
        return self._each_tile(x_ntI, A_kIr, which_n)

    def up(self, z_ntr: Jax, B_krO: Jax, which_n: Jax) -> Jax:
        return self._each_tile(z_ntr, B_krO, which_n)

    def up_backward(self, d_ntO: Jax, B_krO: Jax, which_n: Jax) -> Jax:
        return self._each_tile(d_ntO, B_krO, which_n, transposed=True)

    def down_backward(self, d_ntr: Jax, A_kIr: Jax, which_n: Jax) -> Jax:
        return self._each_tile(d_ntr, A_kIr, which_n, transposed=True)

    def outer_A(self, x_ntI: Jax, d_ntr: Jax, which_n: Jax, num_adapters: int) -> Jax:
        return self._each_adapter(x_ntI, d_ntr, which_n, num_adapters)

    def outer_B(self, z_ntr: Jax, d_ntO: Jax, which_n: Jax, num_adapters: int) -> Jax:
        return self._each_adapter(z_ntr, d_ntO, which_n, num_adapters)

    def add(self, sums_kXY: Jax, outer_kXY: Jax, which_n: Jax) -> Jax:
        del which_n
        return sums_kXY + outer_kXY

    def _each_tile(self, x_ntX: Jax, matrix_kXY: Jax, which_n: Jax, *, transposed: bool = False) -> Jax:
        """Multiply each tile with the matrix of its adapter, or with its transpose: [n, t, Y] in float32."""
        num_columns = matrix_kXY.shape[1 if transposed else 2]
        x, matrix = _padded(x_ntX, 2), _padded(matrix_kXY, 1, 2)
        n, t, X = x.shape
        k, *sizes = matrix.shape
        Y = sizes[0] if transposed else sizes[1]
        width = _block(Y)
        of_matrix = (
            pl.BlockSpec((k, width, X), lambda _, y: (0, y, 0))
            if transposed
            else pl.BlockSpec((k, X, width), lambda _, y: (0, 0, y))
        )
        out = pl.pallas_call(
            partial(_tile_kernel, transposed=transposed),
            grid=(n, Y // width),
            in_specs=[
                pl.BlockSpec((n,), lambda *_: (0,)),
                pl.BlockSpec((None, t, X), lambda tile, _: (tile, 0, 0)),
                of_matrix,
            ],
            out_specs=pl.BlockSpec((None, t, width), lambda tile, y: (tile, 0, y)),
            out_shape=jax.ShapeDtypeStruct((n, t, Y), jnp.float32),
            **compiler(4, 2, self.interpret),
        )(which_n, x, matrix)
        return out[:, :, :num_columns]

    def _each_adapter(self, x_ntX: Jax, y_ntY: Jax, which_n: Jax, num_adapters: int) -> Jax:
        """Add up x.T @ y of each adapter's tiles: [k, X, Y] in float32."""
        order_n = jnp.argsort(which_n, stable=True).astype(jnp.int32)
        bounds = jnp.searchsorted(which_n[order_n], jnp.arange(num_adapters + 1)).astype(jnp.int32)
        x, y = _padded(x_ntX, 2), _padded(y_ntY, 2)
        n, t, X = x.shape
        Y = y.shape[2]
        height, width = _block(X), _block(Y)
        out = pl.pallas_call(
            _adapter_kernel,
            grid=(num_adapters, X // height, Y // width),
            in_specs=[
                pl.BlockSpec((n,), lambda *_: (0,)),
                pl.BlockSpec((num_adapters + 1,), lambda *_: (0,)),
                pl.BlockSpec((n, t, height), lambda _, i, __: (0, 0, i)),
                pl.BlockSpec((n, t, width), lambda _, __, j: (0, 0, j)),
            ],
            out_specs=pl.BlockSpec((None, height, width), lambda adapter, i, j: (adapter, i, j)),
            out_shape=jax.ShapeDtypeStruct((num_adapters, X, Y), jnp.float32),
            **compiler(4, 2, self.interpret),
        )(order_n, bounds, x, y)
        return out[:, : x_ntX.shape[2], : y_ntY.shape[2]]


def _tile_kernel(which_ref: Jax, x_ref: Jax, matrix_ref: Jax, out_ref: Jax, *, transposed: bool) -> None:
    adapter, depth = which_ref[pl.program_id(0)], _block(x_ref.shape[1])

    def step(i: Jax, total: Jax) -> Jax:
        part = pl.ds(i * depth, depth)
        matrix = matrix_ref[adapter, :, part].T if transposed else matrix_ref[adapter, part, :]
        return total + _dot(x_ref[:, part], matrix)

    out_ref[...] = jax.lax.fori_loop(0, x_ref.shape[1] // depth, step, jnp.zeros(out_ref.shape, jnp.float32))


def _adapter_kernel(order_ref: Jax, bounds_ref: Jax, x_ref: Jax, y_ref: Jax, out_ref: Jax) -> None:
    adapter = pl.program_id(0)

    def step(number: Jax, total: Jax) -> Jax:
        tile = order_ref[number]
        return total + _dot(x_ref[tile].T, y_ref[tile])

    first, end = bounds_ref[adapter], bounds_ref[adapter + 1]
    out_ref[...] = jax.lax.fori_loop(first, end, step, jnp.zeros(out_ref.shape, jnp.float32))


def _dot(a: Jax, b: Jax) -> Jax:
    dtype = jnp.promote_types(a.dtype, b.dtype)
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None  # else TF32
    return jax.lax.dot(a.astype(dtype), b.astype(dtype), precision=precision, preferred_element_type=jnp.float32)


def _block(size: int) -> int:
    """Return the largest power of two up to _MOST that divides a padded size."""
    return min(size & -size, _MOST)


def _padded(x: Jax, *axes: int) -> Jax:
    """Add zeros until these axes are multiples of what tensor cores multiply."""
    return jnp.pad(x, [(0, -size % _LEAST if axis in axes else 0) for axis, size in enumerate(x.shape)])
