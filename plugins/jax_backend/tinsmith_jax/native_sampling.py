"""Sampling on a CPU by the kernels in C++: the layers over tokens, and the draw. The arithmetic is that of decode.py.

Each token is a row by itself, with a position and the pages of its sequence, so a prompt's tokens and those that are
decoded take the same way. Rows that are not in use cost nothing, and a row's bits do not depend on the others.

Suffixes as in decode.py; here N = rows, of which T belong to each of B sequences.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tinsmith_jax.kernels import native
from tinsmith_jax.layers import rope_angles
from tinsmith_jax.mesh import ONE
from tinsmith_jax.model_config import ModelConfig
from tinsmith_jax.sampling_head import RowParams, truncation_floor, uniform
from tinsmith_jax.trunk import LAYER_MODULES, embed

# Any: nested dictionaries of arrays (described in weights.py and adapters.py), and jax or NumPy arrays.
Tree = Any
Parts = Sequence[jax.Array]
"""The cache's keys and values."""

_NORMS = ("input_norm", "q_norm", "k_norm", "post_norm")
_MATRICES = ("qkv", "o", "gate_up", "down")
_ABSENT = np.zeros((1, 0), np.float32)  # in place of norms that a model does not have


class Rows:
    """Tokens [B, T] of sequences, their positions or -1 if not in use, and each sequence's pages and adapter."""

    def __init__(self, token_BT: Any, position_BT: Any, table_BG: Any, adapter_B: Any) -> None:
        self.token_N, self.position_N = token_BT.reshape(-1), position_BT.reshape(-1)
        self.table_BG, self.adapter_B = table_BG, adapter_B


def hidden_states(
    config: ModelConfig, base: Tree, resident: Tree, cache: Parts, rows: Rows, *, rounds: bool
) -> tuple[Parts, jax.Array]:
    """Write the rows' keys and values and return the normed hidden states [N, H], zeros for rows not in use."""
    return _layers(config, base, resident, cache, rows, config.hidden_size, gives_logits=False, rounds=rounds)


def logits(
    config: ModelConfig, base: Tree, resident: Tree, cache: Parts, rows: Rows, *, rounds: bool
) -> tuple[Parts, jax.Array]:
    """Do so and return the logits [N, V], which mean nothing for rows not in use."""
    return _layers(config, base, resident, cache, rows, config.vocab_size, gives_logits=True, rounds=rounds)


def draw(
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
        native.DRAW,
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


def _layers(
    config: ModelConfig,
    base: Tree,
    resident: Tree,
    cache: Parts,
    rows: Rows,
    width: int,
    *,
    gives_logits: bool,
    rounds: bool,
) -> tuple[Parts, jax.Array]:
    x_NH = embed(base["embed"], rows.token_N, ONE).astype(jnp.float32)
    cos_ND, sin_ND = rope_angles(rows.position_N, config.rope.inv_freq, config.rope.factor)
    norms = [*(base["layers"].get(name, _ABSENT) for name in _NORMS), base["final_norm"]]
    matrices = [*(base["layers"][name] for name in _MATRICES), base["head"]]
    adapters = [factor for name in LAYER_MODULES for factor in resident["layers"][name]]
    arguments = (
        *(x_NH, rows.position_N, rows.table_BG, rows.adapter_B, resident["rank"], resident["scale"], cos_ND, sin_ND),
        *(norm.astype(np.float32) for norm in norms),
        *(*matrices, *adapters, *resident["head"], *cache),
    )
    results = [jax.ShapeDtypeStruct(part.shape, part.dtype) for part in cache]
    call = jax.ffi.ffi_call(
        native.LAYERS,
        (*results, jax.ShapeDtypeStruct((len(x_NH), width), jnp.float32)),
        input_output_aliases={len(arguments) - 2: 0, len(arguments) - 1: 1},
    )
    *written, out = call(*arguments, eps=np.float32(config.rms_norm_eps), gives_logits=gives_logits, rounds=rounds)
    return written, out
