"""Stands in for a GPU where the plugins attend: tensors that say they are on one, and a CPU kernel of torch's operator.

Legend: T = tokens of all sequences, D = size of a head.
"""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812  (its name everywhere)
import varlen_on_cpu

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
    varlen_on_cpu.register()


def one_by_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, scale: float | None
) -> torch.Tensor:
    def parts() -> Iterator[torch.Tensor]:
        for start, stop in pairwise(starts.tolist()):
            each = (x[start:stop].transpose(0, 1)[None] for x in (q, k, v))
            out = F.scaled_dot_product_attention(*each, is_causal=True, scale=scale, enable_gqa=True)
            yield out[0].transpose(0, 1)

    return torch.cat(list(parts()))


def starts() -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)


def check_on_card(attend: Attend, scale: float | None, value_size: int = SIZE) -> None:
    """Compare attention as on a GPU, in bfloat16, with that of each sequence alone in float32: values and gradients."""
    register_kernels()
    generator = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)
    sizes = ((HEADS, SIZE), (KV_HEADS, SIZE), (KV_HEADS, value_size), (HEADS, value_size))
    numbers = [torch.randn(tokens, *each, generator=generator) for each in sizes]
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
