"""Grouped products, in as many kernels as their groups need."""

from typing import Any

import pytest
import torch

from tinsmith_megatron import low_rank


@pytest.mark.parametrize("sizes", [[3, 0, 5, 1, 2, 0, 4], [0, 0, 0, 0, 9, 0], [2, 2, 2, 2, 2], [1] * 12])
def test_more_groups_than_a_kernel_takes_are_computed_in_parts(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, d = (torch.randn(sum(sizes), width, generator=generator) for width in (16, 24))
    W = torch.randn(len(sizes), 24, 16, generator=generator)
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    calls = []
    product = torch.nn.functional.grouped_mm

    def counted(rows: torch.Tensor, matrices: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        assert len(offs) < 5, "a GPU refuses this one"
        calls.append(len(offs))
        return product(rows, matrices, offs=offs)

    def run() -> list[torch.Tensor]:
        rows, matrices = x.clone().requires_grad_(), W.clone().requires_grad_()
        y = low_rank.grouped(rows, matrices, ends)
        y.backward(d)
        return [y.detach(), *(t.grad for t in (rows, matrices) if t.grad is not None)]

    together = run()
    monkeypatch.setattr(low_rank, "MOST_GROUPS", 4)
    monkeypatch.setattr(low_rank.F, "grouped_mm", counted)
    apart = run()
    assert sum(calls) >= len(sizes) - 1  # a part of one group is a plain product
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other)


class _AsOnBlackwell(torch.autograd.Function):
    """A grouped product whose gradient is not a number for the matrix of a group without rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, W: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, W, ends)
        return torch.cat([rows @ each for rows, each in zip(_groups(x, ends), W, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, W, ends = ctx.saved_tensors
        parts = list(zip(_groups(x, ends), _groups(grads[0], ends), strict=True))
        d_W = torch.stack([rows.T @ d if len(rows) else torch.full_like(W[0], torch.nan) for rows, d in parts])
        return torch.cat([d @ each.T for (_, d), each in zip(parts, W, strict=True)]), d_W, None


def _groups(rows: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.tensor_split(rows, ends[:-1].tolist())


def test_a_group_without_rows_has_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank.F, "grouped_mm", lambda x, W, *, offs: _AsOnBlackwell.apply(x, W, offs))
    W = torch.randn(4, 24, 16, requires_grad=True)
    low_rank.grouped(torch.randn(9, 16), W, torch.tensor([0, 5, 5, 9], dtype=torch.int32)).sum().backward()
    assert W.grad is not None
    assert W.grad.isfinite().all()
    assert [bool(each.any()) for each in W.grad] == [False, True, False, True]
