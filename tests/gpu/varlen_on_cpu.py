"""The GPU's flash-attention kernel for many sequences, on a CPU: for dry runs of what calls it."""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.attention.varlen as V  # noqa: N812  (short: its operators are private)
import torch.nn.functional as F  # noqa: N812  (its name everywhere)


def register() -> None:
    """Give the operators a kernel for CPUs. It is causal, whatever it is asked for."""
    V._varlen_attn.register_kernel("cpu")(_forward)  # noqa: SLF001 - torch's operators are private
    V._varlen_attn_backward.register_kernel("cpu")(_backward)  # noqa: SLF001


def _scale(q: torch.Tensor, arguments: tuple[Any, ...]) -> float:
    """Return the scale among the arguments that this torch hands over, or the default."""
    return next((each for each in arguments if isinstance(each, float)), q.shape[2] ** -0.5)


def _bounds(starts: torch.Tensor) -> list[tuple[int, int]]:
    return list(pairwise(starts.tolist()))


def _forward(q: Any, k: Any, v: Any, starts: Any, _: Any, *rest: Any) -> Any:
    parts = []
    for a, b in _bounds(starts):
        heads = (x[a:b].float().transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(*heads, is_causal=True, scale=_scale(q, rest), enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts).to(q.dtype), torch.zeros(q.shape[1], q.shape[0]), torch.zeros(2, dtype=torch.uint64)


def _backward(g: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, starts: Any, _: Any, *rest: Any) -> Any:
    """Spell the gradient out: an operator's own kernel runs below autograd."""
    del out, lse
    d_q, d_k, d_v = (torch.zeros_like(x) for x in (q, k, v))
    repeats, scale = q.shape[1] // k.shape[1], _scale(q, rest)
    for a, b in _bounds(starts):
        Q, G = (x[a:b].float().transpose(0, 1) for x in (q, g))  # [heads, T, d]
        K, W = (x[a:b].float().transpose(0, 1).repeat_interleave(repeats, 0) for x in (k, v))
        hidden = torch.ones(b - a, b - a).triu(1).bool()
        P = (Q @ K.mT * scale).masked_fill(hidden, float("-inf")).softmax(-1)
        D = P * (G @ W.mT - (G * (P @ W)).sum(-1, keepdim=True)) * scale
        d_q[a:b] = (D @ K).transpose(0, 1)
        d_k[a:b] = (D.mT @ Q).unflatten(0, (-1, repeats)).sum(1).transpose(0, 1)
        d_v[a:b] = (P.mT @ G).unflatten(0, (-1, repeats)).sum(1).transpose(0, 1)
    return d_q, d_k, d_v
