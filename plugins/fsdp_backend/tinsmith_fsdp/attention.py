"""Causal attention within each sequence of a stream, with the interface that transformers' layers call.

Layers may ask for a window, a soft cap of the scores, and sinks. torch's kernels know no soft cap and no sinks: such
attention is computed sequence by sequence, on GPUs too.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (its name everywhere)
from transformers.modeling_utils import AttentionInterface

from tinsmith_fsdp.streams import Stream
from tinsmith_workers.torch import varlen_attention

NAME = "tinsmith_packed"


def packed_attention(  # noqa: PLR0913  (transformers chooses them)
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    stream: Stream,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,  # arguments of other implementations: the probe refuses models to which they matter
) -> tuple[torch.Tensor, None]:
    """Map query [1, heads, T, d], key [1, kv heads, T, d] and value [1, kv heads, T, dv] to [1, T, heads, dv].

    `sliding_window`: the tokens that a token sees, itself included. `s_aux` [heads]: scores that take part in the
    softmax, and add nothing.
    """
    del module, attention_mask
    if softcap is not None or s_aux is not None:
        return _spelled_out(query, key, value, stream, scaling, sliding_window, softcap, s_aux), None
    width = value.shape[-1]
    if width != key.shape[-1]:  # without a kernel, which takes values as wide as keys, memory would be quadratic
        value = F.pad(value, (0, key.shape[-1] - width))
    on_card = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    attend = attend_varlen if on_card else one_by_one
    out = attend(query, key, value, stream, scaling, sliding_window)
    return (out if width == out.shape[-1] else out[..., :width]), None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # compiled code would hold for these bounds alone
def one_by_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    stream: Stream,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    parts = []
    for start, stop in stream.bounds:
        q, k, v = (x[:, :, start:stop] for x in (query, key, value))
        mask = None if window is None or stop - start <= window else _seen(stop - start, window, query.device)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
        )
        parts.append(out.transpose(1, 2))
    return torch.cat(parts, dim=1)  # a tensor of its own: compiled code would depend on a view's base


@torch.compiler.disable  # type: ignore[untyped-decorator]  # as above
def _spelled_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    stream: Stream,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    parts = []
    for start, stop in stream.bounds:
        q, k, v = (x[:, :, start:stop] for x in (query, key, value))
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        scores = (q @ k.transpose(2, 3)).float() * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        length = stop - start
        scores = scores.masked_fill(~_seen(length, window or length, query.device), -torch.inf)
        if sinks is not None:
            own = sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, own], dim=-1)
        shares = scores.softmax(dim=-1)[..., :length].to(v.dtype)
        parts.append((shares @ v).transpose(1, 2))
    return torch.cat(parts, dim=1)


def _seen(length: int, window: int, device: torch.device) -> torch.Tensor:
    """Return a mask: each row's token sees itself and the tokens before it within the window."""
    positions = torch.arange(length, device=device)
    before = positions[:, None] - positions
    return (before >= 0) & (before < window)


def attend_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    stream: Stream,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Run all sequences in one flash-attention kernel, without padding between them."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, d]
    return varlen_attention(q, k, v, stream.ends, stream.longest, scale=scaling, window=window).unsqueeze(0)


def register() -> None:
    """Register the implementation with transformers."""
    AttentionInterface.register(NAME, packed_attention)
