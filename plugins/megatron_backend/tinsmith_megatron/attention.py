"""Causal attention within each sequence of a stream, in the place of Megatron's core attention."""

import torch
import torch.nn.functional as F  # noqa: N812  (its name everywhere)
from torch import nn

from tinsmith_megatron.streams import Stream
from tinsmith_megatron.untyped import Untyped
from tinsmith_workers.torch import varlen_attention


class PackedAttention(nn.Module):
    def __init__(self, **_: Untyped) -> None:
        super().__init__()
        self.stream: Stream | None = None  # of the current micro-batch

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Untyped,
        **__: Untyped,
    ) -> torch.Tensor:
        """Map query [T, 1, heads, d] and key, value [T, 1, kv heads, d] to [T, 1, heads * d]."""
        stream = self.stream
        assert stream is not None
        if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
            out = varlen_attention(query[:, 0], key[:, 0], value[:, 0], stream.starts, stream.longest)
            return out.flatten(1)[:, None]
        q, k, v = (x[:, 0].transpose(0, 1)[None] for x in (query, key, value))  # [1, heads, T, d]
        parts = [
            F.scaled_dot_product_attention(
                q[:, :, start:stop], k[:, :, start:stop], v[:, :, start:stop], is_causal=True, enable_gqa=True
            )
            for start, stop in stream.bounds
        ]
        return torch.cat(parts, dim=2)[0].transpose(0, 1).flatten(1)[:, None]
