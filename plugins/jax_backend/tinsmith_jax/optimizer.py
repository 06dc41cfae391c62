"""AdamW for one adapter, exactly as torch.optim.AdamW computes it.

`optax` is not used: it computes 1 - beta and the bias corrections in float32, a relative error of 3e-5 at beta 0.999.
Here they are computed on the host in float64, once per step.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tinsmith import AdamParams, LoraConfig
from tinsmith_jax.adapters import Adapter
from tinsmith_jax.jax_types import Jax
from tinsmith_jax.mesh import ONE, Axes


class State(NamedTuple):
    """The state that a step changes. Each field is an adapter pytree."""

    weights: Adapter
    m: Adapter
    v: Adapter


class Hyper(NamedTuple):
    """Scalars of one adapter's step, float32 except `rank`."""

    decay: Jax  # 1 - lr * weight_decay
    step_size: Jax  # lr / (1 - beta1**t)
    beta1: Jax
    one_minus_beta1: Jax
    beta2: Jax
    one_minus_beta2: Jax
    root_correction: Jax  # sqrt(1 - beta2**t)
    eps: Jax
    clip: Jax  # 0 = off
    rank: Jax  # int32; columns of A and rows of B beyond it are padding
    attn: Jax  # which parts are trained: 1 or 0
    mlp: Jax
    unembed: Jax


def hyper(adam: AdamParams, lora: LoraConfig, step: int) -> Hyper:
    """Prepare step number `step`, counted from 1."""
    return Hyper(
        decay=np.float32(1 - adam.learning_rate * adam.weight_decay),
        step_size=np.float32(adam.learning_rate / _correction(adam.beta1, step)),
        beta1=np.float32(adam.beta1),
        one_minus_beta1=np.float32(1 - adam.beta1),
        beta2=np.float32(adam.beta2),
        one_minus_beta2=np.float32(1 - adam.beta2),
        root_correction=np.float32(math.sqrt(_correction(adam.beta2, step))),
        eps=np.float32(adam.eps),
        clip=np.float32(adam.grad_clip_norm),
        rank=np.int32(lora.rank),
        attn=np.float32(lora.train_attn),
        mlp=np.float32(lora.train_mlp),
        unembed=np.float32(lora.train_unembed),
    )


def _correction(beta: float, step: int) -> float:
    return float(1 - beta**step)


def adamw(state: State, pending: Adapter, h: Hyper, *, axes: Axes = ONE) -> tuple[State, Jax]:
    """Return the state after a step, and the gradients' norm before clipping.

    On a mesh, moments and gradients are this shard's parts. It steps that part of the weights, and joins them.
    """
    weights, m, v, pending = axes.to_step(state.weights, (state.m, state.v, pending))
    masks = _masks(weights, h)
    pending = jax.tree.map(lambda g, mask: jnp.where(mask, g, 0.0), pending, masks)
    norm = jnp.sqrt(sum(axes.square_sums(pending, state.weights)))
    # torch.nn.utils.clip_grad_norm_
    factor = jnp.where(h.clip > 0, jnp.minimum(1.0, h.clip / (norm + 1e-6)), 1.0)
    clipped = jax.tree.map(lambda g: g * factor, pending)
    m = jax.tree.map(lambda m, g: h.beta1 * m + h.one_minus_beta1 * g, m, clipped)
    v = jax.tree.map(lambda v, g: h.beta2 * v + h.one_minus_beta2 * (g * g), v, clipped)

    def move(p: Jax, m: Jax, v: Jax, mask: Jax) -> Jax:
        moved = p * h.decay - h.step_size * (m / (jnp.sqrt(v) / h.root_correction + h.eps))
        return jnp.where(mask, moved, p)

    moved = jax.tree.map(move, weights, m, v, masks)
    return State(axes.joined(moved, state.weights), axes.own_part(m, state.m), axes.own_part(v, state.v)), norm


def _masks(weights: Adapter, h: Hyper) -> Adapter:
    """Mask the trained values. Padding and untrained modules would otherwise change if eps is 0 (0 / 0)."""
    trained = {name: h.attn if name in ("q", "k", "v", "o") else h.mlp for name in weights["layers"]}
    return {
        "layers": {name: _pair_masks(pair, trained[name], h.rank) for name, pair in weights["layers"].items()},
        "head": _pair_masks(weights["head"], h.unembed, h.rank),
    }


def _pair_masks(pair: tuple[Jax, Jax], trained: Jax, rank: Jax) -> tuple[Jax, Jax]:
    within = (jnp.arange(pair[0].shape[-1], dtype=jnp.int32) < rank) & (trained > 0)
    return jnp.broadcast_to(within, pair[0].shape), jnp.broadcast_to(within[:, None], pair[1].shape)
