"""Training on a CPU by the kernels in C++: the layers, and the optimizer's step.

Same arithmetic as trunk.py and optimizer.py. A pass costs what its tokens cost: unused tiles and the ends of
others are left out.

Legend: T = tokens, n = T / TILE tiles, H = hidden, Q = queries of all heads, L = layers.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tinsmith_jax import adapters as lora
from tinsmith_jax.adapters import Adapter
from tinsmith_jax.jax_types import Jax
from tinsmith_jax.layers import encoded_positions, rms_norm
from tinsmith_jax.model_config import ModelConfig
from tinsmith_jax.native import loading
from tinsmith_jax.native.head import Head
from tinsmith_jax.optimizer import Hyper, State
from tinsmith_jax.tiles import Tiles
from tinsmith_jax.weights import Base

_ABSENT = np.zeros((1, 0), np.float32)  # in place of norms that a model does not have
_MATRICES = ("qkv", "o", "gate_up", "down")
_NORMS = ("input_norm", "q_norm", "k_norm", "post_norm")
_MODULES = ("q", "k", "v", "o", "gate", "up", "down")


class _Weights(NamedTuple):
    """The weights of the layers. Adapters are not joined, which would copy all of them."""

    base: tuple[Jax, ...]  # matrices and norms
    adapters: tuple[Jax, ...]


class _How(NamedTuple):
    config: ModelConfig
    rounds: bool  # to bfloat16, what the model's matrices multiply


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The kernels' `train_step.Arithmetic`, of one device."""

    config: ModelConfig
    rounds: bool

    @property
    def chunks(self) -> Head:
        return Head(self.rounds)

    def stack(self, each: Sequence[Adapter]) -> Adapter:
        """Join the heads alone: the kernels take the layers of one adapter after the other."""
        heads = [{"head": adapter["head"]} for adapter in each]
        return {"layers": tuple(adapter["layers"] for adapter in each), **lora.stack(heads)}

    def unstack(self, stacked: Adapter, rows: Iterable[Jax]) -> tuple[Adapter, ...]:
        """Take all rows apart."""
        heads = lora.unstack({"layers": {}, "head": stacked["head"]}, rows)
        return tuple({**head, "layers": own} for own, head in zip(stacked["layers"], heads, strict=True))

    def forward(
        self,
        base: Base,
        tokens_T: Jax,
        positions_T: Jax,
        adapters: Adapter,
        tiles: Tiles,
        *,
        count_n: Jax,
        sums: Jax = None,
        replayed_LTC: Jax = None,
    ) -> tuple[Jax, None]:
        """Do as `trunk.packed_forward`.

        `adapters` holds the layers of each, and so does `sums`. If there are sums, reverse differentiation by them
        yields the sums plus the gradients of the adapters, and nothing by anything else. Of adapters without tokens, it
        yields whatever lay in memory.
        """
        assert replayed_LTC is None, "these models have no experts"
        encoding, first_n = encoded_positions(positions_T, self.config)
        (angles,) = encoding.angles
        stream = (count_n, first_n, tiles.adapter_n, tiles.scale_n, *angles)
        weights = base["layers"]
        norms = (weights.get(name, _ABSENT).astype(np.float32) for name in _NORMS)
        given = _Weights((*(weights[name] for name in _MATRICES), *norms), tuple(adapters["layers"]))
        how, x_TH = _How(self.config, self.rounds), base["embed"][tokens_T].astype(jnp.float32)
        if sums is None:
            (out_TH,) = _forward(how, x_TH, stream, given, ())
        else:
            out_TH = _summing(how, x_TH, stream, given, sums)
        return rms_norm(out_TH, base["final_norm"], self.config.rms_norm_eps), None

    def step(self, state: State, pending: Adapter, hyper: Hyper) -> tuple[State, Jax]:
        """Do as `optimizer.adamw`, in one call for all arrays, of which XLA's program makes a hundred small ones."""
        before = [factor for part in state for factor in _all_in_order(part)]
        like = [jax.ShapeDtypeStruct(factor.shape, factor.dtype) for factor in before]
        call = jax.ffi.ffi_call(loading.STEP, [*like, jax.ShapeDtypeStruct((), jnp.float32)])
        scalars = jnp.stack([jnp.asarray(each, jnp.float32) for each in hyper])
        *after, norm = call(scalars, *before, *_all_in_order(pending))
        factors = iter(after)
        return State(*({"layers": _layers_of(factors), "head": (next(factors), next(factors))} for _ in state)), norm


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summing(how: _How, x_TH: Jax, stream: Jax, given: _Weights, sums: Jax) -> Jax:
    del sums
    return _forward(how, x_TH, stream, given, ())[0]


def _summing_forward(how: _How, x_TH: Jax, stream: Jax, given: _Weights, sums: Jax) -> tuple[Jax, Jax]:
    rank = sums[0]["q"][0].shape[-1]
    out_TH, *saved = _forward(how, x_TH, stream, given, _saved_sizes(how.config, rank))
    return out_TH, (stream, given, sums, saved)


def _summing_backward(how: _How, kept: Jax, d_TH: Jax) -> tuple[None, None, None, Jax]:
    stream, given, sums, saved = kept
    before = _in_order(sums)
    call = jax.ffi.ffi_call(loading.BACKWARD, [jax.ShapeDtypeStruct(part.shape, part.dtype) for part in before])
    after = iter(
        call(d_TH, *stream, *given.base, *_in_order(given.adapters), *saved, *before, **_attributes(how, given))
    )
    return None, None, None, tuple(_layers_of(after) for _ in sums)


_summing.defvjp(_summing_forward, _summing_backward)


def _forward(how: _How, x_TH: Jax, stream: Jax, given: _Weights, saved_sizes: tuple[int, ...]) -> Jax:
    """Return the output [T, H] and each layer's values to save: [L, T, size]."""
    T, H = x_TH.shape
    shapes = [(T, H), *((how.config.num_layers, T, size) for size in saved_sizes)]
    call = jax.ffi.ffi_call(loading.FORWARD, [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes])
    return call(x_TH, *stream, *given.base, *_in_order(given.adapters), **_attributes(how, given))


def _saved_sizes(config: ModelConfig, rank: int) -> tuple[int, ...]:
    """Return the floats per token: inputs, projections, attended, sums of scores, middle, gate and up, low ranks."""
    H, Q = config.hidden_size, config.q_size
    return H, Q + 2 * config.kv_size, Q, Q // config.head_dim, H, 2 * config.intermediate_size, len(_MODULES) * rank


def _attributes(how: _How, given: _Weights) -> dict[str, Jax]:
    eps, number = np.float32(how.config.rms_norm_eps), np.int32(len(given.adapters))
    return {"eps": eps, "adapters": number, "rounds": how.rounds}


def _in_order(adapters: Sequence[Jax]) -> tuple[Jax, ...]:
    return tuple(factor for each in adapters for name in _MODULES for factor in each[name])


def _all_in_order(adapter: Adapter) -> tuple[Jax, ...]:
    return *_in_order((adapter["layers"],)), *adapter["head"]


def _layers_of(factors: Iterator[Jax]) -> dict[str, tuple[Jax, Jax]]:
    """Undo `_in_order` for one adapter."""
    return {name: (next(factors), next(factors)) for name in _MODULES}
