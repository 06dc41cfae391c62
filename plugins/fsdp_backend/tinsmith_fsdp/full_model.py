"""One rank's part of a model whose own weights are trained: passes, AdamW on its shards, and its state in pieces.

A rank never holds anything whole except a layer while it computes. Gradients and moments are DTensors laid out like the
weights. Transfers to and from the host carry only this rank's rows.
"""

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tinsmith import AdamParams, FloatArray
from tinsmith.workers import Kind, Piece, Segment
from tinsmith_fsdp.base_model import BaseModel, Part
from tinsmith_fsdp.head import Scores
from tinsmith_fsdp.loss_table import LossTable
from tinsmith_fsdp.mesh import Mesh
from tinsmith_fsdp.messages import FullState, Place
from tinsmith_fsdp.optimizer import Stepped, adamw_
from tinsmith_fsdp.streams import empty_stream, make_stream

_TOGETHER = 16  # tensors per call of the optimizer, whose temporaries are as large as the tensors
_PIECE = 1 << 22  # numbers in one message


class FullModel:
    """Receives the same calls on every rank."""

    def __init__(self, base: BaseModel, mesh: Mesh, losses: LossTable) -> None:
        """Allocate the moments, and check that gradients fit as well: the first step needs both."""
        self._base, self._mesh, self._losses = base, mesh, losses
        self._m, self._v = ({part.name: torch.zeros_like(part.parameter.detach()) for part in base.parts} for _ in "mv")
        self._moments = False  # True after a step, or if moments were restored
        self._step = 0
        self._incoming: dict[tuple[Kind, str], FloatArray] = {}
        gradients = [torch.empty_like(part.local) for part in base.parts]
        del gradients

    def places(self) -> tuple[Place, ...]:
        return tuple(
            Place(
                name=part.name,
                shape=part.shape,
                rows=(part.rows.start, part.rows.stop),
                columns=None if part.columns is None else (part.columns.start, part.columns.stop),
            )
            for part in self._base.parts
        )

    # training

    def run(self, micros: Sequence[Sequence[Segment]], *, backward: bool) -> list[tuple[Segment, Scores, int]]:
        """Score segments. Return each with its stream's scores and its first row there; gradients are accumulated.

        A rank without a sequence in a micro-batch adds exact zeros. With one sequence per micro-batch, no bit therefore
        depends on the number of ranks.
        """
        scored = []
        for segments in micros:
            if segments:
                stream = make_stream(segments, [None] * len(segments), self._losses, self._mesh.device)
            else:
                stream = empty_stream(self._losses, self._mesh.device)
            with torch.set_grad_enabled(backward):
                totals, (scores,) = self._base.run([stream], self._losses, backward=backward)
            if backward:
                self._backward(totals)
            scored += [(segment, scores, start) for segment, (start, _) in zip(segments, stream.bounds, strict=False)]
        return scored

    def _backward(self, totals: Sequence[torch.Tensor]) -> None:
        """Add to the gradients. If tp ranks hold parts of a gradient, add the sum of the parts."""
        held = [(part, part.parameter.grad) for part in self._base.parts if part.across_tp == "partial"]
        for part, _ in held:
            part.parameter.grad = None
        torch.autograd.backward(totals)
        for part, before in held:
            added = part.parameter.grad
            assert added is not None
            dist.all_reduce(_local(added), group=self._mesh.tp.get_group())
            if before is not None:
                _local(before).add_(_local(added))
                part.parameter.grad = before

    def optim_step(self, adam: AdamParams) -> float:
        """Step this rank's shards. Return the norm of the whole gradient before clipping."""
        parts = self._base.parts
        gradients = [torch.zeros_like(part.local) if (found := _gradient(part)) is None else found for part in parts]
        norm = self._norm(gradients)
        self._step += 1
        self._moments = True
        tensors = [
            Stepped(
                part.local, gradient, _local(self._m[part.name]), _local(self._v[part.name]), adam, norm, self._step
            )
            for part, gradient in zip(parts, gradients, strict=True)
        ]
        for start in range(0, len(tensors), _TOGETHER):
            adamw_(tensors[start : start + _TOGETHER])
        self._drop_gradients()
        return norm

    def _norm(self, gradients: Sequence[torch.Tensor]) -> float:
        """Count every element of the whole gradient exactly once."""
        squares = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        for part, gradient in zip(self._base.parts, gradients, strict=True):
            if part.across_tp == "divided" or self._mesh.tp_rank == 0:
                squares += torch.linalg.vector_norm(gradient, dtype=torch.float64) ** 2
        if dist.get_world_size() > 1:
            dist.all_reduce(squares)
        return math.sqrt(float(squares))

    def _drop_gradients(self) -> None:
        for part in self._base.parts:
            part.parameter.grad = None

    # state

    def state(self) -> FullState:
        pending = any(part.parameter.grad is not None for part in self._base.parts)
        return FullState(step=self._step, moments=self._moments, pending=pending)

    def pieces(self, kinds: Sequence[Kind]) -> Iterator[Piece]:
        """Yield this rank's part of these tensors."""
        for kind in kinds:
            for part in self._base.parts:
                local = self._tensor(kind, part)
                columns = None if part.columns is None else (part.columns.start, part.columns.stop)
                height = max(1, _PIECE // max(1, local[:1].numel()))
                for start in range(0, len(local), height):
                    values: FloatArray = local[start : start + height].to("cpu", copy=True).numpy()
                    yield Piece(
                        kind=kind, name=part.name, start=part.rows.start + start, columns=columns, values=values
                    )

    def _tensor(self, kind: Kind, part: Part) -> torch.Tensor:
        if kind == "weights":
            return part.local
        if kind == "gradients":
            gradient = _gradient(part)
            assert gradient is not None
            return gradient
        return _local((self._m if kind == "adam_m" else self._v)[part.name])

    def take(self, kind: Kind, name: str, values: FloatArray) -> None:
        """Keep a tensor to be restored on the host until all of them have arrived."""
        self._incoming[kind, name] = values

    def drop_taken(self) -> None:
        self._incoming.clear()

    def restore(self, state: FullState) -> None:
        """Replace the current state by the tensors passed to `take`."""
        incoming, self._incoming = self._incoming, {}
        self._drop_gradients()
        self._moments, self._step = state.moments, state.step
        both: dict[Kind, dict[str, torch.Tensor]] = {"adam_m": self._m, "adam_v": self._v}
        for part in self._base.parts:
            part.local.copy_(torch.from_numpy(incoming["weights", part.name]))
            for kind, moments in both.items():
                moment = _local(moments[part.name])
                if state.moments:
                    moment.copy_(torch.from_numpy(incoming[kind, part.name]))
                else:
                    moment.zero_()
            if state.pending:
                part.parameter.grad = _laid_out(part, incoming["gradients", part.name])


def _laid_out(part: Part, values: FloatArray) -> torch.Tensor:
    tensor = torch.zeros_like(part.parameter.detach())
    _local(tensor).copy_(torch.from_numpy(values))
    return tensor


def _gradient(part: Part) -> torch.Tensor | None:
    return None if part.parameter.grad is None else _local(part.parameter.grad)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
