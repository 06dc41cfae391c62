"""Causal attention within each sequence of a stream, with the interface that transformers' layers call."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (its name everywhere)
from transformers.modeling_utils import AttentionInterface

from tinsmith_fsdp.streams import Stream

NAME = "tinsmith_packed"


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    stream: Stream,
    scaling: float | None = None,
    **_: Any,  # arguments of other implementations
) -> tuple[torch.Tensor, None]:
    """Map query [1, heads, T, d] and key, value [1, kv heads, T, d] to [1, T, heads, d]."""
    del module, attention_mask
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _varlen(query, key, value, stream, scaling), None
    parts = []
    for start, stop in stream.bounds:
        q, k, v = (x[:, :, start:stop] for x in (query, key, value))
        parts.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True))
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return out.transpose(1, 2).contiguous(), None


def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, stream: Stream, scaling: float | None
) -> torch.Tensor:
    """Run all sequences in one flash-attention kernel, without padding between them."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))  # [T, heads, d]
    out = varlen_attn(
        q,
        k,
        v,
        stream.ends,
        stream.ends,
        stream.longest,
        stream.longest,
        scale=scaling,
        window_size=(-1, 0),  # causal
        enable_gqa=True,
    )
    assert isinstance(out, torch.Tensor)
    return out.unsqueeze(0)


def register() -> None:
    """Register the implementation with transformers."""
    AttentionInterface.register(NAME, packed_attention)
