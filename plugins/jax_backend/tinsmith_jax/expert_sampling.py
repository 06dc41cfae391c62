"""Sampling with experts: tiles of a prompt as in training, and the single tokens of a decoding step.

Legend as in experts.py; B = slots, each with one token of a step.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from tinsmith_jax import experts
from tinsmith_jax.experts import ExpertWeights, ResidentLora, Routing, activated
from tinsmith_jax.layers import Tiles

# Any below: jax arrays and pytrees of them.


def resident_lora(layers: Mapping[str, Any], layer: Any, first_expert: Any, adapted_k: Any) -> ResidentLora:
    """Select one layer's adapters in the slots. The experts' own factors stay where they are: a step reads some."""
    (A_gate, B_gate), (A_up, B_up), (A_down, B_down) = (layers[name] for name in ("gate", "up", "down"))
    A_gate, A_up, B_down = (lax.dynamic_index_in_dim(each, layer, keepdims=False) for each in (A_gate, A_up, B_down))
    B_gate, B_up, A_down = (each.reshape(-1, *each.shape[2:]) for each in (B_gate, B_up, A_down))
    return ResidentLora((A_gate, B_gate), (A_up, B_up), (A_down, B_down), first_expert, adapted_k)


def prompt_mlp(
    h_NTH: Any, routing: Routing, weights: ExpertWeights, lora: ResidentLora, slot_N: Any, num_experts: int
) -> Any:
    """Return the experts' outputs for tiles of prompts, each of a slot; those that pad (slot -1) may have anything."""
    tiles = Tiles(jnp.maximum(slot_N, 0), jnp.ones(slot_N.shape, jnp.float32))
    out_TH, _ = experts.forward(h_NTH.reshape(-1, h_NTH.shape[-1]), routing, weights, lora, tiles, num_experts)
    return out_TH.reshape(h_NTH.shape)


def step_mlp(h_BH: Any, routing: Routing, weights: ExpertWeights, lora: ResidentLora, num_experts: int) -> Any:
    """Return the experts' outputs for one token of each slot, [B, H].

    Every expert that any slot needs computes all slots, because reading its weights is what takes time. A slot adds up
    its own experts, in their order, so its result does not depend on the others.
    """
    dtype = h_BH.dtype
    used_E = jnp.zeros(num_experts, bool).at[routing.chosen_TC].set(True)
    order_E = jnp.argsort(~used_E, stable=True)
    any_adapted = jnp.any(lora.adapted_k)
    z_gate, z_up = (_delta(h_BH, A, lora.adapted_k, any_adapted) for A in (lora.gate[0], lora.up[0]))

    def one(i: Any, sums: tuple[Any, Any]) -> tuple[Any, Any]:
        expert = order_E[i]
        gate_up, down = weights.of(expert)
        B_gate, B_up, A_down = (each[lora.first + expert] for each in (lora.gate[1], lora.up[1], lora.down[0]))
        gate, up = jnp.split(h_BH @ gate_up, 2, axis=-1)
        gate += _delta(z_gate, B_gate, lora.adapted_k, any_adapted)
        up += _delta(z_up, B_up, lora.adapted_k, any_adapted)
        inner = activated(gate, up)
        here_BC = routing.chosen_TC == expert
        weight_B1 = jnp.sum(jnp.where(here_BC, routing.weight_TC, 0), axis=-1, keepdims=True)
        results = inner @ down, _delta(inner, A_down, lora.adapted_k, any_adapted)
        own_B1 = jnp.any(here_BC, axis=-1, keepdims=True)
        out, low = (total + jnp.where(own_B1, weight_B1 * part, 0) for total, part in zip(sums, results, strict=True))
        return out, low

    empty = jnp.zeros_like(h_BH), jnp.zeros((h_BH.shape[0], lora.down[0].shape[-1]), dtype)
    out_BH, low_Br = lax.fori_loop(0, jnp.sum(used_E), one, empty)
    return out_BH + _delta(low_Br, lora.down[1], lora.adapted_k, any_adapted)


def _delta(x_Bi: Any, factor_Bio: Any, adapted_B: Any, any_adapted: Any) -> Any:
    """Multiply each slot's row with its own factor; 0 for slots without an adapter. If all are, nothing is read."""

    def product() -> Any:
        delta = jnp.einsum("bi,bio->bo", x_Bi, factor_Bio, preferred_element_type=jnp.float32)
        return jnp.where(adapted_B[:, None], delta, 0).astype(x_Bi.dtype)

    return lax.cond(any_adapted, product, lambda: jnp.zeros((x_Bi.shape[0], factor_Bio.shape[-1]), x_Bi.dtype))
