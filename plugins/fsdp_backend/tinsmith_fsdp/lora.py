"""A frozen linear layer with the adapters of all tenants whose tokens pass through it.

Legend: T = tokens of the stream, G = groups (adapters), r = rank of one adapter, R = the largest of them, padded.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (its name everywhere)
from torch import nn
from torch.distributed.tensor import DTensor

from tinsmith_fsdp.streams import Group
from tinsmith_fsdp.tensor_parallel import copy_to_ranks, reduce_from_ranks

_RANK_STEP = 8  # grouped products need rows aligned to 16 bytes


class MultiLoraLinear(nn.Module):
    """y = W x + b + scale * B (A x), with A and B of each token's own adapter.

    With tensor parallelism, `cut` is the dimension of W that is divided: 0 (out, a column-parallel layer) or 1 (in, a
    row-parallel one). Adapters are whole on every rank, which uses its part. The gradients of all ranks add up to the
    adapter's gradient: anything that every rank computes identically is counted only by the first.
    """

    def __init__(self, linear: nn.Linear, module: str, cut: int | None = None) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.module = module
        self.cut = cut
        self.group: dist.ProcessGroup | None = None  # of the tp axis, if it has more than one rank
        self.tp_rank = 0
        self.groups: Sequence[Group] = ()  # of the current stream

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [1, T, in] to [1, T, out]."""
        weight, bias = _local(self.weight), None if self.bias is None else _local(self.bias)
        if self.group is None:
            return self._with_adapters(x, F.linear(x, weight, bias))
        if self.cut == 0:
            x = copy_to_ranks(x, self.group)
            return self._with_adapters(x, F.linear(x, weight, bias))
        y = reduce_from_ranks(F.linear(x, weight), self.group)
        return self._with_adapters(x, y if bias is None else y + bias)

    def _with_adapters(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        pairs = [self._pair(group, x.shape[-1], y.shape[-1]) for group in self.groups]
        if not any(pair is not None for pair in pairs):
            return y
        if len(pairs) > 1 and x.is_cuda and x.dtype == torch.bfloat16:
            return y + self._grouped(x[0], pairs).unsqueeze(0)
        return y + self._looped(x[0], pairs, y.shape[-1]).unsqueeze(0)

    def _pair(self, group: Group, d_in: int, d_out: int) -> tuple[torch.Tensor, torch.Tensor, float] | None:
        if group.leaves is None or self.module not in group.leaves.pairs:
            return None
        A, B = group.leaves.pairs[self.module]
        if self.group is not None and self.cut == 0:
            B = B[self.tp_rank * d_out : (self.tp_rank + 1) * d_out]
        elif self.group is not None:
            A = A[:, self.tp_rank * d_in : (self.tp_rank + 1) * d_in]
            B = B if self.tp_rank == 0 else B.detach()
        return A, B, group.leaves.scale

    def _narrow(self, h: torch.Tensor) -> torch.Tensor:
        return reduce_from_ranks(h, self.group) if self.cut == 1 else h

    def _looped(
        self, x_TI: torch.Tensor, pairs: Sequence[tuple[torch.Tensor, torch.Tensor, float] | None], d_out: int
    ) -> torch.Tensor:
        """Compute group by group, in float32."""
        parts = []
        for group, pair in zip(self.groups, pairs, strict=True):
            rows = x_TI[group.start : group.stop]
            if pair is None:
                parts.append(rows.new_zeros(len(rows), d_out))
            else:
                A, B, scale = pair
                parts.append(((self._narrow(rows.float() @ A.T) @ B.T) * scale).to(x_TI.dtype))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _grouped(
        self, x_TI: torch.Tensor, pairs: Sequence[tuple[torch.Tensor, torch.Tensor, float] | None]
    ) -> torch.Tensor:
        """Compute all groups in two grouped products, in the dtype of x. Ranks are padded to the largest."""
        first = next(pair for pair in pairs if pair is not None)
        d_in, d_out = first[0].shape[1], first[1].shape[0]
        widest = max(pair[0].shape[0] for pair in pairs if pair is not None)
        rank = -(-widest // _RANK_STEP) * _RANK_STEP
        A_GRI = torch.stack([_padded_A(pair, rank, d_in, x_TI) for pair in pairs])
        B_GOR = torch.stack([_padded_B(pair, rank, d_out, x_TI) for pair in pairs])
        ends = torch.tensor([group.stop for group in self.groups], dtype=torch.int32, device=x_TI.device)
        h_TR = self._narrow(F.grouped_mm(x_TI, A_GRI.transpose(1, 2), offs=ends))
        return F.grouped_mm(h_TR, B_GOR.transpose(1, 2), offs=ends)


def _padded_A(
    pair: tuple[torch.Tensor, torch.Tensor, float] | None, rank: int, d_in: int, like: torch.Tensor
) -> torch.Tensor:
    if pair is None:
        return like.new_zeros(rank, d_in)
    return F.pad(pair[0], (0, 0, 0, rank - pair[0].shape[0])).to(like.dtype)


def _padded_B(
    pair: tuple[torch.Tensor, torch.Tensor, float] | None, rank: int, d_out: int, like: torch.Tensor
) -> torch.Tensor:
    if pair is None:
        return like.new_zeros(d_out, rank)
    return F.pad(pair[1] * pair[2], (0, rank - pair[1].shape[1])).to(like.dtype)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
