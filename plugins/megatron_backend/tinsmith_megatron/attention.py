"""Causal attention within each sequence of a stream, in the place of Megatron's core attention."""

import torch
import torch.nn.functional as F  # noqa: N812  (its name everywhere)
from torch import nn

from tinsmith_megatron.streams import Stream
from tinsmith_megatron.untyped import Untyped
from tinsmith_workers.torch import varlen_attention


class PackedAttention(nn.Module):
    def __init__(self, *, softmax_scale: float | None = None, **_: Untyped) -> None:
        super().__init__()
        self._scale = softmax_scale  # of the scores; None: as usual for the size of a head
        self.stream: Stream | None = None  # of the current micro-batch

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Untyped,
        **__: Untyped,
    ) -> torch.Tensor:
        """Map query [T, 1, heads, d], key [T, 1, kv heads, d] and value [T, 1, kv heads, v] to [T, 1, heads * v].

        Values may be narrower than keys. Kernels take them as wide.
        """
        stream, width = self.stream, value.shape[-1]
        assert stream is not None
        if width < key.shape[-1]:
            value = F.pad(value, (0, key.shape[-1] - width))
        if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
            out = varlen_attention(
                query[:, 0], key[:, 0], value[:, 0], stream.starts, stream.longest, scale=self._scale
            )
            return out[..., :width].flatten(1)[:, None]
        q, k, v = (x[:, 0].transpose(0, 1)[None] for x in (query, key, value))  # [1, heads, T, d]
        parts = [
            F.scaled_dot_product_attention(
                q[:, :, start:stop],
                k[:, :, start:stop],
                v[:, :, start:stop],
                is_causal=True,
                scale=self._scale,
                enable_gqa=True,
            )
            for start, stop in stream.bounds
        ]
        return torch.cat(parts, dim=2)[0, ..., :width].transpose(0, 1).flatten(1)[:, None]
