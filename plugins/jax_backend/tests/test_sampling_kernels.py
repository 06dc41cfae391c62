"""Kernels for GPUs that sampling alone uses, run as plain JAX; Triton takes them, too."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_harness import TRITON, lowered_for_cuda

from tinsmith_jax import runtime, sampling_programs
from tinsmith_jax.config import JaxConfig
from tinsmith_jax.families import read_config
from tinsmith_jax.kernels import paged, row_products
from tinsmith_jax.sampling_device import sampling_shape
from tinsmith_jax.sampling_values import PAGE
from tinsmith_jax.weights import base_shapes

LAYER, HEADS, KV_HEADS, D = 1, 6, 2, 16


def written_and_attended(
    interpret: bool, pools: Any, table: Any, start: Any, count: Any, q: Any, k: Any, v: Any
) -> tuple[Any, Any]:
    layer = jnp.int32(LAYER)
    pools = paged.write(*pools, layer, start, table, count, k, v, interpret=interpret)
    return pools, paged.attend(q, *pools, layer, start, table, interpret=interpret)


@pytest.mark.parametrize(
    ("tokens", "start"),
    [(1, (5, 8 * PAGE + 63, 9 * PAGE, 16 * PAGE + 1)), (PAGE, (0, PAGE, 3 * PAGE, -1))],
    ids=["drawing", "prompts"],
)
def test_pages_are_written_and_attended_to(tokens: int, start: tuple[int, ...]) -> None:
    """All that no sequence holds is NaN, and other pages stay as they are."""
    rng = np.random.default_rng(0)
    num_pages, count = max(start) // PAGE + 2, sum(each >= 0 for each in start)
    table = np.zeros((len(start), num_pages), np.int32)
    table[:count] = 1 + rng.permutation(count * num_pages).reshape(count, num_pages)
    k_pages = np.full((2, table.max() + 1, KV_HEADS, D, PAGE), np.nan, np.float32)
    v_pages = np.full((2, table.max() + 1, KV_HEADS, PAGE, D), np.nan, np.float32)
    q, k, v = (rng.normal(size=(len(start), tokens, n, D)).astype(np.float32) for n in (HEADS, KV_HEADS, KV_HEADS))
    expected = np.zeros((len(start), tokens, HEADS, D), np.float32)
    for n in range(count):
        keys, values = (np.concatenate([rng.normal(size=(start[n], KV_HEADS, D)), x[n]]) for x in (k, v))
        for position in range(start[n]):
            at = (LAYER, table[n, position // PAGE])
            k_pages[(*at, slice(None), slice(None), position % PAGE)] = keys[position]
            v_pages[(*at, slice(None), position % PAGE)] = values[position]
        for t in range(tokens):
            for head in range(HEADS):
                seen = slice(0, start[n] + t + 1), head * KV_HEADS // HEADS
                weights = np.exp(keys[seen] @ q[n, t, head] * D**-0.5)
                expected[n, t, head] = weights @ values[seen] / weights.sum()
    arguments = ((k_pages, v_pages), table, np.array(start, np.int32), np.int32(count), q, k, v)
    ours, on_gpu = (jax.jit(partial(written_and_attended, interpret)) for interpret in (True, False))
    pools, out = ours(*arguments)
    np.testing.assert_allclose(out, expected.reshape(out.shape), rtol=1e-5, atol=1e-5)
    for n in range(count):
        at, first = (LAYER, table[n, start[n] // PAGE]), start[n] % PAGE
        k_pages[at][..., first : first + tokens] = k[n].transpose(1, 2, 0)
        v_pages[at][:, first : first + tokens] = v[n].transpose(1, 0, 2)
    np.testing.assert_array_equal(pools[0], k_pages)
    np.testing.assert_array_equal(pools[1], v_pages)
    assert lowered_for_cuda(on_gpu, *arguments).count(TRITON) == 2


@pytest.mark.parametrize(
    ("which", "inputs", "outputs"),
    [([0, 1, -1, 1, 2], 512, 32), ([0, 1, 3], 40, 24), ([0] * 30 + [1] * 30 + [-1] * 8 + [2, 0], 768, 96)],
    ids=["parts", "padded", "blocks of rows"],
)
def test_rows_are_multiplied_with_their_adapters(which: list[int], inputs: int, outputs: int) -> None:
    """Rows of one adapter are NaN, and so are another adapter and all other layers."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(len(which), inputs)).astype(np.float32)
    x[np.array(which) == 2] = np.nan
    factors = rng.normal(size=(2, 2, 4, inputs, outputs)).astype(np.float32)
    factors[:, 0] = factors[:, LAYER, 3] = np.nan

    def products(interpret: bool, which: Any, x: Any, *factors: Any) -> Any:
        rows, layer = row_products.RowAdapters.of(which), jnp.int32(LAYER)
        adapted = row_products.adapted(x, factors, layer, rows, interpret=interpret)
        even = [each[:, 0] for each in factors if row_products.even(each[:, 0])]
        return adapted, [row_products.dense(x, each, layer, interpret=interpret) for each in even]

    matrices = factors.copy()
    matrices[:, LAYER, 0] = rng.normal(size=(2, inputs, outputs))
    ours, dense = jax.jit(partial(products, True))(np.array(which), x, *matrices)
    for found, own in zip(ours, matrices[:, LAYER], strict=True):
        expected = [row @ own[w] if w >= 0 else np.zeros(outputs) for row, w in zip(x, which, strict=True)]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    for found, own in zip(dense, matrices[:, LAYER, 0], strict=False):
        np.testing.assert_allclose(found, x @ own, rtol=1e-4, atol=1e-4)
    lowered = lowered_for_cuda(jax.jit(partial(products, False)), np.array(which), x, *matrices)
    assert lowered.count(TRITON) == 1 + len(dense)


@pytest.mark.parametrize(("kind", "kernels"), [("decode", 2 + 4 + 4 + 7 + 2), ("prefill", 2 + 4 + 7)])
def test_a_gpu_samples_by_these_kernels(
    kind: Any, kernels: int, contract_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages, the four matrices of a layer when drawing, the halves of adapters, and the head's."""
    lowered = lambda function, shapes, *, on_cpu: lowered_for_cuda(function, *shapes)  # noqa: ARG005, E731
    monkeypatch.setattr(sampling_programs, "compile_program", lowered)
    model, config = read_config(contract_model), JaxConfig(max_context_tokens=128, decode_slots=2)
    limits = runtime.decide(config, model, "gpu")
    shape = sampling_shape(config, limits, model, num_shards=1)
    base = base_shapes(model, limits.dtype, None)
    programs = sampling_programs.SamplingPrograms(config=model, shape=shape, base_shapes=base)
    text = programs.named(kind, shape.prefill_tiles[0] if kind == "prefill" else 0).compile()
    assert text.count(TRITON) == kernels
