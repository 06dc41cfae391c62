"""Grouped products, in as many kernels as their groups need."""

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
