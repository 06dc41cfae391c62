"""Layers with the gated delta rule on CPUs, in any type: vLLM's own kernels for CPUs take bfloat16 alone.

The rule is transformers', computed for each sequence alone: its packed form mixes neighbours on CPUs. Sequences that
draw one token each are computed together, element by element.

Runs in vLLM's workers. Array suffixes: R = rows of a step, N = sequences, T = tokens of each, C = channels of the short
convolution, W = its width, H = value heads, K and V = sizes of a key and of a value.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.nn import functional


class Rows(NamedTuple):
    """The rows of one sequence in a step, and where its states are."""

    first: int
    last: int  # the row after them
    slot: int
    goes_on: bool  # the slot has the states of the tokens before


def mix(
    layer: Any,
    states: tuple[torch.Tensor, torch.Tensor],
    mixed_RC: torch.Tensor,
    beta_RH: torch.Tensor,
    decay_RH: torch.Tensor,
    out_RHV: torch.Tensor,
    sequences: Iterable[tuple[int, int, int, bool]],
) -> None:
    """Compute the rows of a step into `out_RHV`, and move the states of their sequences on.

    `layer` is vLLM's, and its projections have computed `mixed_RC`, `beta_RH` and `decay_RH`. `states` are those of all
    slots S: the last inputs of the convolution [S, C, W - 1], and the rule's memory [S, H, K, V].
    """
    found = [Rows(*each) for each in sequences]
    drawing = [rows for rows in found if rows.goes_on and rows.last - rows.first == 1]
    for together in filter(None, [drawing, *([rows] for rows in found if rows not in drawing)]):
        index = torch.cat([torch.arange(rows.first, rows.last) for rows in together])
        slots, goes_on = [rows.slot for rows in together], together[0].goes_on
        inputs = (values[index].unflatten(0, (len(together), -1)) for values in (mixed_RC, beta_RH, decay_RH))
        before = (state[slots] if goes_on else torch.zeros_like(state[slots]) for state in states)
        out_NTHV, *after = _advance(layer, *inputs, *before)
        out_RHV[index] = out_NTHV.flatten(0, 1).to(out_RHV.dtype)
        for state, new in zip(states, after, strict=True):
            state[slots] = new.to(state.dtype)


def _advance(
    layer: Any,
    mixed_NTC: torch.Tensor,
    beta_NTH: torch.Tensor,
    decay_NTH: torch.Tensor,
    convolved_NCW: torch.Tensor,
    memory_NHKV: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the outputs [N, T, H, V], and both states after them."""
    from transformers.models.qwen3_next import modeling_qwen3_next as rules

    seen_NCT = torch.cat([convolved_NCW.to(mixed_NTC.dtype), mixed_NTC.transpose(1, 2)], dim=-1)
    weight_C1W = layer.conv1d.weight
    values_NCT = functional.silu(functional.conv1d(seen_NCT, weight_C1W, layer.conv1d.bias, groups=len(weight_C1W)))
    keys = layer.key_dim // layer.tp_size
    q, k, v = values_NCT.transpose(1, 2).split([keys, keys, layer.value_dim // layer.tp_size], dim=-1)
    query, key = (part.unflatten(-1, (-1, layer.head_k_dim)) for part in (q, k))
    value = v.unflatten(-1, (-1, layer.head_v_dim))
    times = value.shape[2] // key.shape[2]
    rule = rules.torch_recurrent_gated_delta_rule if mixed_NTC.shape[1] == 1 else rules.torch_chunk_gated_delta_rule
    out_NTHV, memory = rule(
        query.repeat_interleave(times, dim=2),
        key.repeat_interleave(times, dim=2),
        value,
        g=-layer.A_log.float().exp() * functional.softplus(decay_NTH.float() + layer.dt_bias),
        beta=beta_NTH.sigmoid(),
        initial_state=memory_NHKV,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out_NTHV, seen_NCT[..., 1 - weight_C1W.shape[-1] :], memory
