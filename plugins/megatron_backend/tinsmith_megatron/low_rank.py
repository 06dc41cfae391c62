"""The products of adapters: every row of a stream by the matrices of its own adapter, in two grouped products.

Legend: T = rows, G = groups of consecutive rows, I = in, O = out, R = rank.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (its name everywhere)

_STEP = 8  # elements: grouped products need rows of a multiple of 16 bytes
MOST_GROUPS = 1023  # of one grouped product on a GPU


def low_rank(
    x_TI: torch.Tensor, A_GRI: torch.Tensor, B_GOR: torch.Tensor, scale_T1: torch.Tensor, ends_G: torch.Tensor
) -> torch.Tensor:
    """Return scale * B (A x) [T, O], in the dtype of x."""
    h_TR = grouped(x_TI, A_GRI, ends_G) * scale_T1.to(x_TI.dtype)
    return grouped(h_TR, B_GOR, ends_G)


def grouped(x_TI: torch.Tensor, W_GOI: torch.Tensor, ends_G: torch.Tensor) -> torch.Tensor:
    """Multiply each group of rows, which end at `ends_G`, by its own matrix. Return [T, O]."""
    W_GOI = W_GOI.to(x_TI.dtype)
    if len(W_GOI) == 1:
        return F.linear(x_TI, W_GOI[0])
    if len(W_GOI) > MOST_GROUPS:
        return _in_parts(x_TI, W_GOI, ends_G)
    d_out, d_in = W_GOI.shape[1:]
    more_in, more_out = -d_in % _STEP, -d_out % _STEP
    if more_in or more_out:
        x_TI, W_GOI = F.pad(x_TI, (0, more_in)), F.pad(W_GOI, (0, more_in, 0, more_out))
    W_GOI = _NoGradientOfEmptyGroups.apply(W_GOI, ends_G)  # type: ignore[no-untyped-call]
    y_TO: torch.Tensor = _ContiguousGradient.apply(F.grouped_mm(x_TI, W_GOI.transpose(1, 2), offs=ends_G))  # type: ignore[no-untyped-call]
    return y_TO[:, :d_out] if more_out else y_TO


def _in_parts(x_TI: torch.Tensor, W_GOI: torch.Tensor, ends_G: torch.Tensor) -> torch.Tensor:
    """Multiply by products of as many groups as fit one. Waits for the device, which says where their rows end."""
    last = torch.tensor([*range(MOST_GROUPS - 1, len(W_GOI) - 1, MOST_GROUPS)], device=ends_G.device)
    starts = [0, *ends_G[last].tolist()]
    rows, matrices = torch.tensor_split(x_TI, starts[1:]), W_GOI.split(MOST_GROUPS)
    ends = ends_G.split(MOST_GROUPS)
    parts = [grouped(x, W, end - start) for x, W, end, start in zip(rows, matrices, ends, starts, strict=True)]
    return torch.cat(parts)


class _ContiguousGradient(torch.autograd.Function):
    """Grouped products take no gradient that is a view of something larger, or expanded."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return grads[0].contiguous()


class _NoGradientOfEmptyGroups(torch.autograd.Function):
    """The kernel of GPUs from sm_100 on returns anything as the gradient of a group that has no rows."""

    @staticmethod
    def forward(ctx: Any, W_GOI: torch.Tensor, ends_G: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ends_G)
        return W_GOI.view_as(W_GOI)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (ends_G,) = ctx.saved_tensors
        empty_G = ends_G.diff(prepend=ends_G.new_zeros(1)) == 0
        return grads[0].masked_fill(empty_G[:, None, None], 0.0), None
