"""The jax backend's kernels, compiled for the GPU, beside its reference in float32 on the CPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_harness import ON_CPU, relative

from tinsmith_jax.attention import packed_attention
from tinsmith_jax.kernels import tile_products
from tinsmith_jax.kernels.choice import REFERENCE, Kernels
from tinsmith_jax.kernels.grouped_products import GroupedProducts
from tinsmith_jax.layers import TILE

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
