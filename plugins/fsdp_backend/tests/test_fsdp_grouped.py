"""Products of groups of rows, as kernels of GPUs compute them."""

import pytest
import torch

from tinsmith_fsdp import grouped


def test_a_group_without_rows_has_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = torch.nn.functional.grouped_mm

    def as_on_blackwell(a: torch.Tensor, b: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        """Return anything for the matrix of a group without rows."""
        out = kernel(a, b, offs=offs)
        if b.dim() == 2:
            out[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan
        return out

    monkeypatch.setattr(grouped.F, "grouped_mm", as_on_blackwell)
    x = torch.randn(9, 16, dtype=torch.bfloat16)
    w = torch.randn(4, 24, 16, dtype=torch.bfloat16, requires_grad=True)
    grouped.grouped(x, w, torch.tensor([0, 5, 5, 9], dtype=torch.int32)).sum().backward()
    assert w.grad is not None
    assert w.grad.isfinite().all()
    assert [bool(each.any()) for each in w.grad] == [False, True, False, True]
