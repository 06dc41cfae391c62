"""The collectives of tensor-parallel ranks, as autograd functions.

Each rank has a part of each matrix, and between the layers a part of the tokens (sequence parallelism, arXiv
2205.05198, section 4.2.2). Each function is the other one's derivative. The number of tokens is a multiple of the
number of ranks.

Legend: T = tokens, S = tokens of a rank.
"""

from typing import Any

import torch
import torch.distributed as dist

from tinsmith_workers.torch import all_gather_single, reduce_scatter_single


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _scattered(grad, ctx.group), None


class _ScatterSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _scattered(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gathered(grad, ctx.group), None


def gather_tokens(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Map each rank's [..., S, width] to all tokens' [..., T, width]. Leading dimensions are 1."""
    return x if group is None else _GatherTokens.apply(x, group)  # type: ignore[no-untyped-call]


def scatter_sums(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Add up the ranks' [..., T, width], and return this rank's tokens of the sum, [..., S, width]."""
    return x if group is None else _ScatterSums.apply(x, group)  # type: ignore[no-untyped-call]


def _gathered(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    whole = x.new_empty(*x.shape[:-2], x.shape[-2] * group.size(), x.shape[-1])
    all_gather_single(whole.view(-1, x.shape[-1]), x.contiguous().view(-1, x.shape[-1]), group=group)
    return whole


def _scattered(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    part = x.new_empty(*x.shape[:-2], x.shape[-2] // group.size(), x.shape[-1])
    reduce_scatter_single(part.view(-1, x.shape[-1]), x.contiguous().view(-1, x.shape[-1]), group=group)
    return part
