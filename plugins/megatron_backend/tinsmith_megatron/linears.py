"""Megatron's linear layers, frozen, with the adapters of all rows that pass through them.

Adapters are whole on every rank of a stage, which uses its part of them. Whatever the ranks add to an adapter's
gradient is a part of it: the sum over all ranks of the stage is the whole, and nothing is counted twice.

Legend: T = rows of the stream, or of this rank's part of it where sequences are divided.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812  (its name everywhere)
from megatron.core.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import nn

from tinsmith_megatron.low_rank import low_rank
from tinsmith_megatron.streams import Stream
from tinsmith_megatron.untyped import Untyped


class AdaptedLinear(nn.Module):
    """Common to all. `modules_`: canonical names of the modules that the layer fuses."""

    def __init__(self, d_in: int, d_out: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.tp_size, self.tp_rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        self.weight = nn.Parameter(torch.empty(d_out, d_in, dtype=dtype), requires_grad=False)
        self.modules_: Sequence[str] = ()
        self.stream: Stream | None = None  # of the current micro-batch

    def _own(self, size: int) -> slice:
        each = size // self.tp_size
        return slice(self.tp_rank * each, (self.tp_rank + 1) * each)

    def _deltas(self, x_TI: torch.Tensor) -> list[torch.Tensor]:
        """Return what the adapters add, for each of the fused modules, or nothing if no adapter trains them."""
        assert self.stream is not None
        stacks = self.stream.stacks
        pairs = [stacks.pairs[module] for module in self.modules_ if module in stacks.pairs]
        scale_T1, ends_G = self._owners(self.stream, len(x_TI))
        return [low_rank(x_TI, *self._parts(A, B), scale_T1, ends_G) for A, B in pairs]

    def _owners(self, stream: Stream, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each row's scale, and where the rows of each adapter end, of the rows that this rank computes."""
        del num_rows
        return stream.scale_T1, stream.ends_G

    def _parts(self, A: torch.Tensor, B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the parts of A and B that this rank uses."""
        raise NotImplementedError


class ColumnLinear(AdaptedLinear):
    """Its output is divided over the ranks; it gathers the sequence. Fuses q, k and v, or gate and up."""

    def __init__(self, d_in: int, d_out: int, *, config: Untyped, tp_comm_buffer_name: str, **_: Untyped) -> None:
        super().__init__(d_in, d_out // get_tensor_model_parallel_world_size(), config.params_dtype)
        self._groups = None if tp_comm_buffer_name != "qkv" else config.num_query_groups // self.tp_size
        self._head_dim = config.kv_channels if self._groups and config.attention_output_gate else None

    def forward(self, x_T1I: torch.Tensor) -> tuple[torch.Tensor, None]:
        if self.tp_size > 1:
            x_T1I = gather_from_sequence_parallel_region(x_T1I)
        x_TI = x_T1I[:, 0]
        y_TO = F.linear(x_TI, self.weight)
        if deltas := self._deltas(x_TI):
            y_TO = y_TO + self._fused(deltas)
        return y_TO[:, None], None

    def _parts(self, A: torch.Tensor, B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return A, B[:, self._own(B.shape[1])]

    def _fused(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Lay out outputs as in the fused matrix: q, k and v alternate by key-value head.

        Where attention has a gate, q has each head's query and gate. Megatron wants all queries of a key-value head
        before their gates.
        """
        if self._head_dim is None or self._groups is None:
            return fuse(parts, self._groups)
        q, *others = parts
        by_head = q.unflatten(-1, (self._groups, -1, 2, self._head_dim))
        return fuse([by_head.transpose(-2, -3).flatten(-4), *others], self._groups)


class RowLinear(AdaptedLinear):
    """Its input is divided over the ranks; it sums their outputs and divides the sequence."""

    def __init__(self, d_in: int, d_out: int, *, config: Untyped, **_: Untyped) -> None:
        super().__init__(d_in // get_tensor_model_parallel_world_size(), d_out, config.params_dtype)

    def forward(self, x_T1I: torch.Tensor) -> tuple[torch.Tensor, None]:
        x_TI = x_T1I[:, 0]
        y_TO = F.linear(x_TI, self.weight)
        for delta in self._deltas(x_TI):
            y_TO = y_TO + delta  # each rank's part of A x times B: these add up as the layer's own products do
        y_T1O = y_TO[:, None]
        return (reduce_scatter_to_sequence_parallel_region(y_T1O) if self.tp_size > 1 else y_T1O), None

    def _parts(self, A: torch.Tensor, B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return A[:, :, self._own(A.shape[2])], B


class WholeLinear(AdaptedLinear):
    """Its matrix is whole on every rank, which multiplies its own part of the sequence by it."""

    def __init__(self, d_in: int, d_out: int, *, config: Untyped, **_: Untyped) -> None:
        super().__init__(d_in, d_out, config.params_dtype)

    def forward(self, x_T1I: torch.Tensor) -> tuple[torch.Tensor, None]:
        x_TI = x_T1I[:, 0]
        y_TO = F.linear(x_TI, self.weight)
        for delta in self._deltas(x_TI):
            y_TO = y_TO + delta
        return y_TO[:, None], None

    def _owners(self, stream: Stream, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = self.tp_rank * num_rows
        return stream.scale_T1[start : start + num_rows], (stream.ends_G - start).clamp(0, num_rows)

    def _parts(self, A: torch.Tensor, B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return A, B


def fuse(parts: Sequence[torch.Tensor], groups: int | None) -> torch.Tensor:
    """Concatenate along the last axis, within each of its `groups`."""
    if groups is None:
        return torch.cat(list(parts), dim=-1)
    return torch.cat([part.unflatten(-1, (groups, -1)) for part in parts], dim=-1).flatten(-2)
