"""Kernels for accelerators against the reference: Pallas kernels in interpret mode, products of adapters as they are.

Distances are relative: the L2 norm of the difference over that of the reference.
"""

import functools
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_harness import LOSSES, TRITON, lowered_for_cuda

from tinsmith_jax import head
from tinsmith_jax.attention import Scoring, packed_attention
from tinsmith_jax.kernels import splash, tile_products
from tinsmith_jax.kernels.choice import REFERENCE, Attention, Kernels, choose
from tinsmith_jax.kernels.grouped_products import GroupedProducts
from tinsmith_jax.layers import Lora, lora_delta
from tinsmith_jax.loss_table import LossBatch, LossTable
from tinsmith_jax.mesh import Axes
from tinsmith_jax.tiles import TILE, Tiles

WIDE = Axes(kernels=Kernels(products="side_by_side"))
GROUPED = Axes(kernels=Kernels(products="grouped", interpret=True))
FORMS = pytest.mark.parametrize(
    "axes",
    [pytest.param(WIDE, id="side by side"), pytest.param(GROUPED, id="grouped", marks=pytest.mark.thorough)],
)
PALLAS: tuple[Attention, ...] = ("splash", "flash")
SEQUENCES = (3, 1, 2)  # tiles of each; what remains of a stream is unused


def relative(ours: Any, theirs: Any) -> float:
    ours, theirs = (np.asarray(x, np.float64) for x in (ours, theirs))
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def distances(ours: Any, theirs: Any) -> list[float]:
    return [relative(a, b) for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)]


def assert_as_exact(ours: list[float], theirs: list[float]) -> None:
    """Compare distances from the results in float32: both forms round, in different places."""
    assert max(theirs) < 1e-2
    assert all(mine < 1.5 * its for mine, its in zip(ours, theirs, strict=True)), (ours, theirs)


def first_tiles(sequences: tuple[int, ...], n: int) -> np.ndarray:
    starts = np.repeat(np.cumsum((0, *sequences[:-1])), sequences)
    return np.concatenate([starts, np.arange(len(starts), n)]).astype(np.int32)


# Attention ------------------------------------------------------------------------------------------------------------


@functools.cache  # each takes seconds to compile
def attention_program(kernels: Kernels) -> Any:
    @jax.jit
    def run(q: Any, k: Any, v: Any, d_out: Any, first_n: Any) -> Any:
        out, pull_back = jax.vjp(lambda q, k, v: packed_attention(q, k, v, first_n, kernels), q, k, v)
        return out, *pull_back(d_out)

    return run


def attention(kernels: Kernels, dtype: str, first_n: np.ndarray, arrays: Any) -> tuple[Any, ...]:
    """Return the result and its gradients by queries, keys and values."""
    results = attention_program(kernels)(*(jnp.asarray(x, dtype) for x in arrays), first_n)
    return tuple(np.asarray(x, np.float32) for x in results)


def test_sinks_and_windows_leave_every_platforms_kernel() -> None:
    """No kernel for accelerators knows them: what it is given must be computed in tiles."""
    q, k, v, _ = map(jnp.asarray, attention_arrays(128, 4, 2))
    first_n, sinks = np.zeros(2, np.int32), np.array([-1.0, 0.0, 1.0, 2.0], np.float32)
    reference = np.asarray(packed_attention(q, k, v, first_n, REFERENCE, Scoring(40, sinks)))
    scores = np.einsum("qhd,khd->hqk", q, np.repeat(k, 2, axis=1)) / 4
    distance = np.arange(128)[:, None] - np.arange(128)
    p = np.where((distance >= 0) & (distance < 40), np.exp(scores), 0)
    p /= p.sum(-1, keepdims=True) + np.exp(sinks)[:, None, None]
    np.testing.assert_allclose(
        reference, np.einsum("hqk,khd->qhd", p, np.repeat(v, 2, axis=1)).reshape(128, -1), atol=1e-5
    )
    for platform in ("tpu", "gpu"):
        out = packed_attention(q, k, v, first_n, choose(platform), Scoring(40, sinks))
        np.testing.assert_allclose(out, reference, atol=1e-6)


def attention_arrays(T: int, heads: int, kv_heads: int, d: int = 16) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = ((T, heads, d), (T, kv_heads, d), (T, kv_heads, d), (T, heads * d))
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def compare_attention(form: Attention, sequences: tuple[int, ...], T: int, heads: tuple[int, int], d: int) -> None:
    first_n, arrays = first_tiles(sequences, T // TILE), attention_arrays(T, *heads, d)
    kernels = Kernels(attention=form, longest=max(*sequences, 3) * TILE, interpret=True)
    theirs = attention(REFERENCE, "float32", first_n, arrays)
    assert max(distances(attention(kernels, "float32", first_n, arrays), theirs)) < 1e-6


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of two tiles, so that blocks are skipped, and hold several sequences."""
    monkeypatch.setattr(splash, "BLOCK", 2 * TILE)


@pytest.mark.parametrize("form", PALLAS)
def test_attention_equals_the_reference(form: Attention) -> None:
    compare_attention(form, SEQUENCES, 512, (4, 2), 16)


@pytest.mark.thorough
@pytest.mark.parametrize("form", PALLAS)
def test_attention_in_bfloat16_is_as_exact_as_the_reference(form: Attention) -> None:
    first_n, arrays = first_tiles(SEQUENCES, 8), attention_arrays(512, 4, 2)
    exact = attention(REFERENCE, "float32", first_n, arrays)
    theirs = distances(attention(REFERENCE, "bfloat16", first_n, arrays), exact)
    ours = distances(attention(Kernels(attention=form, interpret=True), "bfloat16", first_n, arrays), exact)
    assert_as_exact(ours, theirs)


@pytest.mark.thorough
@pytest.mark.parametrize("form", PALLAS)
@pytest.mark.parametrize(
    ("sequences", "T", "heads", "d"),
    [
        ((1, 1), 128, (2, 2), 16),
        ((16,), 1024, (4, 1), 64),
        ((5, 1, 4, 3), 1024, (8, 2), 32),
        ((1,) * 16, 1024, (2, 1), 128),
        ((30, 2), 2048, (2, 1), 16),
    ],
)
def test_attention_in_other_shapes(
    form: Attention, sequences: tuple[int, ...], T: int, heads: tuple[int, int], d: int
) -> None:
    compare_attention(form, sequences, T, heads, d)


def test_only_gpus_need_triton() -> None:
    """JAX is going to drop what lowers kernels to it: other platforms are to outlive that."""
    loaded = (
        "import sys, tinsmith_jax.backend, tinsmith_jax.sampling_only\n"
        "print([name for name in sys.modules if 'pallas.triton' in name])"
    )
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_triton_takes_attention_and_its_gradients() -> None:
    arrays = (*(jnp.asarray(x, jnp.bfloat16) for x in attention_arrays(512, 4, 2)), first_tiles(SEQUENCES, 8))
    kernels = Kernels(attention="flash", longest=3 * TILE)
    assert lowered_for_cuda(attention_program(kernels), *arrays).count(TRITON) == 3


@pytest.mark.parametrize("form", PALLAS)
@pytest.mark.parametrize("where", ["values", "gradients"])
def test_a_broken_sequence_breaks_no_other(form: Attention, where: str) -> None:
    first_n, arrays = first_tiles(SEQUENCES, 8), attention_arrays(512, 4, 2)
    kernels = Kernels(attention=form, longest=3 * TILE, interpret=True)
    whole = attention(kernels, "float32", first_n, arrays)
    broken = [x.copy() for x in arrays]
    rows = slice(3 * TILE, 4 * TILE)  # the second sequence, which shares its blocks of splash attention with both
    broken[2 if where == "values" else 3][rows] = [np.nan] * 8 + [np.inf] * 8 if where == "values" else np.nan
    results = attention(kernels, "float32", first_n, broken)
    for result, before in zip(results, whole, strict=True):
        np.testing.assert_array_equal(np.delete(result, np.r_[rows], axis=0), np.delete(before, np.r_[rows], axis=0))
    assert np.isnan(results[0][rows]).any() == (where == "values")
    assert np.isnan(results[1][rows]).any()


@pytest.mark.parametrize("longest", [None, 5 * TILE])
def test_splash_visits_exactly_the_blocks_that_hold_a_sequence(longest: int | None) -> None:
    sequences, block = (5, 1, 2, 3, 1, 4), 2
    first_n = first_tiles(sequences, 16)
    tiles = np.arange(16)
    sees = (tiles >= first_n[:, None]) & (tiles <= tiles[:, None])
    expected = sees.reshape(8, block, 8, block).any(axis=(1, 3))
    widest = splash.widest_of(16 * TILE, block * TILE, TILE, longest)
    assert widest == (8 if longest is None else 3)
    first_b = jnp.asarray(first_n[::block] // block)
    keys, queries = splash.key_blocks(first_b, widest), splash.query_blocks(first_b, widest)
    visited, seen = np.zeros_like(expected), np.zeros_like(expected)
    for at, column in np.argwhere(np.asarray(keys["block_mask"][0])):
        visited[at, keys["data_next"][0, at, column]] = True
    for row, at in np.argwhere(np.asarray(queries["block_mask"][0])):
        seen[queries["data_next"][0, row, at], at] = True
    np.testing.assert_array_equal(visited, expected)
    np.testing.assert_array_equal(seen, expected)


# Products of adapters -------------------------------------------------------------------------------------------------

K, RANK, INPUTS, OUTPUTS, ROWS = 3, 4, 24, (16, 40), 6 * TILE
TILES = Tiles(np.array([1, 0, 1, 2, 0, 1], np.int32), np.array([2.0, 1.0, 2.0, 0.5, 1.0, 2.0], np.float32))


def adapter_arrays() -> tuple[Any, Any, Any, Any]:
    rng = np.random.default_rng(1)

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    A, B = tuple(draw(K, INPUTS, RANK) for _ in OUTPUTS), tuple(draw(K, RANK, size) for size in OUTPUTS)
    sums = tuple(draw(*a.shape) for a in A), tuple(draw(*b.shape) for b in B)
    return draw(ROWS, INPUTS), Lora(A, B, sums), Tiles(*TILES), tuple(draw(ROWS, size) for size in OUTPUTS)


@functools.cache
def adapters_program(axes: Axes) -> Any:
    @jax.jit
    def run(x: Any, lora: Lora, tiles: Tiles, d_deltas: Any) -> Any:
        deltas, pull_back = jax.vjp(lambda x, sums: lora_delta(x, lora._replace(sums=sums), tiles, axes), x, lora.sums)
        return deltas, *pull_back(d_deltas)

    return run


def adapted(axes: Axes, dtype: str, x: Any, lora: Lora, tiles: Tiles, d_deltas: Any) -> Any:
    """Return the products, the gradient by their input, and the sums."""
    d_deltas = tuple(jnp.asarray(d, dtype) for d in d_deltas)
    results = adapters_program(axes)(jnp.asarray(x, dtype), lora, tiles, d_deltas)
    return jax.tree.map(lambda y: np.asarray(y, np.float32), results)


def products_and_sums(products: Any, x: Any, A: Any, which: Any) -> Any:
    z = products.down(x, A, which)
    sums = products.add(jnp.zeros_like(A), products.outer_A(x, z, which, len(A)), which)
    return z, products.down_backward(z, A, which), sums


def test_grouped_products_equal_the_reference() -> None:
    """Once for each kernel, and with sizes that must be padded. Triton takes the kernels, too."""
    x, lora, tiles, _ = adapter_arrays()
    arrays = (x.reshape(-1, TILE, INPUTS), lora.A[0], tiles.adapter_n)
    ours, theirs, on_gpu = (
        jax.jit(functools.partial(products_and_sums, products))
        for products in (GroupedProducts(interpret=True), tile_products, GroupedProducts())
    )
    assert max(distances(ours(*arrays), theirs(*arrays))) < 1e-6
    assert lowered_for_cuda(on_gpu, *arrays).count(TRITON) == 3


@FORMS
def test_products_of_adapters_equal_the_reference(axes: Axes) -> None:
    arrays = adapter_arrays()
    theirs = adapted(Axes(), "float32", *arrays)
    assert max(distances(adapted(axes, "float32", *arrays), theirs)) < 1e-6


@FORMS
@pytest.mark.thorough
def test_products_of_adapters_in_bfloat16_are_as_exact_as_the_reference(axes: Axes) -> None:
    arrays = adapter_arrays()
    exact = adapted(Axes(), "float32", *arrays)
    ours, theirs = (distances(adapted(form, "bfloat16", *arrays), exact) for form in (axes, Axes()))
    assert_as_exact(ours, theirs)


@FORMS
@pytest.mark.parametrize("what", ["A", "B", "x", "d"])
def test_a_broken_adapter_breaks_no_other(axes: Axes, what: str) -> None:
    x, lora, tiles, d_deltas = adapter_arrays()
    whole = adapted(axes, "float32", x, lora, tiles, d_deltas)
    own = np.repeat(tiles.adapter_n == 1, TILE)
    if what in "AB":
        getattr(lora, what)[0][1, 0] = np.inf
    else:
        (x if what == "x" else d_deltas[0])[np.argmax(own)] = np.nan
    if what == "x":  # as in a program: what follows from NaN is NaN
        d_deltas[0][np.argmax(own)] = np.nan
    deltas, d_x, (sums_A, sums_B) = adapted(axes, "float32", x, lora, tiles, d_deltas)
    for result, before in zip((*deltas, d_x), (*whole[0], whole[1]), strict=True):
        np.testing.assert_array_equal(result[~own], before[~own])
    for result, before in zip((*sums_A, *sums_B), (*whole[2][0], *whole[2][1]), strict=True):
        np.testing.assert_array_equal(result[[0, 2]], before[[0, 2]])
    assert not np.isfinite(deltas[0][own]).all() or what == "d"
    assert not np.isfinite(sums_B[0][1] if what == "A" else sums_A[0][1]).all()


# The head -------------------------------------------------------------------------------------------------------------


LOSS = LossTable({"dro": LOSSES["dro"]})


def head_scores(axes: Axes) -> Any:
    rng = np.random.default_rng(2)
    vocab, hidden, rows = 40, 16, 4 * TILE

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    targets = rng.integers(0, vocab, (rows, 1)).astype(np.int32)
    inputs_ITK, config_CT = draw(len(LOSS.inputs), rows, 1), draw(len(LOSS.settings), rows)
    batch = LossBatch(targets, np.zeros(rows, np.int32), inputs_ITK, config_CT)
    tiles = Tiles(TILES.adapter_n[:4], TILES.scale_n[:4])
    adapters, sums = ((draw(K, hidden, RANK), draw(K, RANK, vocab)) for _ in range(2))
    run = jax.jit(
        lambda *values: head.score_with_gradients(*values, tiles, batch, LOSS, 2 * TILE, how=head.InJax(axes))
    )
    return run(draw(vocab, hidden), adapters, sums, draw(rows, hidden))


@FORMS
def test_the_head_with_adapters_equals_the_reference(axes: Axes) -> None:
    assert max(distances(head_scores(axes), head_scores(Axes()))) < 1e-6


# The choice -----------------------------------------------------------------------------------------------------------


def test_platforms_choose_their_kernels() -> None:
    assert choose("cpu", longest=512) == REFERENCE
    assert choose("tpu", longest=512) == Kernels(
        attention="splash", products="side_by_side", equal_blocks=False, longest=512
    )
    assert choose("gpu") == Kernels(attention="flash", products="grouped", equal_blocks=False)
    assert choose("tpu", reference=True) == choose("other") == Kernels(attention="all_tiles", equal_blocks=False)
