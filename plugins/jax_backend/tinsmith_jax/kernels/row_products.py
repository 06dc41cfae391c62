"""Products of a few rows with matrices that lie among many, for sampling on GPUs: Pallas kernels for Triton.

Reading the matrices takes the time, so each is read once, where it is: XLA would copy a layer's weights before it
multiplies, and an adapter for each row that uses it. One program computes some columns of a block of rows, and adds up
a part of the depth; the parts are added in order. Both follow from shapes alone, and a row takes the results of its own
adapter only, so a row's bits depend on no other row, be it NaN.

Suffixes: R = rows, b = blocks of them, u = adapters of a block; L = layers, A = adapters; X, Y = inputs and outputs.
"""

from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from tinsmith_jax.jax_types import Jax
from tinsmith_jax.kernels.paged import dot, power_of_two, whole
from tinsmith_jax.kernels.triton import compiler

_LEAST: Final = 16  # rows and columns of a product on tensor cores
_ROWS: Final = 64
_DEPTH: Final = 64  # of a step
_PART: Final = 256  # depth of an adapter's part
_PROGRAMS: Final = 400  # that keep a GPU busy


class RowAdapters(NamedTuple):
    """Which adapter each row uses, and which ones are in a block of rows, each once."""

    which_R: Jax  # -1: none
    used_bu: Jax
    number_b: Jax

    @classmethod
    def of(cls, which_R: Jax) -> "RowAdapters":
        which_R = _padded(which_R.astype(jnp.int32), {0: _rows(len(which_R))}, -1)
        which_bu = which_R.reshape(-1, _rows(len(which_R)))
        index_u = jnp.arange(which_bu.shape[1])
        first_bu = jnp.argmax(which_bu[:, :, None] == which_bu[:, None, :], axis=2) == index_u
        own_bu = first_bu & (which_bu >= 0)
        order_bu = jnp.argsort(~own_bu, axis=1, stable=True)
        number_b = own_bu.sum(axis=1).astype(jnp.int32)
        return cls(which_R, jnp.take_along_axis(which_bu, order_bu, axis=1), number_b)


def adapted(
    x_RX: Jax, factors_LAXY: Sequence[Jax], layer: Jax, rows: RowAdapters, *, interpret: bool
) -> tuple[Jax, ...]:
    """Multiply each row with its adapter's matrix of a layer, for matrices of one shape: [R, Y] of each, or 0."""
    (R, _), Y = x_RX.shape, factors_LAXY[0].shape[-1]
    if factors_LAXY[0].shape[2] % _LEAST or Y % _LEAST:
        # Pad one layer instead of all.
        own = [lax.dynamic_index_in_dim(factor, layer) for factor in factors_LAXY]
        factors_LAXY, layer = [_padded(factor, {2: _LEAST, 3: _LEAST}) for factor in own], jnp.int32(0)
    height = _rows(R)
    x = _padded(x_RX, {0: height, 1: _LEAST})
    (_, X), width = x.shape, _divisor(factors_LAXY[0].shape[-1], 2 * _DEPTH)
    part = _divisor(X, _PART)
    size = (X // part, len(x), factors_LAXY[0].shape[-1])
    parts = pl.pallas_call(
        partial(_adapted_kernel, depth=min(part, _DEPTH)),
        grid=(size[1] // height, size[2] // width, size[0]),
        in_specs=[
            *(whole(x) for x in (layer.reshape(1), rows.number_b, rows.used_bu)),
            pl.BlockSpec((height,), lambda b, y, p: (b,)),  # noqa: ARG005
            pl.BlockSpec((height, part), lambda b, y, p: (b, p)),  # noqa: ARG005
            *[pl.BlockSpec((*f.shape[:3], width), lambda b, y, p: (0, 0, 0, y)) for f in factors_LAXY],  # noqa: ARG005
        ],
        out_specs=[pl.BlockSpec((None, height, width), lambda b, y, p: (p, b, y)) for _ in factors_LAXY],
        out_shape=[jax.ShapeDtypeStruct(size, jnp.float32) for _ in factors_LAXY],
        **compiler(4, 2, interpret),
    )(layer.reshape(1), rows.number_b, rows.used_bu, rows.which_R, x, *factors_LAXY)
    return tuple(each.sum(axis=0)[:R, :Y].astype(x_RX.dtype) for each in parts)


def even(weight_LXY: Jax) -> bool:
    """Return whether both sizes of a matrix are multiples of what tensor cores multiply."""
    return not any(size % _LEAST for size in weight_LXY.shape[1:])


def dense(x_RX: Jax, weight_LXY: Jax, layer: Jax, *, interpret: bool) -> Jax:
    """Multiply all rows with a layer's matrix, which is `even`: [R, Y]."""
    R, X = x_RX.shape
    Y = weight_LXY.shape[-1]
    height, width, depth = _rows(R), _divisor(Y, _DEPTH), _divisor(X, _DEPTH)
    x = _padded(x_RX, {0: height})
    most = max(1, _PROGRAMS * width // Y)
    number = _divisor(X // depth, 1 << (most.bit_length() - 1))
    parts = pl.pallas_call(
        partial(_dense_kernel, depth=depth),
        grid=(len(x) // height, Y // width, number),
        in_specs=[
            whole(layer.reshape(1)),
            pl.BlockSpec((height, X // number), lambda b, y, p: (b, p)),  # noqa: ARG005
            pl.BlockSpec((weight_LXY.shape[0], X // number, width), lambda b, y, p: (0, p, y)),  # noqa: ARG005
        ],
        out_specs=pl.BlockSpec((None, height, width), lambda b, y, p: (p, b, y)),
        out_shape=jax.ShapeDtypeStruct((number, len(x), Y), jnp.float32),
        **compiler(4, 4, interpret),
    )(layer.reshape(1), x, weight_LXY)
    return parts.sum(axis=0)[:R].astype(x_RX.dtype)


def _adapted_kernel(
    layer_ref: Jax, number_ref: Jax, used_ref: Jax, which_ref: Jax, x_ref: Jax, *refs: Jax, depth: int
) -> None:
    block, part = pl.program_id(0), pl.program_id(2)
    layer, which = layer_ref[0], which_ref[...]
    factors, outs = refs[: len(refs) // 2], refs[len(refs) // 2 :]
    empty = tuple(jnp.zeros(out.shape, jnp.float32) for out in outs)
    size = x_ref.shape[1]

    def one(u: Jax, kept: tuple[Jax, ...]) -> tuple[Jax, ...]:
        adapter = used_ref[block, u]

        def step(i: Jax, totals: tuple[Jax, ...]) -> tuple[Jax, ...]:
            x, at = x_ref[:, pl.ds(i * depth, depth)], pl.ds(part * size + i * depth, depth)
            return tuple(
                total + dot(x, factor[layer, adapter, at, :]) for total, factor in zip(totals, factors, strict=True)
            )

        totals = lax.fori_loop(0, size // depth, step, empty)
        own = (which == adapter)[:, None]
        return tuple(jnp.where(own, new, old) for new, old in zip(totals, kept, strict=True))

    for out, found in zip(outs, lax.fori_loop(0, number_ref[block], one, empty), strict=True):
        out[...] = found


def _dense_kernel(layer_ref: Jax, x_ref: Jax, weight_ref: Jax, out_ref: Jax, *, depth: int) -> None:
    layer = layer_ref[0]

    def step(i: Jax, total: Jax) -> Jax:
        at = pl.ds(i * depth, depth)
        return total + dot(x_ref[:, at], weight_ref[layer, at, :])

    out_ref[...] = lax.fori_loop(0, x_ref.shape[1] // depth, step, jnp.zeros(out_ref.shape, jnp.float32))


def _rows(R: int) -> int:
    """Return the rows of a block."""
    return min(_ROWS, max(_LEAST, power_of_two(R)))


def _divisor(size: int, most: int) -> int:
    """Return the largest power of two up to `most` that divides a size."""
    return min(size & -size, most)


def _padded(x: Jax, multiples: dict[int, int], value: int = 0) -> Jax:
    """Pad axes at their ends to multiples."""
    return jnp.pad(x, [(0, -size % multiples.get(axis, 1)) for axis, size in enumerate(x.shape)], constant_values=value)
