"""Mamba-2: a state space whose decay is one number per head and token, over sequences that start on tile boundaries.

Every value head has a matrix S [dk, dv] as its state. A token decays it, adds its key and value, and reads it with its
query (state-space duality, arXiv 2405.21060, which calls queries C, keys B, and values x):

    S = exp(-dt exp(A_log)) S + k (dt v)^T;   o = q S + D v;   dt = softplus(step + bias)

It is the gated delta rule without corrections, so inputs, states, scan and convolution are of gated_delta.py: its
`beta` is dt here. Queries and keys are shared by the heads of a group.

Legend as in gated_delta.py; V = H dv.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from tinsmith_jax.gated_delta import DeltaInputs, decays_of, dot, over_sequences, per_value, wide_type
from tinsmith_jax.jax_types import Jax
from tinsmith_jax.layers import rms_norm
from tinsmith_jax.model_config import ModelConfig
from tinsmith_jax.tiles import TILE

INPUTS = ("mamba_in",)
"""The modules of adapters that read the input of a layer."""
IN, OUT, CONVOLUTION, CONVOLUTION_BIAS = "mamba_in", "mamba_o", "mamba_conv", "mamba_conv_bias"


def scan(inputs: DeltaInputs, first_n: Jax, *, chunk: int = TILE) -> Jax:
    """Apply the rule to each sequence of a packed stream, as `gated_delta.scan` does: return [T, H, dv]."""
    return over_sequences(advance, inputs, first_n, chunk=chunk)


def advance(state: Jax, inputs: DeltaInputs) -> tuple[Jax, Jax]:
    """Take a chunk of one sequence's tokens. Return the state [H, dk, dv] after them, and the output [c, H, dv]."""
    q, k, v, g = _by_head(inputs)
    scores = per_value(dot("nid,njd->nij", q, k), v)
    q, k = per_value(q, v), per_value(k, v)
    decays, left = decays_of(g)
    out = dot("hik,hkv->hiv", q * left, state) + dot("hij,hjv->hiv", scores * decays, v)
    new = state * left[:, -1:] + dot("hik,hiv->hkv", k * decays[:, -1, :, None], v)
    return new, out.transpose(1, 0, 2)


def step(state: Jax, inputs: DeltaInputs) -> tuple[Jax, Jax]:
    """Take one token as the rule says, where the token's axis is left out. Return the state, and the output [H, dv]."""
    q, k, v, g = (x[:, 0] for x in _by_head(jax.tree.map(lambda x: x[None], inputs)))
    q, k = per_value(q, v), per_value(k, v)
    state = state * jnp.exp(g)[:, None, None] + k[..., None] * v[:, None, :]
    return state, (state * q[..., None]).sum(axis=1)


def _by_head(inputs: DeltaInputs) -> tuple[Jax, ...]:
    """Return wide inputs, heads first; values are multiplied by their time steps."""
    wide = wide_type(inputs.v.dtype)
    q, k, v, g, time = (jnp.swapaxes(x.astype(wide), 0, 1) for x in inputs)
    return q, k, v * time[..., None], g


# In a layer -----------------------------------------------------------------------------------------------------------


def projected(product: Jax, deltas: tuple[Jax, ...], config: ModelConfig) -> tuple[Jax, Jax, Jax]:
    """Add the LoRA part to the projection, and split it: what is convolved, the gate, and the steps [..., H]."""
    assert config.mamba is not None, "the model has such layers"
    gate, mixed, time = jnp.split(product + deltas[0], np.cumsum(config.mamba.sizes[:-1]), axis=-1)
    return mixed, gate, time


def inputs_of(mixed: Jax, time: Jax, weights: Mapping[str, Jax], config: ModelConfig) -> DeltaInputs:
    """Return what the rule takes, given what the convolution gives [..., C], and the steps [..., H]."""
    sizes = config.mamba
    assert sizes is not None, "the model has such layers"
    keys = sizes.key_heads * sizes.key_dim
    v, k, q = jnp.split(jax.nn.silu(mixed), (sizes.value_size, sizes.value_size + keys), axis=-1)
    q, k = (x.reshape(*x.shape[:-1], sizes.key_heads, sizes.key_dim) for x in (q, k))
    v = v.reshape(*v.shape[:-1], sizes.value_heads, sizes.value_dim)
    wide = wide_type(time.dtype)
    time = jax.nn.softplus(time.astype(wide) + weights["mamba_step"].astype(wide))
    return DeltaInputs(q, k, v, -jnp.exp(weights["mamba_decay"].astype(wide)) * time, time)


def with_skip(out_Hv: Jax, inputs: DeltaInputs, weights: Mapping[str, Jax]) -> Jax:
    """Add what passes the state by to the output [..., H, dv] of the rule."""
    return out_Hv + (weights["mamba_skip"][:, None] * inputs.v).astype(out_Hv.dtype)


def finished(
    out_THv: Jax, gate: Jax, weights: Mapping[str, Jax], config: ModelConfig, by_tile: Callable[..., Jax]
) -> Jax:
    """Gate the output [..., H, dv] by [..., V], and normalise it by groups: return [..., V]."""
    assert config.mamba is not None, "the model has such layers"
    groups = config.mamba.key_heads
    wide = wide_type(gate.dtype)
    gated = out_THv.reshape(gate.shape).astype(wide) * jax.nn.silu(gate.astype(wide))
    weight = weights["mamba_norm"].reshape(groups, -1)
    normed = by_tile(lambda x: rms_norm(x, weight, config.rms_norm_eps), gated.reshape(*gate.shape[:-1], groups, -1))
    return normed.reshape(gate.shape).astype(gate.dtype)
