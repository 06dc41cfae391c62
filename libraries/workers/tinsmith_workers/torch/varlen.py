"""Causal attention within each of many sequences: one flash-attention kernel, without padding between them."""

from inspect import signature
from typing import Any, Final

import torch
from torch.nn.attention.varlen import varlen_attn

# torch 2.11's kernel divides the heads among those of keys and values by itself; later ones want to be asked
_GROUPED_HEADS: Final[dict[str, Any]] = (
    {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
)


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Map query [T, heads, d] and key, value [T, kv heads, d], in half precision on a GPU, to [T, heads, d].

    Args:
        query: of all sequences, one after the other.
        key: of the same tokens.
        value: of the same tokens.
        starts: int32 [sequences + 1], where each begins, and T.
        longest: the tokens of the longest sequence, or more.
        scale: of the scores; 1 / sqrt(d) if None.
        window: the tokens that a token sees, itself included; all before it if None.
    """
    out = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        starts,
        starts,
        longest,
        longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),  # causal
        **_GROUPED_HEADS,
    )
    assert isinstance(out, torch.Tensor)
    return out
