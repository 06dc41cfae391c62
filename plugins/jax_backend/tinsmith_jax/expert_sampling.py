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
    (A_gate, B_gate), (A_up, B_up), (A_down, B_down) = (layers[name] for name in ("gate", "up", "down"))
    A_gate, A_up, B_down = (lax.dynamic_index_in_dim(each, layer, keepdims=False) for each in (A_gate, A_up, B_down))
    B_gate, B_up, A_down = (each.reshape(-1, *each.shape[2:]) for each in (B_gate, B_up, A_down))
    return ResidentLora((A_gate, B_gate), (A_up, B_up), (A_down, B_down), first_expert, adapted_k)


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
    z_gate, z_up = (_delta(h_BH, A, rows) for A in (lora.gate[0], lora.up[0]))

    def one(i: Jax, sums: tuple[Jax, Jax]) -> tuple[Jax, Jax]:
        expert = order_E[i]
        B_gate, B_up, A_down = (each[lora.first + expert] for each in (lora.gate[1], lora.up[1], lora.down[0]))
        gate, up = weights.to_inner(h_BH, expert)
        gate += _delta(z_gate, B_gate, rows)
        up += _delta(z_up, B_up, rows)
        inner = activated(gate, up, config)
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
