"""A rank's share of a fully trained model: rows of each parameter, and their positions in canonical tensors.

The ranks that compute the same parameter divide its rows for everything but the passes: float32 weights, moments and
the pending gradient (ZeRO, Rajbhandari et al. 2020). A parameter of Megatron's may fuse several canonical tensors.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from tinsmith_megatron.canonical import matrix_of, named
from tinsmith_megatron.parallel import Coordinates
from tinsmith_megatron.program import Setup
from tinsmith_megatron.stage import Stage
from tinsmith_workers import ModelPart
from tinsmith_workers.torch import Piece, all_gather_single, reduce_scatter_single


@dataclass(slots=True)
class Shard:
    """A parameter and this rank's rows of it. Its matrix has the rows of all experts one below the other."""

    parameter: torch.Tensor
    pieces: tuple[Piece, ...]  # of the whole parameter
    group: dist.ProcessGroup
    counts: bool  # else another stage holds it, too
    rows: range = field(init=False)
    height: int = field(init=False)  # rows of each rank of the group; the last ranks may have fewer
    weights: torch.Tensor = field(init=False)
    m: torch.Tensor = field(init=False)
    v: torch.Tensor = field(init=False)
    gradient: torch.Tensor | None = field(init=False, default=None)  # pending
    passing: torch.Tensor | None = field(init=False, default=None)  # of the whole parameter, in the current pass

    def __post_init__(self) -> None:
        matrix = self.matrix
        self.height = -(-len(matrix) // self.group.size())
        start = min(dist.get_rank(self.group) * self.height, len(matrix))
        self.rows = range(start, min(start + self.height, len(matrix)))
        own = matrix[self.rows.start : self.rows.stop]
        self.weights = own if own.dtype == torch.float32 else own.float()
        self.m, self.v = torch.zeros_like(self.weights), torch.zeros_like(self.weights)
        self.parameter.register_post_accumulate_grad_hook(self._take)

    @property
    def matrix(self) -> torch.Tensor:
        return matrix_of(self.parameter)

    @property
    def own_pieces(self) -> Iterator[Piece]:
        """Yield what lies in this rank's rows."""
        for piece in self.pieces:
            if (own := piece.within(self.rows)) is not None:
                yield own

    def begin_gradient(self) -> None:
        self.gradient = torch.zeros_like(self.weights)

    def drop_gradient(self) -> None:
        self.gradient = None

    def _take(self, parameter: torch.Tensor) -> None:
        """Add a micro-batch's gradient in float32."""
        assert self.passing is not None
        assert parameter.grad is not None
        self.passing.add_(parameter.grad.view_as(self.passing))
        parameter.grad = None

    def begin(self) -> None:
        """Make room for the gradient of a pass."""
        self.passing = torch.zeros_like(self.matrix, dtype=torch.float32)

    def end(self) -> None:
        """Add this rank's rows of the sum over the group to the pending gradient."""
        assert self.passing is not None
        whole, self.passing = self.passing, None
        if self.group.size() > 1:
            found = whole.new_empty(self.height, whole.shape[1])
            reduce_scatter_single(found, self._padded(whole), group=self.group)
            whole = found[: len(self.rows)]
        self.gradient = whole if self.gradient is None else self.gradient.add_(whole)

    def spread(self) -> None:
        """Give the group the weights of this rank's rows, in the dtype in which they are computed with."""
        matrix = self.matrix
        own = self.weights.to(matrix.dtype)
        if self.group.size() > 1:
            gathered = matrix.new_empty(self.height * self.group.size(), matrix.shape[1])
            all_gather_single(gathered, self._padded(own, self.height), group=self.group)
            matrix.copy_(gathered[: len(matrix)])
        else:
            matrix.copy_(own)

    def _padded(self, rows: torch.Tensor, height: int | None = None) -> torch.Tensor:
        missing = (height or self.height * self.group.size()) - len(rows)
        return torch.cat([rows, rows.new_zeros(missing, rows.shape[1])]) if missing else rows.contiguous()


def shards_of(stage: Stage, setup: Setup, coordinates: Coordinates, part: ModelPart) -> list[Shard]:
    """Return a shard of every parameter."""
    groups = {
        "divided": parallel_state.get_data_parallel_group(),
        "repeated": parallel_state.get_tensor_and_data_parallel_group(),
        "experts": parallel_state.get_expert_data_parallel_group(),
    }
    tied = setup.architecture.shape.tied
    return [
        Shard(
            parameter,
            tuple(pieces),
            groups[kind],
            counts=not (tied and stage.is_last and not stage.is_first and parameter is stage.head),
        )
        for parameter, pieces, kind in named(stage, setup, coordinates, part)
    ]
