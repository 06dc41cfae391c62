"""Pages of the sampler's cache on GPUs: Pallas kernels for Triton that write them in place, and attend to them.

XLA would gather the pages before it multiplies, and ask the host in each round of a loop whether there is another. Here
one program handles some queries of one sequence that share a head of keys, and some of its pages: it reads them where
they are, with an online softmax. How many pages a program has depends on shapes alone, and their results are joined in
order, so a sequence's bits depend on nobody else. No value past a sequence's end is used, be it NaN.

Suffixes as in decode.py. There are S splits of a sequence's pages. D and the rows of a block are powers of two.
"""

import math
from functools import partial
from typing import Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from tinsmith_jax.jax_types import Jax
from tinsmith_jax.kernels.triton import compiler

HEAD_SIZES: Final = (16, 32, 64, 128, 256)
_LEAST: Final = 16  # rows of a product on tensor cores
_MOST: Final = 64
_PAGES: Final = 8  # of a split
_FLOOR: Final = -1e30  # instead of -inf: exp(floor - floor) is 1 and exp(-inf - floor) is 0, never NaN


def write(  # noqa: PLR0913 - what a kernel reads and writes
    k_LPJDC: Jax, v_LPJCD: Jax, layer: Jax, start_N: Jax, table_NG: Jax, count: Jax, k_NTJD: Jax, v_NTJD: Jax,
    *, interpret: bool,
) -> tuple[Jax, Jax]:  # fmt: skip
    """Write the keys and values of the first `count` tiles to their pages, in place: single tokens, or whole pages."""
    N, T, J, D = k_NTJD.shape
    C = k_LPJDC.shape[-1]
    assert T in (1, C), f"tiles of {T} tokens, pages of {C}"
    new = (k_NTJD.transpose(0, 2, 3, 1), v_NTJD.transpose(0, 2, 1, 3))
    if T == 1:
        new = tuple(part.reshape(N, J, D) for part in new)
    scalars = jnp.stack([layer, count]).astype(jnp.int32)
    return tuple(
        pl.pallas_call(
            _write_kernel,
            grid=(N, J),
            in_specs=[
                *(whole(x) for x in (scalars, start_N, table_NG)),
                *(pl.BlockSpec((None, None, *x.shape[2:]), partial(_tile_and_head, x.ndim)) for x in new),
                whole(k_LPJDC),
                whole(v_LPJCD),
            ],
            out_specs=[whole(k_LPJDC), whole(v_LPJCD)],
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k_LPJDC, v_LPJCD)],
            input_output_aliases={5: 0, 6: 1},
            **compiler(1 if T == 1 else 4, 1, interpret),
        )(scalars, start_N, table_NG, *new, k_LPJDC, v_LPJCD)
    )


def attend(q_NThD: Jax, k_LPJDC: Jax, v_LPJCD: Jax, layer: Jax, start_N: Jax, table_NG: Jax, *, interpret: bool) -> Jax:
    """Attend from each tile to its sequence, causally: [N, T, heads * D]. Tiles that start before 0 get zeros.

    Tiles are single tokens, or as long as a page and start with one.
    """
    N, T, heads, D = q_NThD.shape
    J = k_LPJDC.shape[2]
    group = heads // J
    splits = math.ceil(table_NG.shape[1] / _PAGES) if T == 1 else 1
    # A block has whole heads: row r of it is token r % T.
    q_NJQD = q_NThD.transpose(0, 2, 1, 3).reshape(N, J, group * T, D)
    rows = min(_MOST, max(_LEAST, power_of_two(group * T)))
    q_NJQD = jnp.pad(q_NJQD, ((0, 0), (0, 0), (0, -group * T % rows), (0, 0)))
    Q = q_NJQD.shape[2]
    of_rows = pl.BlockSpec((None, None, rows), lambda n, block, split: (split, n, block))
    of_vectors = pl.BlockSpec((None, None, rows, D), lambda n, block, split: (split, n, block, 0))
    acc_SNQD, high_SNQ, total_SNQ = pl.pallas_call(
        partial(_attend_kernel, T=T, blocks=Q // rows, pages=math.ceil(table_NG.shape[1] / splits)),
        grid=(N, J * (Q // rows), splits),
        in_specs=[
            *(whole(x) for x in (layer.reshape(1), start_N, table_NG)),
            pl.BlockSpec((None, rows, D), lambda n, block, _: (n, block, 0)),
            whole(k_LPJDC),
            whole(v_LPJCD),
        ],
        out_specs=[of_vectors, of_rows, of_rows],
        out_shape=[jax.ShapeDtypeStruct((splits, N, J * Q, *rest), jnp.float32) for rest in ((D,), (), ())],
        **compiler(4, 2, interpret),
    )(layer.reshape(1), start_N, table_NG, q_NJQD.reshape(N, J * Q, D), k_LPJDC, v_LPJCD)
    weight_SNQ = jnp.exp(high_SNQ - high_SNQ.max(axis=0))
    total_NQ = (total_SNQ * weight_SNQ).sum(axis=0)
    out_NQD = (acc_SNQD * weight_SNQ[..., None]).sum(axis=0) / jnp.where(total_NQ > 0, total_NQ, 1)[..., None]
    out_NhTD = out_NQD.reshape(N, J, Q, D)[:, :, : group * T].reshape(N, heads, T, D)
    return out_NhTD.transpose(0, 2, 1, 3).reshape(N, T, heads * D).astype(q_NThD.dtype)


def _write_kernel(
    scalars_ref: Jax, start_ref: Jax, table_ref: Jax, k_ref: Jax, v_ref: Jax, _: Jax, __: Jax,
    k_pages: Jax, v_pages: Jax,
) -> None:  # fmt: skip
    tile, head = pl.program_id(0), pl.program_id(1)

    @pl.when(tile < scalars_ref[1])
    def _write() -> None:
        layer, start = scalars_ref[0], start_ref[tile]
        C = k_pages.shape[-1]
        page = table_ref[tile, start // C]
        if len(k_ref.shape) == 1:
            k_pages[layer, page, head, :, start % C] = k_ref[...]
            v_pages[layer, page, head, start % C, :] = v_ref[...]
        else:
            k_pages[layer, page, head, :, :] = k_ref[...]
            v_pages[layer, page, head, :, :] = v_ref[...]


def _attend_kernel(  # noqa: PLR0913 - what a kernel reads and writes
    layer_ref: Jax, start_ref: Jax, table_ref: Jax, q_ref: Jax, k_pages: Jax, v_pages: Jax,
    acc_ref: Jax, high_ref: Jax, total_ref: Jax, *, T: int, blocks: int, pages: int,
) -> None:  # fmt: skip
    tile, head, first = pl.program_id(0), pl.program_id(1) // blocks, pl.program_id(2) * pages
    layer, start, q = layer_ref[0], start_ref[tile], q_ref[...]
    rows, D = q.shape
    C = k_pages.shape[-1]
    last = jnp.where(start < 0, -1, start // C)  # the page that holds the queries: the only one to be masked
    end = jnp.minimum(first + pages, last)

    def step(index: Jax, carry: tuple[Jax, Jax, Jax], *, masked: bool) -> tuple[Jax, Jax, Jax]:
        high, total, acc = carry
        page = table_ref[tile, index]
        k, v = k_pages[layer, page, head, :, :], v_pages[layer, page, head, :, :]
        scores = dot(q, k) * D**-0.5
        if masked:
            row, column = (lax.broadcasted_iota(jnp.int32, (rows, C), axis) for axis in (0, 1))
            scores = jnp.where(column <= start % C + row % T, scores, -jnp.inf)
            position = lax.broadcasted_iota(jnp.int32, (C, D), 0)
            v = jnp.where(position < start % C + T, v, jnp.zeros_like(v))
        new_high = jnp.maximum(high, scores.max(axis=1))
        shrink = jnp.exp(high - new_high)
        p = jnp.exp(scores - new_high[:, None])
        return new_high, total * shrink + p.sum(axis=1), acc * shrink[:, None] + dot(p.astype(v.dtype), v)

    empty = (
        jnp.full((rows,), _FLOOR, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, D), jnp.float32),
    )
    found = lax.fori_loop(first, end, partial(step, masked=False), empty)
    here = jnp.minimum(first + pages, last + 1)
    found = lax.fori_loop(jnp.maximum(first, last), here, partial(step, masked=True), found)
    high_ref[...], total_ref[...], acc_ref[...] = found


def whole(x: Jax) -> pl.BlockSpec:
    return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)


def _tile_and_head(ndim: int, tile: Jax, head: Jax) -> tuple[Jax, ...]:
    return tile, head, *(0,) * (ndim - 2)


def power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def dot(a: Jax, b: Jax) -> Jax:
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None  # else TF32
    return lax.dot(a, b, precision=precision, preferred_element_type=jnp.float32)
