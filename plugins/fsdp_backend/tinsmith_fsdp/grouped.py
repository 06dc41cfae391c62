"""Products of consecutive groups of rows with a matrix for each group.

In bfloat16 all groups are one kernel, whose sums are float32. It takes no other dtype in compiled code, and on GPUs in
none: others compute group by group, behind operators that compiled code does not look into.

Legend: T = rows, G = groups, K and N = columns before and after.
"""

from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812  (its name everywhere)

MOST_GROUPS: Final = 1023  # of one kernel of a GPU


def grouped(x_TK: torch.Tensor, w_GNK: torch.Tensor, ends_G: torch.Tensor) -> torch.Tensor:
    """Multiply each group's rows by its matrix: [T, N]. `ends_G` (int32): where each group ends; the last is T."""
    if x_TK.dtype == torch.bfloat16 and len(w_GNK) > MOST_GROUPS:
        return _in_parts(x_TK, w_GNK, ends_G)
    y: torch.Tensor = _Grouped.apply(x_TK, w_GNK, ends_G)  # type: ignore[no-untyped-call]
    return y


def _in_parts(x_TK: torch.Tensor, w_GNK: torch.Tensor, ends_G: torch.Tensor) -> torch.Tensor:
    """Multiply by kernels of as many groups as one takes. Waits for the device, which says where their rows end."""
    starts = [0, *ends_G[MOST_GROUPS - 1 : -1 : MOST_GROUPS].tolist()]
    parts = zip(x_TK.tensor_split(starts[1:]), w_GNK.split(MOST_GROUPS), ends_G.split(MOST_GROUPS), starts, strict=True)
    return torch.cat([grouped(x, w, ends - start) for x, w, ends, start in parts])


class _Grouped(torch.autograd.Function):
    """Makes what comes back contiguous, which the kernel needs."""

    @staticmethod
    def forward(x_TK: torch.Tensor, w_GNK: torch.Tensor, ends_G: torch.Tensor) -> torch.Tensor:
        return _rows(x_TK, w_GNK, ends_G)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        del output
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, d_TN: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x_TK, w_GNK, ends_G = ctx.saved_tensors
        d_TN = d_TN.contiguous()
        d_x = _rows(d_TN, w_GNK.transpose(1, 2), ends_G) if ctx.needs_input_grad[0] else None
        d_w = _outer(d_TN, x_TK, ends_G) if ctx.needs_input_grad[1] else None
        return d_x, d_w, None


def _rows(x_TK: torch.Tensor, w_GNK: torch.Tensor, ends_G: torch.Tensor) -> torch.Tensor:
    if x_TK.dtype == torch.bfloat16:
        return F.grouped_mm(x_TK, w_GNK.transpose(1, 2), offs=ends_G)
    y: torch.Tensor = _rows_one_by_one(x_TK, w_GNK, ends_G)
    return y


def _outer(d_TN: torch.Tensor, x_TK: torch.Tensor, ends_G: torch.Tensor) -> torch.Tensor:
    """Multiply d and x over each group's rows: [G, N, K]."""
    if x_TK.dtype == torch.bfloat16:
        sums_GNK = F.grouped_mm(d_TN.transpose(0, 1), x_TK, offs=ends_G)
        empty_G = ends_G.diff(prepend=ends_G.new_zeros(1)) == 0
        return sums_GNK.masked_fill(empty_G[:, None, None], 0.0)  # of these, GPUs from sm_100 on return anything
    y: torch.Tensor = _outer_one_by_one(d_TN, x_TK, ends_G)
    return y


@torch.library.custom_op("tinsmith_fsdp::grouped_rows", mutates_args=())
def _rows_one_by_one(x_TK: torch.Tensor, w_GNK: torch.Tensor, ends_G: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows @ w_NK.T for rows, w_NK in zip(_groups(x_TK, ends_G), w_GNK, strict=True)])


@_rows_one_by_one.register_fake
def _(x_TK: torch.Tensor, w_GNK: torch.Tensor, ends_G: torch.Tensor) -> torch.Tensor:
    del ends_G
    return x_TK.new_empty(x_TK.shape[0], w_GNK.shape[1])


@torch.library.custom_op("tinsmith_fsdp::grouped_outer", mutates_args=())
def _outer_one_by_one(d_TN: torch.Tensor, x_TK: torch.Tensor, ends_G: torch.Tensor) -> torch.Tensor:
    return torch.stack([d.T @ x for d, x in zip(_groups(d_TN, ends_G), _groups(x_TK, ends_G), strict=True)])


@_outer_one_by_one.register_fake
def _(d_TN: torch.Tensor, x_TK: torch.Tensor, ends_G: torch.Tensor) -> torch.Tensor:
    return x_TK.new_empty(ends_G.shape[0], d_TN.shape[1], x_TK.shape[1])


def _groups(rows: torch.Tensor, ends_G: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.tensor_split(rows, ends_G[:-1].tolist())
