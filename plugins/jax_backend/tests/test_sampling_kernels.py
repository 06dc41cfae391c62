"""Kernels for GPUs that sampling alone uses, run as plain JAX; Triton takes them, too."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tinsmith_jax.decode import PAGE
from tinsmith_jax.kernels import paged

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
    lowered = on_gpu.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("__gpu$xla.gpu.triton") == 2
