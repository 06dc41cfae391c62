"""The maths of sampling on plain logits, against NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_harness import QUICK

from tinsmith_jax import sampling_head
from tinsmith_jax.sampling_head import RowParams
from tinsmith_jax.sampling_values import NOT_DRAWN

# As the backend runs them: each operation outside a compiled function would be compiled on its own. If optimizations
# are off anyway, the older emitters compile faster.
jit = partial(jax.jit, compiler_options=dict(QUICK) if jax.config.read("jax_disable_most_optimizations") else None)
draw = jit(sampling_head.draw)
log_softmax = jit(sampling_head.log_softmax)
search_cdf = jit(sampling_head.search_cdf)
truncation_floor = jit(sampling_head.truncation_floor)
uniform = jit(sampling_head.uniform)
prompt_scores = jit(partial(sampling_head.prompt_scores, num_top=4))

V = 700  # more than one block of the search, and not a multiple of it


def rows(count: int, *, seed: int = 1, temperature: float = 1.0, top_k: int = -1, top_p: float = 1.0) -> RowParams:
    return RowParams(
        np.tile(np.array([[0, seed]], np.uint32), (count, 1)),
        np.arange(count, dtype=np.uint32),
        np.full(count, temperature, np.float32),
        np.full(count, top_k, np.int32),
        np.full(count, top_p, np.float32),
    )


def logits_of(count: int, seed: int = 0, scale: float = 2.0, vocab: int = V) -> np.ndarray:
    return np.random.default_rng(seed).normal(scale=scale, size=(count, vocab)).astype(np.float32)


def numpy_log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide = wide - wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def kept(logits: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """The set that top-k, then top-p keep, by sorting in float64."""
    order = np.argsort(-logits, kind="stable")
    count = len(logits) if top_k < 1 else min(top_k, len(logits))
    order = order[:count]
    mass = np.exp(numpy_log_softmax(logits[order]))
    if top_p < 1:
        order = order[: int(np.searchsorted(np.cumsum(mass), top_p)) + 1]
    mask = np.zeros(len(logits), bool)
    mask[order] = True
    return mask


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(1, 1.0), (5, 1.0), (-1, 0.1), (-1, 0.9), (50, 0.5), (9999, 0.97), (-1, 1e-6)]
)
def test_truncation_keeps_exactly_what_sorting_keeps(top_k: int, top_p: float) -> None:
    logits = logits_of(8, seed=3)
    logits[7] -= 50.0  # all far below zero: the order of bits must hold there too
    params = rows(8, top_k=top_k, top_p=top_p)
    floor = np.asarray(truncation_floor(logits, params.top_k_B, params.top_p_B))
    for row, value in zip(logits, floor, strict=True):
        np.testing.assert_array_equal(row >= value, kept(row, top_k, top_p))


def test_truncation_off_is_no_truncation_beside_a_truncated_row() -> None:
    logits = logits_of(2)
    floor = truncation_floor(logits, jnp.array([-1, 3], jnp.int32), jnp.array([1.0, 1.0], jnp.float32))
    assert floor[0] == -jnp.inf
    assert (logits[1] >= np.asarray(floor)[1]).sum() == 3


def test_ties_with_the_last_kept_token_stay() -> None:
    logits = np.array([[0.0, -0.0, 1.0, -1.0]], np.float32)
    floor = truncation_floor(logits, jnp.array([2], jnp.int32), jnp.array([1.0], jnp.float32))
    assert (logits[0] >= np.asarray(floor)[0]).tolist() == [True, True, True, False]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.7, 12, 0.7),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in ((1.0, -1, 1.0), (0.6, -1, 1.0), (1.7, 12, 1.0), (1.0, -1, 0.7))
        ),
    ],
)
def test_draws_follow_the_distribution(temperature: float, top_k: int, top_p: float) -> None:
    """A chi-square statistic over the tokens; the seed is fixed, so the outcome is too."""
    count, vocab = 10_000, 40
    logits = np.repeat(logits_of(1, vocab=vocab), count, axis=0)
    params = rows(count, temperature=temperature, top_k=top_k, top_p=top_p)
    tokens, logprobs, _ = draw(logits, params, np.full(count, 7), any_truncated=top_k > 0 or top_p < 1)
    scaled = numpy_log_softmax(logits[0] / temperature)
    np.testing.assert_allclose(logprobs, scaled[np.asarray(tokens)], atol=1e-5)
    mask = kept(logits[0] / np.float32(temperature), top_k, top_p)
    expected = np.where(mask, np.exp(scaled), 0.0)
    expected *= count / expected.sum()
    seen = np.bincount(np.asarray(tokens), minlength=vocab)
    assert seen[~mask].sum() == 0
    likely = expected >= 5
    chi_square = ((seen[likely] - expected[likely]) ** 2 / expected[likely]).sum()
    freedom = likely.sum() - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)


def test_greedy_takes_the_best_and_reports_temperature_one() -> None:
    logits = logits_of(4)
    params = rows(4, temperature=0.0, top_k=3, top_p=0.5)
    tokens, logprobs, _ = draw(logits, params, np.zeros(4, np.int32), any_truncated=jnp.bool_(True))
    np.testing.assert_array_equal(tokens, logits.argmax(-1))
    np.testing.assert_allclose(logprobs, numpy_log_softmax(logits).max(-1), atol=1e-5)


def test_the_random_number_depends_on_seed_index_and_position_alone() -> None:
    params = rows(6, seed=5)
    alone = uniform(RowParams(*(part[4:5] for part in params)), np.array([9], np.int32))
    together = uniform(params, np.full(6, 9, np.int32))
    assert together[4] == alone[0]
    other_position = uniform(params, np.full(6, 10, np.int32))
    other_seed = uniform(rows(6, seed=6), np.full(6, 9, np.int32))
    high_word = uniform(
        params._replace(seed_words_B2=params.seed_words_B2 + np.array([1, 0], np.uint32)), np.full(6, 9)
    )
    numbers = np.concatenate([together, other_position, other_seed, high_word])
    assert len(np.unique(numbers)) == 24
    assert ((numbers >= 0) & (numbers < 1)).all()


def test_the_search_never_lands_on_weight_zero() -> None:
    weights = np.zeros((4, V), np.float32)
    weights[:, 517] = 0.3
    weights[:, 600] = 1e-30
    edges = np.array([0.0, 0.5, 1 - 2**-24, 1.0], np.float32)
    found = np.asarray(search_cdf(jnp.asarray(weights), jnp.asarray(edges)))
    assert set(found.tolist()) <= {517, 600}
    assert found[0] == 517


def test_the_search_agrees_with_a_plain_running_sum() -> None:
    weights = np.exp(logits_of(50, seed=4, scale=1.0)).astype(np.float32)
    u = np.random.default_rng(5).random(50).astype(np.float32)
    sums = np.cumsum(weights.astype(np.float64), axis=1)
    expected = (sums > (u * sums[:, -1])[:, None]).argmax(1)
    np.testing.assert_array_equal(search_cdf(jnp.asarray(weights), jnp.asarray(u)), expected)


def test_rows_of_nan_stay_valid_tokens_and_leave_others_alone() -> None:
    logits = logits_of(2)
    alone, _, _ = draw(logits, rows(2), np.zeros(2, np.int32), any_truncated=jnp.bool_(True))
    bad = logits.copy()
    bad[0] = np.nan
    tokens, logprobs, _ = draw(bad, rows(2, top_k=-1), np.zeros(2, np.int32), any_truncated=jnp.bool_(True))
    assert tokens[1] == alone[1]
    assert 0 <= int(tokens[0]) < V
    assert np.isnan(logprobs[0])


def test_prompt_scores_skip_negative_targets_and_sort_the_best() -> None:
    logits = logits_of(3)
    targets = np.array([[1, -1], [2, 699], [-1, 0]], np.int32)
    none = np.zeros((3, 2), np.float32), np.float32(NOT_DRAWN)
    scored, ids, values, _, _ = prompt_scores(jnp.asarray(logits), targets, *none, want_top=jnp.bool_(True))
    logp = numpy_log_softmax(logits)
    np.testing.assert_allclose(scored[1], logp[1, [2, 699]], atol=1e-5)
    assert scored[0, 1] == 0
    assert scored[2, 0] == 0
    order = np.argsort(-logits, axis=1)[:, :4]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_allclose(values, np.take_along_axis(logp, order, 1), atol=1e-5)
    off, _, _, *drawn = prompt_scores(jnp.asarray(logits), targets, *none, want_top=jnp.bool_(False))
    np.testing.assert_array_equal(off, scored)
    assert not np.any(drawn), "nothing is drawn unless it is asked for"


@pytest.mark.parametrize("temperature", [0.0, 0.5, 2.0])
def test_prompt_draws_follow_the_numbers_and_the_temperature(temperature: float) -> None:
    """The token whose share of the running sum holds the number; its logprob is at temperature 1."""
    logits, numbers = logits_of(3), np.random.default_rng(1).random((3, 8), np.float32)
    targets = np.zeros((3, 1), np.int32)
    *_, drawn, logprobs = prompt_scores(
        jnp.asarray(logits), targets, numbers, np.float32(temperature), want_top=jnp.bool_(False)
    )
    if temperature:
        ends = np.cumsum(np.exp(numpy_log_softmax(logits.astype(np.float64) / temperature)), axis=1)
        wanted = np.array([np.searchsorted(each, row, side="right") for each, row in zip(ends, numbers, strict=True)])
    else:
        wanted = np.broadcast_to(logits.argmax(axis=1)[:, None], (3, 8))
    np.testing.assert_array_equal(drawn, wanted)
    np.testing.assert_allclose(logprobs, np.take_along_axis(numpy_log_softmax(logits), wanted, 1), atol=1e-5)


def test_log_softmax_of_large_logits() -> None:
    logits = np.array([[1e4, 0.0, -1e4]], np.float32)
    np.testing.assert_allclose(log_softmax(jnp.asarray(logits)), [[0.0, -1e4, -2e4]])
