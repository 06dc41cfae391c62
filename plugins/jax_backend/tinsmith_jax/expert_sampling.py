"""Sampling with experts: tiles of a prompt as in training, and the single tokens of a decoding step.

Legend as in experts.py; B = rows of decoding, each with one token of a step.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from tinsmith_jax import experts
from tinsmith_jax.experts import ExpertWeights, ResidentLora, Routing
from tinsmith_jax.jax_types import Jax
from tinsmith_jax.layers import activated
from tinsmith_jax.mesh import Axes
from tinsmith_jax.model_config import ModelConfig
from tinsmith_jax.sampling_adapters import AdapterRows
from tinsmith_jax.sampling_values import BASE_MODEL
from tinsmith_jax.tiles import Tiles


def resident_lora(layers: Mapping[str, Jax], layer: Jax, first_expert: Jax, adapted_k: Jax) -> ResidentLora:
    """Select one layer's adapters. The experts' own factors stay where they are: a step reads some."""

    def shared(factor: Jax) -> Jax:
        return lax.dynamic_index_in_dim(factor, layer, keepdims=False)

    def own(factor: Jax) -> Jax:
        return factor.reshape(-1, *factor.shape[2:])

    inner = {name: (shared(A), own(B)) for name, (A, B) in layers.items() if name in {"gate", "up"}}
    A_down, B_down = layers["down"]
    return ResidentLora(inner.get("gate"), inner["up"], (own(A_down), shared(B_down)), first_expert, adapted_k)


def prompt_mlp(
    h_NTH: Jax,
    routing: Routing,
    weights: ExpertWeights,
    lora: ResidentLora,
    row_N: Jax,
    config: ModelConfig,
    axes: Axes,
) -> Jax:
    """Return the experts' outputs for tiles of prompts. Tiles of the base model use the last row, which is unused."""
    last = lora.adapted_k.shape[0] - 1
    tiles = Tiles(jnp.where(row_N == BASE_MODEL, last, row_N), jnp.ones(row_N.shape, jnp.float32))
    h_TH = h_NTH.reshape(-1, h_NTH.shape[-1])
    out_TH, _ = experts.forward(h_TH, routing, weights, lora, tiles, config, axes)
    return out_TH.reshape(h_NTH.shape)


def step_mlp(
    h_BH: Jax,
    routing: Routing,
    weights: ExpertWeights,
    lora: ResidentLora,
    rows: AdapterRows,
    config: ModelConfig,
    axes: Axes,
) -> Jax:
    """Return the experts' outputs for one token of each row of decoding, [B, H].

    Every expert that any row needs computes all rows, because reading its weights takes the time. A row adds up
    its own experts, in their order, so its result does not depend on the others.
    """
    dtype = h_BH.dtype
    assert config.experts is not None
    used_E = jnp.zeros(config.experts.num_experts // axes.tensor, bool).at[routing.chosen_TC].set(True)
    order_E = jnp.argsort(~used_E, stable=True)
    z_inner = [_delta(h_BH, A, rows) for A, _ in lora.inner]

    def one(i: Jax, sums: tuple[Jax, Jax]) -> tuple[Jax, Jax]:
        expert = order_E[i]
        *B_inner, A_down = (each[lora.first + expert] for each in (*(B for _, B in lora.inner), lora.down[0]))
        parts = zip(weights.to_inner(h_BH, expert), z_inner, B_inner, strict=True)
        inner = activated(*(part + _delta(z, B, rows) for part, z, B in parts), config=config)
        here_BC = routing.chosen_TC == expert
        weight_B1 = jnp.sum(jnp.where(here_BC, routing.weight_TC, 0), axis=-1, keepdims=True)
        results = weights.to_hidden(inner, expert), _delta(inner, A_down, rows)
        own_B1 = jnp.any(here_BC, axis=-1, keepdims=True)
        out, low = (total + jnp.where(own_B1, weight_B1 * part, 0) for total, part in zip(sums, results, strict=True))
        return out, low

    empty = jnp.zeros_like(h_BH), jnp.zeros((h_BH.shape[0], lora.down[0].shape[-1]), dtype)
    with jax.named_scope("experts"):
        sums = lax.fori_loop(0, jnp.sum(used_E), one, empty)
    out_BH, low_Br = (axes.total(part) for part in sums)
    return out_BH + _delta(low_Br, lora.down[1], rows)


def _delta(x_Bi: Jax, factor_Rio: Jax, rows: AdapterRows) -> Jax:
    return rows.product(x_Bi[:, None], factor_Rio)[:, 0]
