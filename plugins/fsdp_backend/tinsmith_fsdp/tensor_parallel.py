"""The two collectives of a tensor-parallel layer (Megatron-LM, arXiv 1909.08053, section 3), as autograd functions."""

from typing import Any

import torch
import torch.distributed as dist


class _CopyToRanks(torch.autograd.Function):
    """Forward: identity. Backward: the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _summed(grad, ctx.group), None


class _ReduceFromRanks(torch.autograd.Function):
    """Forward: the sum of all ranks' parts. Backward: every part gets the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # noqa: ARG004
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ARG004
        return grad, None


def copy_to_ranks(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    return x if group is None else _CopyToRanks.apply(x, group)  # type: ignore[no-untyped-call]


def reduce_from_ranks(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    return x if group is None else _ReduceFromRanks.apply(x, group)  # type: ignore[no-untyped-call]


def _summed(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
