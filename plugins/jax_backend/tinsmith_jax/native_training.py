"""The layers in training on a CPU, by the kernels in C++. The arithmetic is that of trunk.py.

A pass costs what its tokens cost: unused tiles and the ends of others are left out.

Legend: T = tokens, n = T / TILE tiles, H = hidden, Q = queries of all heads, L = layers.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tinsmith_jax.kernels import native
from tinsmith_jax.layers import Tiles
from tinsmith_jax.model_config import ModelConfig

# Any below: jax arrays and pytrees of them.
_ABSENT = np.zeros((1, 0), np.float32)  # in place of norms that a model does not have
_MATRICES = ("qkv", "o", "gate_up", "down")
_NORMS = ("input_norm", "q_norm", "k_norm", "post_norm")
_MODULES = ("q", "k", "v", "o", "gate", "up", "down")


class _Weights(NamedTuple):
    """What the layers multiply with. Each adapter comes as it is: joining them would copy them all."""

    base: tuple[Any, ...]  # matrices and norms
    adapters: tuple[Any, ...]


class How(NamedTuple):
    config: ModelConfig
    rounds: bool  # to bfloat16, what the model's matrices multiply


def layers(
    x_TH: Any,
    weights: Any,
    how: How,
    adapters: Sequence[Any],
    tiles: Tiles,
    angles: Any,
    place_n: tuple[Any, Any],
    sums: Any,
) -> Any:
    """Return what the layers make of `x_TH`, zeros where there is no token.

    `adapters` are the layers of each, and so are `sums`. `place_n` says how many tokens each tile has, and which tile
    is the first of its sequence.

    If there are `sums`, reverse differentiation by them yields the sums plus the gradients of the adapters, and nothing
    by anything else. Of adapters without tokens, it yields whatever lay in memory.
    """
    stream = (*place_n, tiles.adapter_n, tiles.scale_n, *angles)
    norms = (weights.get(name, _ABSENT).astype(np.float32) for name in _NORMS)
    given = _Weights((*(weights[name] for name in _MATRICES), *norms), tuple(adapters))
    x_TH = x_TH.astype(jnp.float32)
    if sums is None:
        (out_TH,) = _forward(how, x_TH, stream, given, ())
        return out_TH
    return _summing(how, x_TH, stream, given, sums)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summing(how: How, x_TH: Any, stream: Any, given: _Weights, sums: Any) -> Any:
    del sums
    return _forward(how, x_TH, stream, given, ())[0]


def _summing_forward(how: How, x_TH: Any, stream: Any, given: _Weights, sums: Any) -> tuple[Any, Any]:
    rank = sums[0]["q"][0].shape[-1]
    out_TH, *saved = _forward(how, x_TH, stream, given, _saved_sizes(how.config, rank))
    return out_TH, (stream, given, sums, saved)


def _summing_backward(how: How, kept: Any, d_TH: Any) -> tuple[None, None, None, Any]:
    stream, given, sums, saved = kept
    before = _in_order(sums)
    call = jax.ffi.ffi_call(native.BACKWARD, [jax.ShapeDtypeStruct(part.shape, part.dtype) for part in before])
    after = iter(
        call(d_TH, *stream, *given.base, *_in_order(given.adapters), *saved, *before, **_attributes(how, given))
    )
    return None, None, None, tuple({name: (next(after), next(after)) for name in _MODULES} for _ in sums)


_summing.defvjp(_summing_forward, _summing_backward)


def _forward(how: How, x_TH: Any, stream: Any, given: _Weights, saved_sizes: tuple[int, ...]) -> Any:
    """Return the output [T, H] and what is to be saved of each layer: [L, T, size]."""
    T, H = x_TH.shape
    shapes = [(T, H), *((how.config.num_layers, T, size) for size in saved_sizes)]
    call = jax.ffi.ffi_call(native.FORWARD, [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes])
    return call(x_TH, *stream, *given.base, *_in_order(given.adapters), **_attributes(how, given))


def _saved_sizes(config: ModelConfig, rank: int) -> tuple[int, ...]:
    """Return the floats per token: inputs, projections, attended, sums of scores, middle, gate and up, low ranks."""
    H, Q = config.hidden_size, config.q_size
    return H, Q + 2 * config.kv_size, Q, Q // config.head_dim, H, 2 * config.intermediate_size, len(_MODULES) * rank


def _attributes(how: How, given: _Weights) -> dict[str, Any]:
    eps, number = np.float32(how.config.rms_norm_eps), np.int32(len(given.adapters))
    return {"eps": eps, "adapters": number, "rounds": how.rounds}


def _in_order(adapters: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(factor for each in adapters for name in _MODULES for factor in each[name])
