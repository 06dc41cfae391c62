"""Layers with a recurrent state in sampling: tiles of sequences whose states lie in rows on the device.

Suffixes as in decode.py; here H = value heads, C = channels of the convolution, w = its width.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from tinsmith_jax import gated_delta
from tinsmith_jax.gated_delta import DeltaInputs
from tinsmith_jax.jax_types import Jax
from tinsmith_jax.mesh import Axes
from tinsmith_jax.model_config import ModelConfig
from tinsmith_jax.rules import rule_of
from tinsmith_jax.sampling_values import NO_STATE, Cache, States, TokenTiles


def mix(  # noqa: PLR0913 - bound to a layer
    h_NTH: jax.Array,
    cache: Cache,
    *,
    layer: jax.Array,
    weights: Jax,
    config: ModelConfig,
    tiles: TokenTiles,
    count: jax.Array,
    axes: Axes,
    dense: Callable[[jax.Array, jax.Array], jax.Array],
    deltas: Callable[..., tuple[jax.Array, ...]],
    by_tile: Callable[[Callable[[jax.Array], jax.Array], jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array, Cache]:
    """Mix tokens in a layer: return what it adds, the LoRA part of that, and the cache.

    `dense` multiplies with a matrix, and `deltas` gives the LoRA parts of modules by name.
    `layer` is the layer's index among those with a state.
    """
    assert cache.states is not None, "the model has such layers"
    rule = rule_of(config)
    product_NTo = dense(h_NTH, axes.whole(weights[rule.IN], 0))
    mixed, gate, *of_heads = rule.projected(product_NTo, deltas(h_NTH, *rule.INPUTS), config)
    out_NTHv, states = _advance(cache.states, layer, (mixed, *of_heads), weights, config, tiles, count, axes)
    out_NTV = rule.finished(out_NTHv, gate, weights, config, by_tile)
    product_NTH = dense(out_NTV, axes.whole(weights[rule.OUT], 1))
    delta_NTH = deltas(out_NTV, rule.OUT)[0] if config.delta is not None else jnp.zeros_like(product_NTH)
    return product_NTH, delta_NTH, cache._replace(states=states)


def _advance(
    states: States,
    layer: jax.Array,
    given: tuple[jax.Array, ...],
    weights: Jax,
    config: ModelConfig,
    tiles: TokenTiles,
    count: jax.Array,
    axes: Axes,
) -> tuple[jax.Array, States]:
    """Apply convolution and rule to the projected input. Return [N, T, H, dv] and the states.

    Tiles of a prompt go on one from the other, so they are taken one by one. So are decoded tokens on a CPU, in shapes
    that do not depend on their number. A dispatch of decoding writes other rows than it reads first: one that is
    repeated finds the former state.
    """
    rule, sizes, mixed_NTC = rule_of(config), config.recurrence, given[0]
    assert sizes is not None, "the model has such layers"
    is_token_NT = tiles.tokens_NT >= 0
    T = is_token_NT.shape[1]

    def one(states: States, is_token: Jax, rows: Jax, mixed: Jax, *of_heads: Jax) -> tuple[Jax, Jax, Jax]:
        """Return what a tile gives [T, H, dv], its state, and its tail."""
        begins = rows[0] == NO_STATE
        state, tail = (jnp.where(begins, 0, _at(part, layer, jnp.maximum(rows[0], 0))) for part in states)
        joined = jnp.concatenate([tail, jnp.where(is_token[:, None], mixed, 0)])
        convolved = gated_delta.convolve(joined, weights[rule.CONVOLUTION], weights.get(rule.CONVOLUTION_BIAS))
        inputs = rule.inputs_of(convolved, *of_heads, weights, config).masked(is_token)
        new_tail = lax.dynamic_slice_in_dim(joined, jnp.sum(is_token), len(tail))
        if T == 1:
            state, out = rule.step(state, DeltaInputs(*(x[0] for x in inputs)))
            out = out[None]
        else:
            state, out = rule.advance(state, inputs)
        return rule.with_skip(out, inputs, weights).astype(mixed.dtype), state, new_tail

    tiled = (is_token_NT, tiles.state_N2, *given)
    if T == 1 and not axes.kernels.equal_blocks:
        out, *new = jax.vmap(lambda *each: one(states, *each))(*tiled)
        at = (layer, tiles.state_N2[:, 1])
        return out, States(*(part.at[at].set(own) for part, own in zip(states, new, strict=True)))

    def put(n: jax.Array, carry: tuple[jax.Array, States]) -> tuple[jax.Array, States]:
        out, states = carry
        own, *new = one(states, *(x[n] for x in tiled))
        row = tiles.state_N2[n, 1]
        written = States(*(_put(part, layer, row, each) for part, each in zip(states, new, strict=True)))
        return lax.dynamic_update_index_in_dim(out, own, n, 0), written

    nothing = jnp.zeros((*is_token_NT.shape, sizes.value_heads, sizes.value_dim), mixed_NTC.dtype)
    with jax.named_scope("states"):
        found: tuple[jax.Array, States] = lax.fori_loop(0, count, put, (nothing, states))
    return found


def _at(part: jax.Array, layer: jax.Array, row: jax.Array) -> jax.Array:
    found: jax.Array = lax.dynamic_slice(part, (layer, row, *[0] * (part.ndim - 2)), (1, 1, *part.shape[2:]))[0, 0]
    return found


def _put(part: jax.Array, layer: jax.Array, row: jax.Array, value: jax.Array) -> jax.Array:
    written: jax.Array = lax.dynamic_update_slice(part, value[None, None], (layer, row, *[0] * (part.ndim - 2)))
    return written
