"""Frozen linear layers with the adapters of all tenants whose tokens pass through them.

Legend: T = tokens of the stream, G = groups (adapters), r = rank of one adapter, R = the rank to which all are padded.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (its name everywhere)
from torch import nn
from torch.distributed.tensor import DTensor

from tinsmith_fsdp.grouped import grouped
from tinsmith_fsdp.int8 import int8_linear
from tinsmith_fsdp.tensor_parallel import scatter_sums
from tinsmith_workers.torch import Leaves


class Factors(NamedTuple):
    """The adapters of one layer for a stream. No field is a Python number: compiled code would depend on its value."""

    A: torch.Tensor  # [r, in], or [G, R, in] in the dtype of the stream
    B: torch.Tensor  # [out, r], or [G, out, R] in the dtype of the stream
    scale: torch.Tensor  # alpha / r: one number, or float32 [T, 1] of each token's adapter, if there are groups
    ends: torch.Tensor | None  # int32 [G]: where each group's tokens end, if there are groups


def factors_of(leaves: Leaves) -> dict[str, Factors]:
    """Return what each layer needs of an adapter that has the whole stream."""
    scale: torch.Tensor | None = None
    found: dict[str, Factors] = {}
    for module, (A, B) in leaves.pairs.items():
        scale = torch.tensor(leaves.scale, device=A.device) if scale is None else scale
        found[module] = Factors(A, B, scale, None)
    return found


class Adapters(nn.Module):
    """Adds scale * B (A x) to what a frozen matrix makes of x, with A and B of each token's own adapter.

    With tensor parallelism, `cut` is the dimension of the matrix that is divided: 0 (out, a column-parallel layer) or 1
    (in, a row-parallel one). A column-parallel layer takes all tokens, a row-parallel one returns this rank's. Adapters
    are whole on every rank, which uses its part. The gradients of all ranks add up to the adapter's gradient.
    """

    def __init__(self, module: str, cut: int | None = None) -> None:
        """`module`: the canonical path of what is adapted."""
        super().__init__()
        self.module = module
        self.cut = cut
        self.group: dist.ProcessGroup | None = None  # of the tp axis, if it has more than one rank
        self.tp_rank = 0
        self.factors: Factors | None = None  # of the current stream

    def added(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return y [1, T, out], or [T, out], with what the adapters make of x [1, T, in], or [T, in]."""
        if self.factors is None:
            return y
        A, B = self._own(self.factors, x.shape[-1], y.shape[-1])
        ends, scale = self.factors.ends, self.factors.scale
        if ends is not None:
            h = self._narrow((grouped(x.flatten(0, -2), A, ends) * scale).to(x.dtype))
            return y + grouped(h, B, self._own_ends(ends, h.shape[0])).view(y.shape)
        return y + ((self._narrow(x.float() @ A.T) @ B.T) * scale).to(x.dtype)

    def _own(self, factors: Factors, d_in: int, d_out: int) -> tuple[torch.Tensor, torch.Tensor]:
        A, B = factors.A, factors.B
        if self.group is not None and self.cut == 0:
            B = B[..., self.tp_rank * d_out : (self.tp_rank + 1) * d_out, :]
        elif self.group is not None:
            A = A[..., self.tp_rank * d_in : (self.tp_rank + 1) * d_in]
        return A, B

    def _narrow(self, h: torch.Tensor) -> torch.Tensor:
        return scatter_sums(h, self.group) if self.cut == 1 else h

    def _own_ends(self, ends: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return where the groups end among the rank's tokens, if it has a part of them."""
        if self.group is None or self.cut == 0:
            return ends
        return (ends - self.tp_rank * num_tokens).clamp(0, num_tokens)


class MultiLoraLinear(Adapters):
    """y = W x + b, and the adapters."""

    def __init__(
        self, linear: nn.Linear, module: str, cut: int | None = None, *, num_scales: int | None = None
    ) -> None:
        """num_scales: of each row, if in place of the layer's matrix comes one of 8-bit integers."""
        super().__init__(module, cut)
        self.weight, self.bias = linear.weight, linear.bias
        self.weight_scale: nn.Parameter | None = None  # [out, G] of 8-bit integers
        if num_scales is not None:
            integers = torch.empty_like(linear.weight, dtype=torch.int8)
            self.weight = nn.Parameter(integers, requires_grad=False)
            scale = torch.empty(linear.weight.shape[0], num_scales, device=linear.weight.device)
            self.weight_scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [1, T, in] to [1, T, out]; a row-parallel layer, to the rank's tokens."""
        bias = None if self.bias is None else local(self.bias)
        if self.group is None or self.cut == 0:
            return self.added(x, self._product(x, bias))
        y = scatter_sums(self._product(x, None), self.group)
        return self.added(x, y if bias is None else y + bias)

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        weight = local(self.weight)
        if self.weight_scale is None:
            return F.linear(x, weight, bias)
        y = int8_linear(x, weight, local(self.weight_scale))
        return y if bias is None else y + bias


class JoinedLoraLinear(nn.Module):
    """One matrix with the rows of several modules, each of which has adapters of its own."""

    def __init__(self, linear: nn.Linear, parts: Mapping[str, int]) -> None:
        """`parts`: the canonical paths of the modules and the numbers of their rows, in order."""
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.parts = nn.ModuleList(Adapters(module) for module in parts)
        self._sizes = list(parts.values())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [1, T, in] to [1, T, out]."""
        pieces = F.linear(x, self.weight, self.bias).split(self._sizes, dim=-1)
        return torch.cat([part.added(x, y) for part, y in zip(self.parts, pieces, strict=True)], dim=-1)  # type: ignore[operator]  # Adapters


def local(parameter: object) -> torch.Tensor:
    """Return a parameter's part on this rank."""
    assert isinstance(parameter, torch.Tensor)
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
