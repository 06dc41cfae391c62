"""Stands in for a GPU where the plugins attend: tensors that say they are on one, and a CPU kernel of torch's operator.

Legend: T = tokens of all sequences, D = size of a head.
"""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (its name everywhere)
from torch.nn.attention import varlen

# Any: torch's own arguments.

LENGTHS = (1, 5, 33, 64, 2)
HEADS, KV_HEADS, SIZE = 6, 2, 16
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps query [T, heads, D] and key, value [T, kv heads, D] to [T, heads, D]."""


class OnCard(torch.Tensor):
    """A tensor of the CPU that says that it is on a GPU."""

    is_cuda = property(lambda _: True)  # type: ignore[assignment]  # it is an attribute of torch's


@cache
def register_kernels() -> None:
    """Give the operator behind `varlen_attn` kernels for CPUs. There are none, and registering is for good."""
    varlen._varlen_attn.register_kernel("cpu")(_forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(_backward)


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _, _, _, causal, scale, *_ = rest
    out = one_by_one(q.float(), k.float(), v.float(), starts, scale, causal=causal).to(q.dtype)
    return out, torch.zeros(q.shape[1], q.shape[0]), torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """By the formulas of FlashAttention's backward pass: autograd does not work inside of an operator."""
    _, _, starts, _, _, _, causal, _, scale, *_ = rest
    assert causal
    scale = q.shape[2] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    parts: list[list[torch.Tensor]] = []
    for start, stop in pairwise(starts.tolist()):
        Q, G = (x[start:stop].float().transpose(0, 1) for x in (q, grad))
        K, V = (x[start:stop].float().transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
        hidden = torch.ones(stop - start, stop - start).triu(1).bool()
        P = (Q @ K.mT * scale).masked_fill(hidden, float("-inf")).softmax(-1)
        D = P * (G @ V.mT - (G * (P @ V)).sum(-1, keepdim=True)) * scale
        of_heads = [D @ K, *(x.unflatten(0, (-1, group)).sum(1) for x in (D.mT @ Q, P.mT @ G))]
        parts.append([x.transpose(0, 1).to(q.dtype) for x in of_heads])
    of_q, of_k, of_v = (torch.cat(each) for each in zip(*parts, strict=True))
    return of_q, of_k, of_v


def one_by_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, scale: float | None, *, causal: bool = True
) -> torch.Tensor:
    def parts() -> Iterator[torch.Tensor]:
        for start, stop in pairwise(starts.tolist()):
            each = (x[start:stop].transpose(0, 1)[None] for x in (q, k, v))
            out = F.scaled_dot_product_attention(*each, is_causal=causal, scale=scale, enable_gqa=True)
            yield out[0].transpose(0, 1)

    return torch.cat(list(parts()))


def starts() -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)


def check_on_card(attend: Attend, scale: float | None) -> None:
    """Compare attention as on a GPU, in bfloat16, with that of each sequence alone in float32: values and gradients."""
    register_kernels()
    generator = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)
    numbers = [torch.randn(tokens, heads, SIZE, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    q, k, v, grad = (each.bfloat16() for each in numbers)

    def run(convert: Callable[[torch.Tensor], torch.Tensor], how: Attend) -> list[torch.Tensor]:
        inputs = [each.clone().requires_grad_() for each in (q.detach(), k.detach(), v.detach())]
        out = how(*(convert(each) for each in inputs))
        out.backward(grad.to(out.dtype))
        found = [out, *(each.grad for each in inputs if each.grad is not None)]
        return [each.detach().as_subclass(torch.Tensor).float() for each in found]

    own = run(lambda each: each.as_subclass(OnCard), attend)
    alone = run(torch.Tensor.float, lambda *inputs: one_by_one(*inputs, starts(), scale))
    assert len(own) == len(alone) == 4
    for found, wanted in zip(own, alone, strict=True):
        assert found.shape == wanted.shape
        assert float((found - wanted).norm() / wanted.norm()) < 1e-2
