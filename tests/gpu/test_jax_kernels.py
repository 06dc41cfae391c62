"""The jax backend's kernels, compiled for the GPU, beside its reference in float32 on the CPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_harness import ON_CPU, relative

from tinsmith_jax.attention import packed_attention
from tinsmith_jax.kernels import paged, row_products, tile_products
from tinsmith_jax.kernels.choice import REFERENCE, Kernels
from tinsmith_jax.kernels.grouped_products import GroupedProducts
from tinsmith_jax.tiles import TILE

# Any below: jax arrays.
DTYPES = pytest.mark.parametrize(("dtype", "close"), [("float32", 5e-3), ("bfloat16", 2e-2)])  # TF32, and 8 bits


def on_cpu(work: Any, *arrays: Any) -> Any:
    with jax.default_device(jax.devices("cpu")[0]), jax.default_matmul_precision("highest"):
        return jax.jit(work)(*arrays)


def assert_close(ours: Any, theirs: Any, close: float) -> None:
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    distances = [relative(np.asarray(a, np.float32), np.asarray(b, np.float32)) for a, b in pairs]
    assert max(distances) < close, distances


def test_jax_computes_on_the_gpu() -> None:
    assert jax.default_backend() == ("cpu" if ON_CPU else "gpu")


@DTYPES
def test_attention(dtype: str, close: float) -> None:
    tiles, heads, kv_heads, d = (8, 4, 2, 64) if ON_CPU else (32, 8, 2, 128)
    sizes = [1, 3, 2, *([] if ON_CPU else [5, 1]), tiles]
    first = np.repeat(np.cumsum([0, *sizes[:-1]]), sizes)[:tiles].astype(np.int32)
    rng, T = np.random.default_rng(0), tiles * TILE
    shapes = ((T, heads, d), (T, kv_heads, d), (T, kv_heads, d), (T, heads * d))
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]

    def both_ways(kernels: Kernels, q: Any, k: Any, v: Any, d_out: Any) -> Any:
        out, pull_back = jax.vjp(lambda q, k, v: packed_attention(q, k, v, first, kernels), q, k, v)
        return out, *pull_back(d_out)

    ours = jax.jit(functools.partial(both_ways, Kernels(attention="flash", longest=T, interpret=ON_CPU)))
    assert_close(
        ours(*(jnp.asarray(x, dtype) for x in arrays)),
        on_cpu(functools.partial(both_ways, REFERENCE), *arrays),
        close,
    )


@DTYPES
def test_products_of_adapters(dtype: str, close: float) -> None:
    adapters, inputs, rank, outputs, tiles = 5, 256, 32, 384, 12
    rng, which = np.random.default_rng(1), (np.arange(tiles) * 7 % adapters).astype(np.int32)
    shapes = ((tiles, TILE, inputs), (adapters, inputs, rank), (adapters, rank, outputs), (tiles, TILE, outputs))
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]

    def all_of_them(products: Any, x: Any, A: Any, B: Any, d_out: Any, which: Any) -> Any:
        z, d_z = products.down(x, A, which), products.up_backward(d_out, B, which)
        return (
            z,
            d_z,
            products.up(z.astype(x.dtype), B, which),
            products.down_backward(d_z.astype(x.dtype), A, which),
            products.add(jnp.zeros_like(A), products.outer_A(x, d_z.astype(x.dtype), which, adapters), which),
            products.add(jnp.zeros_like(B), products.outer_B(z.astype(x.dtype), d_out, which, adapters), which),
        )

    ours = jax.jit(functools.partial(all_of_them, GroupedProducts(interpret=ON_CPU)))
    assert_close(
        ours(*(jnp.asarray(x, dtype) for x in arrays), which),
        on_cpu(functools.partial(all_of_them, tile_products), *arrays, which),
        close,
    )


@DTYPES
@pytest.mark.parametrize("tokens", [1, TILE], ids=["drawing", "prompts"])
def test_pages_of_the_sampler(tokens: int, dtype: str, close: float) -> None:
    sequences, pages, heads, kv_heads, d = (3, 10, 4, 2, 64) if ON_CPU else (6, 19, 8, 2, 128)
    rng, num_pages = np.random.default_rng(2), 1 + sequences * pages
    table = 1 + rng.permutation(sequences * pages).reshape(sequences, pages).astype(np.int32)
    start = (np.linspace(0, pages - 1, sequences).astype(np.int32) * TILE + (17 if tokens == 1 else 0)).astype(np.int32)
    shapes = (
        (2, num_pages, kv_heads, d, TILE),
        (2, num_pages, kv_heads, TILE, d),
        *((sequences, tokens, number, d) for number in (heads, kv_heads, kv_heads)),
    )
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]

    def written_and_read(interpret: bool, keys: Any, values: Any, q: Any, k: Any, v: Any) -> Any:
        layer = jnp.int32(1)
        pools = paged.write(keys, values, layer, start, table, jnp.int32(sequences), k, v, interpret=interpret)
        return pools, paged.attend(q, *pools, layer, start, table, interpret=interpret)

    ours = jax.jit(functools.partial(written_and_read, ON_CPU))
    assert_close(
        ours(*(jnp.asarray(x, dtype) for x in arrays)),
        on_cpu(functools.partial(written_and_read, True), *arrays),
        close,
    )


@DTYPES
@pytest.mark.parametrize("rows", [24, 3 * TILE])
def test_products_of_the_sampler(rows: int, dtype: str, close: float) -> None:
    inputs, rank, outputs, adapters = (256, 32, 384, 5) if ON_CPU else (1024, 32, 1536, 9)
    rng, which = np.random.default_rng(3), (np.arange(rows) * 7 % (adapters + 1) - 1).astype(np.int32)
    shapes = ((rows, inputs), (2, adapters, inputs, rank), (2, adapters, rank, outputs), (2, inputs, outputs))
    arrays = [rng.normal(size=shape).astype(np.float32) / shape[-2] ** 0.5 for shape in shapes]

    def products(interpret: bool, x: Any, A: Any, B: Any, weights: Any) -> Any:
        of, layer = row_products.RowAdapters.of(jnp.asarray(which)), jnp.int32(1)
        low, other = row_products.adapted(x, [A, 2 * A], layer, of, interpret=interpret)
        (up,) = row_products.adapted(low, [B], layer, of, interpret=interpret)
        return low, other, up, row_products.dense(x, weights, layer, interpret=interpret)

    ours = jax.jit(functools.partial(products, ON_CPU))
    assert_close(
        ours(*(jnp.asarray(x, dtype) for x in arrays)), on_cpu(functools.partial(products, True), *arrays), close
    )
