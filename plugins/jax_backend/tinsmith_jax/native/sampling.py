"""Sampling on a CPU by the kernels in C++: the layers over tokens, and the draw. Same arithmetic as decode.py.

Each token is a row by itself, with a position and the pages of its sequence, so a prompt's tokens and those that are
decoded take the same way. Rows that are not in use cost nothing, and a row's bits do not depend on the others.

Suffixes as in decode.py; here N = rows, of which T belong to each of B sequences.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tinsmith_jax import adapters, gated_delta
from tinsmith_jax.jax_types import Jax
from tinsmith_jax.layers import rope_angles
from tinsmith_jax.mesh import ONE, Axes, Spec
from tinsmith_jax.model_config import ModelConfig
from tinsmith_jax.native import head, loading, memory
from tinsmith_jax.sampling_head import top_logprobs, truncation_floor, uniform
from tinsmith_jax.sampling_values import Cache, Dispatch, RowParams, SamplingShape, SlotState, TokenTiles, Weights
from tinsmith_jax.tiles import Tiles

_NORMS = ("input_norm", "q_norm", "k_norm", "post_norm")
_MATRICES = ("qkv", "o", "gate_up", "down")
_DELTA_MATRICES = (gated_delta.IN, gated_delta.OUT)
_ABSENT = np.zeros((1, 0), np.float32)  # in place of norms that a model does not have


class _Rows:
    """Tokens [B, T] of sequences, their positions or -1 if not in use, and each one's pages, adapter and states."""

    def __init__(self, token_BT: Jax, position_BT: Jax, table_BG: Jax, adapter_B: Jax, state_B2: Jax) -> None:
        self.token_N, self.position_N = token_BT.reshape(-1), position_BT.reshape(-1)
        self.table_BG, self.adapter_B, self.state_B2 = table_BG, adapter_B, state_B2


@dataclass(frozen=True, slots=True)
class Sampling:
    """The kernels' `decode.Arithmetic`, of one device."""

    config: ModelConfig
    shape: SamplingShape

    @property
    def axes(self) -> Axes:
        return ONE

    # What lies on the device: an adapter's row comes with its rank class and scale ------------------------------------

    def resident(self, pairs: Jax) -> Jax:
        (rows, *_), i32, f32 = pairs["head"][0].shape, jnp.dtype(jnp.int32), jnp.dtype(jnp.float32)
        return {**pairs, "rank": jax.ShapeDtypeStruct((rows,), i32), "scale": jax.ShapeDtypeStruct((rows,), f32)}

    def resident_specs(self, specs: Jax) -> Jax:
        return {**specs, "rank": Spec(), "scale": Spec()}

    def empty(self, shapes: tuple[Cache, Jax], shardings: Jax) -> tuple[Cache, Jax]:
        """Nothing is written: pages and rows take memory when something is put there."""
        del shardings
        leaves, tree = jax.tree.flatten(shapes)
        cache, resident = jax.tree.unflatten(tree, jax.jit(jax.ffi.ffi_call(loading.UNTOUCHED, leaves))())
        for array in jax.tree.leaves((cache, _factors(resident))):
            memory.take_with_use(array)
        return cache, resident

    def give_back(self, cache: Cache, resident: Jax, pages: Sequence[int], rows: Sequence[int]) -> None:
        for array in cache.pages:
            memory.give_back(array, array.ndim - 4, pages)
        for array in jax.tree.leaves(_factors(resident)):
            memory.give_back(array, array.ndim - 3, rows)

    def write_adapter(self, resident: Jax, adapter: Jax, row: jax.Array, scale: jax.Array) -> Jax:
        """Write the rank and the scale beside: the kernels multiply by the scale where training does.

        Of the layers, they read nothing past the rank.
        """
        layers = {
            name: adapters.put_row(resident["layers"][name], pair, row, pads=False)
            for name, pair in adapter["layers"].items()
        }
        return {
            "layers": layers,
            "head": adapters.put_row(resident["head"], adapter["head"], row),
            "rank": resident["rank"].at[row].set(adapter["head"][0].shape[-1]),
            "scale": resident["scale"].at[row].set(scale),
        }

    # Programs ---------------------------------------------------------------------------------------------------------

    def read(self, weights: Weights, cache: Cache, tiles: TokenTiles) -> tuple[Cache, jax.Array, None]:
        index_T = jnp.arange(tiles.tokens_NT.shape[1])
        position_NT = jnp.where(tiles.tokens_NT >= 0, tiles.start_N[:, None] + index_T, -1)
        rows = _Rows(jnp.maximum(tiles.tokens_NT, 0), position_NT, tiles.table_NG, tiles.adapter_N, tiles.state_N2)
        cache, hidden_NH = self._layers(weights, cache, rows, self.config.hidden_size, gives_logits=False)
        return cache, hidden_NH.reshape(*tiles.tokens_NT.shape, -1), None

    def prompt_logits(self, weights: Weights, hidden_TH: jax.Array, row: jax.Array) -> jax.Array:
        own = Tiles(row[None], weights.resident["scale"][row][None])
        logits_TV: jax.Array = head.logits(
            weights.base["head"], weights.resident["head"], hidden_TH, own, rounds=self.shape.rounds
        )
        return logits_TV

    def drawing(
        self, weights: Weights, given: Dispatch
    ) -> Callable[[Cache, SlotState], tuple[Cache, tuple[jax.Array, ...], None]]:
        num_rows, num_used = given.state.token_B.shape[0], jnp.sum(given.state.left_B > 0)

        def draw_next(cache: Cache, now: SlotState) -> tuple[Cache, tuple[jax.Array, ...], None]:
            position_B = jnp.where(jnp.arange(num_rows) < num_used, now.position_B, -1)
            rows = _Rows(now.token_B, position_B, now.table_BG, now.adapter_B, now.state_B2)
            cache, logits_BV = self._layers(weights, cache, rows, self.config.vocab_size, gives_logits=True)
            token_B, logprob_B, logp_BV = _draw(
                logits_BV, given.params, now.position_B + 1, num_used, any_truncated=given.switches.any_truncated
            )
            top = top_logprobs(logp_BV, num_top=self.shape.max_top, wanted=given.switches.any_top)
            return cache, (token_B, logprob_B, *top), None

        return draw_next

    def _layers(
        self, weights: Weights, cache: Cache, rows: _Rows, width: int, *, gives_logits: bool
    ) -> tuple[Cache, jax.Array]:
        """Write the rows' keys, values and states. Return the normed hidden states [N, H], zeros for rows not in use.

        Or the logits [N, V], which mean nothing for these.
        """
        config, (base, resident) = self.config, weights
        x_NH = base["embed"][rows.token_N].astype(jnp.float32)
        (rope,) = [kind.rope for kind in config.kinds if kind.rope is not None]
        cos_ND, sin_ND = rope_angles(rows.position_N, rope.inv_freq, rope.factor)
        norms = [*(base["layers"].get(name, _ABSENT) for name in _NORMS), base["final_norm"]]
        matrices = [*(base["layers"][name] for name in _MATRICES), base["head"]]
        factors = [factor for name in adapters.HF_MODULES for factor in resident["layers"][name]]
        arguments = (
            *(x_NH, rows.position_N, rows.table_BG, rows.adapter_B, resident["rank"], resident["scale"]),
            *(cos_ND, sin_ND, *(norm.astype(np.float32) for norm in norms)),
            *(*matrices, *factors, *resident["head"]),
            *(() if config.delta is None else self._recurrence(weights, rows)),
        )
        kept, tree = jax.tree.flatten(cache)
        results = [jax.ShapeDtypeStruct(part.shape, part.dtype) for part in kept]
        call = jax.ffi.ffi_call(
            loading.LAYERS,
            (*results, jax.ShapeDtypeStruct((len(x_NH), width), jnp.float32)),
            input_output_aliases={len(arguments) + n: n for n in range(len(kept))},
        )
        eps, rounds, recurs = np.float32(config.rms_norm_eps), self.shape.rounds, config.delta is not None
        *kept, out = call(*arguments, *kept, eps=eps, gives_logits=gives_logits, rounds=rounds, recurs=recurs)
        return jax.tree.unflatten(tree, kept), out

    def _recurrence(self, weights: Weights, rows: _Rows) -> tuple[Jax, ...]:
        """Return what the kernels take besides of a model with layers of the gated delta rule."""
        config, (base, resident) = self.config, weights
        of_layers = np.array([config.kinds[kind].delta is not None for kind in config.pattern], np.int32)
        modules = (*gated_delta.INPUTS, gated_delta.OUT)
        convolution_LwC = jnp.swapaxes(base["layers"][gated_delta.CONVOLUTION], 1, 2)
        vectors = (convolution_LwC, *(base["layers"][name] for name in ("delta_decay", "delta_step", "delta_norm")))
        return (
            *(of_layers, rows.state_B2, *(base["layers"][name] for name in _DELTA_MATRICES)),
            *(factor for name in modules for factor in resident["layers"][name]),
            *(vector.astype(np.float32) for vector in vectors),
        )


def _factors(resident: Jax) -> Jax:
    return {name: resident[name] for name in ("layers", "head")}


def _draw(
    logits_BV: jax.Array, params: RowParams, position_B: jax.Array, count: jax.Array, *, any_truncated: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draw a token for each of the first `count` rows; see sampling_head.draw. The others mean nothing."""
    B, V = logits_BV.shape

    def floors() -> jax.Array:
        def one(n: jax.Array, floor_B: jax.Array) -> jax.Array:
            logits_1V, scale, top_k, top_p = (
                lax.dynamic_slice_in_dim(part, n, 1) for part in (logits_BV, scale_B, params.top_k_B, params.top_p_B)
            )
            return floor_B.at[n].set(truncation_floor(logits_1V * scale[:, None], top_k, top_p)[0])

        floor_B: jax.Array = lax.fori_loop(0, count, one, jnp.full(B, -jnp.inf, jnp.float32))
        return floor_B

    # The floor is one of the scaled logits, so both sides multiply: a quotient might be rounded in another way.
    scale_B = 1.0 / jnp.where(params.temperature_B <= 0, 1.0, params.temperature_B)
    floor_B = lax.cond(any_truncated, floors, lambda: jnp.full(B, -jnp.inf, jnp.float32))
    call = jax.ffi.ffi_call(
        loading.DRAW,
        (
            jax.ShapeDtypeStruct((B,), jnp.int32),
            jax.ShapeDtypeStruct((B,), jnp.float32),
            jax.ShapeDtypeStruct((B, V), jnp.float32),
        ),
    )
    token_B, logprob_B, logp_BV = call(
        logits_BV, count[None], params.temperature_B, scale_B, floor_B, uniform(params, position_B)
    )
    return token_B, logprob_B, logp_BV
