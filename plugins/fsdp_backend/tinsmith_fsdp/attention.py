"""Causal attention within each sequence of a stream, with the interface that transformers' layers call."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (its name everywhere)
from transformers.modeling_utils import AttentionInterface

from tinsmith_fsdp.streams import Stream
from tinsmith_workers.torch import varlen_attention

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
    return _one_by_one(query, key, value, stream, scaling), None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # compiled code would hold for these bounds alone
def _one_by_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, stream: Stream, scaling: float | None
) -> torch.Tensor:
    parts = []
    for start, stop in stream.bounds:
        q, k, v = (x[:, :, start:stop] for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        parts.append(out.transpose(1, 2))
    return torch.cat(parts, dim=1)  # a tensor of its own: compiled code would depend on what a view is a view of


def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, stream: Stream, scaling: float | None
) -> torch.Tensor:
    """Run all sequences in one flash-attention kernel, without padding between them."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, d]
    return varlen_attention(q, k, v, stream.ends, stream.longest, scale=scaling).unsqueeze(0)


def register() -> None:
    """Register the implementation with transformers."""
    AttentionInterface.register(NAME, packed_attention)
