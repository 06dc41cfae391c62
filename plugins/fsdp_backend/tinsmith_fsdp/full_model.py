"""One rank's part of a model whose own weights are trained.

A rank never holds anything whole except a layer while it computes. Gradients are DTensors laid out like the weights.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from tinsmith_fsdp.base_model import BaseModel, ParameterShard
from tinsmith_fsdp.lora import local
from tinsmith_fsdp.mesh import Mesh
from tinsmith_fsdp.streams import empty_stream, make_stream
from tinsmith_workers import Scored, Segment
from tinsmith_workers.torch import FullModelOfWorker, LossTable, Piece, Scores, scored, wait_for


class _Shard:
    """A rank's part of a parameter. Its gradient is the parameter's, laid out like it."""

    def __init__(self, part: ParameterShard, *, counts: bool) -> None:
        self._part, self.counts = part, counts
        self.m, self.v = torch.zeros_like(part.local), torch.zeros_like(part.local)
        rows = part.rows
        self.own_pieces = (
            Piece(
                name=part.name,
                shape=part.shape,
                start=rows.start,
                local=0,
                count=rows.stop - rows.start,
                columns=part.columns,
            ),
        )

    @property
    def weights(self) -> torch.Tensor:
        """Looked up each time: FSDP2 replaces uneven shards in the first pass."""
        return self._part.local

    @property
    def gradient(self) -> torch.Tensor | None:
        gradient = self._part.parameter.grad
        return None if gradient is None else local(gradient)

    def begin_gradient(self) -> None:
        self._part.parameter.grad = torch.zeros_like(self._part.parameter.detach())

    def drop_gradient(self) -> None:
        self._part.parameter.grad = None


class FullModel(FullModelOfWorker):
    """Receives the same calls on every rank."""

    def __init__(self, base: BaseModel, mesh: Mesh, losses: LossTable) -> None:
        """Allocate the moments, and check that gradients fit as well: the first step needs both."""
        self.base, self._mesh, self._losses = base, mesh, losses
        super().__init__(mesh.device, [_Shard(part, counts=self._counts(part)) for part in base.parts])
        gradients = [torch.empty_like(part.local) for part in base.parts]
        del gradients

    def _counts(self, part: ParameterShard) -> bool:
        return self._mesh.replica == 0 and (self._mesh.tp_rank == 0 or part.across_tp == "divided")

    # training

    def score(self, micros: Sequence[Sequence[Segment]], *, backward: bool) -> list[Scored]:
        return [scored(*each) for each in self.run(micros, backward=backward)]

    def run(self, micros: Sequence[Sequence[Segment]], *, backward: bool) -> list[tuple[Segment, Scores, int]]:
        """Score segments. Return each with its stream's scores and its first row there; gradients are accumulated.

        A rank without a sequence in a micro-batch adds exact zeros. With one sequence per micro-batch, no bit therefore
        depends on the number of ranks.
        """
        found = []
        for segments in micros:
            if segments:
                leaves, tp = [None] * len(segments), self._mesh.tp_size
                stream = make_stream(segments, leaves, self._losses, self._mesh.device, multiple=tp)
            else:
                stream = empty_stream(self._losses, self._mesh.device, length=self._mesh.tp_size)
            with torch.set_grad_enabled(backward):
                totals, (scores,) = self.base.run([stream], self._losses, backward=backward)
            if backward:
                self._backward(totals)
            scores = scores.begin_to_host()
            found += [(segment, scores, start) for segment, (start, _) in zip(segments, stream.bounds, strict=False)]
        wait_for(self._mesh.device)
        return found

    def _backward(self, totals: Sequence[torch.Tensor]) -> None:
        """Add to the gradients. If tp ranks hold parts of a gradient, add the sum of the parts."""
        held = [(part, part.parameter.grad) for part in self.base.parts if part.across_tp == "partial"]
        for part, _ in held:
            part.parameter.grad = None
        torch.autograd.backward(totals)
        for part, before in held:
            added = part.parameter.grad
            assert added is not None
            dist.all_reduce(local(added), group=self._mesh.tp.get_group())
            if before is not None:
                local(before).add_(local(added))
                part.parameter.grad = before

    def let_go(self) -> None:
        self.base.let_go()
