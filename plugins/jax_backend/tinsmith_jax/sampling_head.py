"""From logits to tokens: temperature, top-k and top-p thresholds, the draw, and all reported log-probabilities.

Pure functions of float32 logits. A row never depends on other rows, so a sequence never depends on other sequences.

Suffixes: B = slots (rows), V = vocabulary, N = prompt rows of one call, K = targets or alternatives per row,
D = tokens drawn for a prompt row.
"""

import jax
import jax.numpy as jnp
from jax import lax

from tinsmith_jax.sampling_values import NOT_DRAWN, RowParams

CDF_BLOCK = 512
"""Tokens per block of the two-level search; the rounding error of a running sum grows with its length."""


def draw(
    logits_BV: jax.Array, params: RowParams, position_B: jax.Array, *, any_truncated: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draw one token per row.

    `position_B` is the position of the new token. Seed, sample index and position determine the random number; slot,
    batch and the number of steps per dispatch do not. `any_truncated` is set at run time if any row uses top-k or
    top-p, whose cost is paid only then.

    Returns the tokens [B], their log-probabilities [B] and the log-probabilities of the whole vocabulary [B, V]. These
    are log softmax(logits / T) before truncation, with T = 1 for greedy rows.
    """
    greedy_B = params.temperature_B <= 0
    temperature_B = jnp.where(greedy_B, 1.0, params.temperature_B)
    scaled_BV = logits_BV / temperature_B[:, None]
    logp_BV = log_softmax(scaled_BV)
    with jax.named_scope("truncate"):
        floor_B = lax.cond(
            any_truncated,
            lambda: truncation_floor(scaled_BV, params.top_k_B, params.top_p_B),
            lambda: jnp.full(logits_BV.shape[:1], -jnp.inf, jnp.float32),
        )
    weights_BV = jnp.where(scaled_BV >= floor_B[:, None], _exp_of_shifted(scaled_BV), 0.0)
    drawn_B = search_cdf(weights_BV, uniform(params, position_B))
    token_B = jnp.where(greedy_B, jnp.argmax(logits_BV, axis=-1), drawn_B).astype(jnp.int32)
    return token_B, jnp.take_along_axis(logp_BV, token_B[:, None], axis=-1)[:, 0], logp_BV


def log_softmax(logits_BV: jax.Array) -> jax.Array:
    """Compute the standard log-softmax, with max, sum and log in float32."""
    max_B1 = jnp.max(logits_BV, axis=-1, keepdims=True)
    return logits_BV - (max_B1 + jnp.log(jnp.sum(jnp.exp(logits_BV - max_B1), axis=-1, keepdims=True)))


def uniform(params: RowParams, position_B: jax.Array) -> jax.Array:
    """Return a 24-bit number in [0, 1) per row, a function of (seed, sample index, position) alone."""

    def one(words_2: jax.Array, index: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(words_2, impl="threefry2x32")
        hashed = jax.random.fold_in(jax.random.fold_in(key, index), position)
        return jax.random.key_data(hashed)[0]

    bits_B = jax.vmap(one)(params.seed_words_B2, params.sample_index_B, position_B)
    number_B: jax.Array = (bits_B >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
    return number_B


def truncation_floor(scaled_BV: jax.Array, top_k_B: jax.Array, top_p_B: jax.Array) -> jax.Array:
    """Return the smallest logit kept by top-k and then top-p within the top-k tokens; -inf if both are off.

    Top-k keeps the k largest logits and any ties with the k-th. Top-p keeps the fewest largest logits whose share of
    the remaining mass reaches p. Both thresholds are found by bisection over the bit patterns of float32, which are
    ordered like the numbers: 32 passes over the row, exact and without a sort.
    """
    order_BV = _ordered_bits(scaled_BV)
    num_kept_B = jnp.where(top_k_B >= 1, top_k_B, scaled_BV.shape[-1])
    floor_k_B = _largest_floor(order_BV, jnp.ones_like(scaled_BV), num_kept_B.astype(jnp.float32))
    mass_BV = jnp.where(order_BV >= floor_k_B[:, None], _exp_of_shifted(scaled_BV), 0.0)
    wanted_B = jnp.where(top_p_B < 1, top_p_B * jnp.sum(mass_BV, axis=-1), jnp.inf)
    floor_p_B = _largest_floor(order_BV, mass_BV, wanted_B)
    floor_B = jnp.maximum(jnp.where(top_k_B >= 1, floor_k_B, _LOWEST), jnp.where(top_p_B < 1, floor_p_B, _LOWEST))
    floor_B = jnp.minimum(floor_B, jnp.max(order_BV, axis=-1))  # always keep the best one, however small p is
    return jnp.where(floor_B == _LOWEST, -jnp.inf, _from_ordered_bits(floor_B))


def search_cdf(weights_BV: jax.Array, uniform_B: jax.Array) -> jax.Array:
    """Return the first token whose running sum of weights exceeds `uniform` times the total; never one of weight 0."""
    padding = -weights_BV.shape[-1] % CDF_BLOCK
    blocks_BNC = jnp.pad(weights_BV, ((0, 0), (0, padding))).reshape(len(weights_BV), -1, CDF_BLOCK)
    block_ends_BN = jnp.cumsum(jnp.sum(blocks_BNC, axis=-1), axis=-1)
    block_B, before_B = _first_above(block_ends_BN, uniform_B * block_ends_BN[:, -1])
    ends_BC = jnp.cumsum(jnp.take_along_axis(blocks_BNC, block_B[:, None, None], axis=1)[:, 0], axis=-1)
    inside_B, _ = _first_above(ends_BC, uniform_B * block_ends_BN[:, -1] - before_B)
    return jnp.minimum(block_B * CDF_BLOCK + inside_B, weights_BV.shape[-1] - 1)


def prompt_scores(
    logits_NV: jax.Array,
    targets_NK: jax.Array,
    uniform_ND: jax.Array,
    temperature: jax.Array,
    *,
    num_top: int,
    want_top: jax.Array,
) -> tuple[jax.Array, ...]:
    """Score prompt rows at temperature 1: logprobs of targets [N, K], best tokens and their logprobs [N, num_top].

    Targets below 0 yield 0. The best tokens are computed only if `want_top` is set at run time; else they are zeros.
    Last come tokens that are drawn at `temperature` and their logprobs [N, D], zeros if it is NOT_DRAWN.
    """
    logp_NV = log_softmax(logits_NV)
    found_NK = jnp.take_along_axis(logp_NV, jnp.maximum(targets_NK, 0), axis=-1)
    top_ids, top_logp = top_logprobs(logp_NV, num_top=num_top, wanted=want_top)
    drawn, drawn_logp = prompt_draws(logits_NV, logp_NV, uniform_ND, temperature)
    return jnp.where(targets_NK >= 0, found_NK, 0.0), top_ids, top_logp, drawn, drawn_logp


def prompt_draws(
    logits_NV: jax.Array, logp_NV: jax.Array, uniform_ND: jax.Array, temperature: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Draw a token for each random number. Row after row, so that it takes memory for one."""

    def one(of_row: tuple[jax.Array, jax.Array]) -> jax.Array:
        logits_V, uniform_D = of_row
        weights_1V = _exp_of_shifted(logits_V[None] / jnp.where(temperature > 0, temperature, 1.0))
        drawn_D = jax.vmap(lambda number: search_cdf(weights_1V, number[None])[0])(uniform_D)
        return jnp.where(temperature > 0, drawn_D, jnp.argmax(logits_V)).astype(jnp.int32)

    def search() -> tuple[jax.Array, jax.Array]:
        drawn_ND = lax.map(one, (logits_NV, uniform_ND))
        return drawn_ND, jnp.take_along_axis(logp_NV, drawn_ND, axis=-1)

    shape = uniform_ND.shape
    with jax.named_scope("draw_alternatives"):
        found: tuple[jax.Array, jax.Array] = lax.cond(
            temperature != NOT_DRAWN, search, lambda: (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))
        )
    return found


def top_logprobs(logp_BV: jax.Array, *, num_top: int, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the `num_top` best tokens per row, best first, or zeros if not `wanted` (a run-time switch)."""

    def search() -> tuple[jax.Array, jax.Array]:
        values, ids = lax.top_k(logp_BV, num_top)
        return ids.astype(jnp.int32), values

    shape = (len(logp_BV), num_top)
    with jax.named_scope("alternatives"):
        best: tuple[jax.Array, jax.Array] = lax.cond(
            wanted, search, lambda: (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))
        )
    return best


_LOWEST = -(2**31)


def _first_above(ends_BN: jax.Array, level_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the index of the first running sum above the level, and the sum before it.

    Rounding may raise the level to the last sum, above which there is none. So the level is kept just below it.
    """
    below_last_B = jnp.nextafter(ends_BN[:, -1], jnp.float32(0.0))
    level_B1 = jnp.clip(level_B, 0.0, below_last_B)[:, None]
    index_B = jnp.argmax(ends_BN > level_B1, axis=-1)
    before_B = jnp.take_along_axis(ends_BN, jnp.maximum(index_B - 1, 0)[:, None], axis=-1)[:, 0]
    return index_B, jnp.where(index_B > 0, before_B, 0.0)


def _exp_of_shifted(scaled_BV: jax.Array) -> jax.Array:
    return jnp.exp(scaled_BV - jnp.max(scaled_BV, axis=-1, keepdims=True))


def _largest_floor(order_BV: jax.Array, mass_BV: jax.Array, wanted_B: jax.Array) -> jax.Array:
    """Return the largest floor (as ordered bits) with at least the mass `wanted` at or above it; else the lowest."""

    def enough(floor_B: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(order_BV >= floor_B[:, None], mass_BV, 0.0), axis=-1) >= wanted_B

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low_B, high_B = bounds  # invariant: enough(low) or low is the lowest; not enough(high)
        middle_B = (low_B >> 1) + (high_B >> 1) + (low_B & high_B & 1)  # the mean without overflow
        good_B = enough(middle_B)
        return jnp.where(good_B, middle_B, low_B), jnp.where(good_B, high_B, middle_B)

    lowest_B = jnp.full(wanted_B.shape, _LOWEST, jnp.int32)
    highest_B = jnp.full(wanted_B.shape, 2**31 - 1, jnp.int32)
    floor_B: jax.Array = lax.fori_loop(0, 32, halve, (lowest_B, highest_B))[0]
    return floor_B


def _ordered_bits(x: jax.Array) -> jax.Array:
    """Map float32 to int32 preserving the order: the bits, flipped for negative numbers."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)  # -0 and 0 are equal and must tie
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _from_ordered_bits(order: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(jnp.where(order < 0, order ^ jnp.int32(0x7FFFFFFF), order), jnp.float32)
