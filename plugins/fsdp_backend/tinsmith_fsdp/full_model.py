"""One rank's part of a model whose own weights are trained: passes, AdamW on its shards, and its state in pieces.

A rank never holds anything whole except a layer while it computes. Gradients and moments are DTensors laid out like the
weights. Transfers to and from the host carry only this rank's rows.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tinsmith import AdamParams, refuses_step
from tinsmith.huggingface import Kind, StoredTensor, Targets
from tinsmith.torch_workers import FullModelOfWorker, HostCopies, LossTable, wait_for
from tinsmith.workers import FullState, Segment, Slice
from tinsmith_fsdp.base_model import BaseModel, Part
from tinsmith_fsdp.head import Scores
from tinsmith_fsdp.mesh import Mesh
from tinsmith_fsdp.messages import Place
from tinsmith_fsdp.optimizer import Stepped, adamw_
from tinsmith_fsdp.streams import empty_stream, make_stream

_TOGETHER = 16  # tensors per call of the optimizer, whose temporaries are as large as the tensors
_PIECE = 1 << 22  # numbers that are copied at a time


class FullModel(FullModelOfWorker):
    """Receives the same calls on every rank."""

    def __init__(self, base: BaseModel, mesh: Mesh, losses: LossTable) -> None:
        """Allocate the moments, and check that gradients fit as well: the first step needs both."""
        self._base, self._mesh, self._losses = base, mesh, losses
        self._m, self._v = ({part.name: torch.zeros_like(part.parameter.detach()) for part in base.parts} for _ in "mv")
        self._moments = False  # True after a step, or if moments were restored
        self._step = 0
        self._copies = HostCopies(mesh.device)
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
                leaves, tp = [None] * len(segments), self._mesh.tp_size
                stream = make_stream(segments, leaves, self._losses, self._mesh.device, multiple=tp)
            else:
                stream = empty_stream(self._losses, self._mesh.device, length=self._mesh.tp_size)
            with torch.set_grad_enabled(backward):
                totals, (scores,) = self._base.run([stream], self._losses, backward=backward)
            if backward:
                self._backward(totals)
            scores = scores.begin_to_host()
            scored += [(segment, scores, start) for segment, (start, _) in zip(segments, stream.bounds, strict=False)]
        wait_for(self._mesh.device)
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
        """Step this rank's shards, unless that is refused. Return the norm of the whole gradient before clipping."""
        parts = self._base.parts
        gradients = [torch.zeros_like(part.local) if (found := _gradient(part)) is None else found for part in parts]
        norm = self._norm(gradients)
        if refuses_step(norm, adam):
            self.drop_gradient()
            return norm
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
        self.drop_gradient()
        return norm

    def _norm(self, gradients: Sequence[torch.Tensor]) -> float:
        """Count every element of the whole gradient exactly once."""
        squares = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        for part, gradient in zip(self._base.parts, gradients, strict=True):
            if self._speaks_for(part):
                squares += torch.linalg.vector_norm(gradient, dtype=torch.float64) ** 2
        if dist.get_world_size() > 1:
            dist.all_reduce(squares)
        return math.sqrt(float(squares))

    def _speaks_for(self, part: Part) -> bool:
        """Return whether it is this rank, of those that hold the same numbers, that counts and writes them."""
        return self._mesh.replica == 0 and (self._mesh.tp_rank == 0 or part.across_tp == "divided")

    def gradients(self) -> Iterator[torch.Tensor]:
        return (gradient for part in self._base.parts if (gradient := _gradient(part)) is not None)

    def drop_gradient(self) -> None:
        for part in self._base.parts:
            part.parameter.grad = None

    def let_go(self) -> None:
        self._base.let_go()

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield this rank's part of the state."""
        for part in self._base.parts:
            yield part.local
            yield _local(self._m[part.name])
            yield _local(self._v[part.name])
            if (gradient := _gradient(part)) is not None:
                yield gradient

    # state

    def state(self) -> FullState:
        pending = any(part.parameter.grad is not None for part in self._base.parts)
        return FullState(step=self._step, moments=self._moments, pending=pending)

    def slices(self, targets: Targets) -> Iterator[Slice]:
        """List this rank's parts of these tensors: what changes first comes first."""
        for kind in sorted(targets, key=lambda kind: kind != "gradients"):
            for part in self._base.parts:
                if self._speaks_for(part):
                    yield from self._slices_of(kind, part, targets[kind][part.name])

    def _slices_of(self, kind: Kind, part: Part, target: StoredTensor) -> Iterator[Slice]:
        local = self._tensor(kind, part)
        for start, stop in _bands(local):
            rows = local[start:stop]
            yield Slice(
                kind=kind,
                target=target,
                start=part.rows.start + start,
                columns=None if part.columns is None else (part.columns.start, part.columns.stop),
                num_bytes=rows.numel() * rows.element_size(),
                read=partial(self._copies.copy, rows),
            )

    def begin_copying(self) -> None:
        self._copies.begin()

    def _tensor(self, kind: Kind, part: Part) -> torch.Tensor:
        if kind == "weights":
            return part.local
        if kind == "gradients":
            gradient = _gradient(part)
            assert gradient is not None
            return gradient
        return _local((self._m if kind == "adam_m" else self._v)[part.name])

    def restore(self, state: FullState, stored: Targets) -> None:
        """Replace the current state by this rank's part of these tensors."""
        self.drop_gradient()
        self._moments, self._step = state.moments, state.step
        for part in self._base.parts:
            _read(part, stored["weights"][part.name], part.local)
            for kind in ("adam_m", "adam_v"):
                moment = self._tensor(kind, part)
                if state.moments:
                    _read(part, stored[kind][part.name], moment)
                else:
                    moment.zero_()
            if state.pending:
                part.parameter.grad = torch.zeros_like(part.parameter.detach())
                _read(part, stored["gradients"][part.name], _local(part.parameter.grad))


def _bands(local: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Divide the rows of a shard into bands of a few megabytes."""
    height = max(1, _PIECE // max(1, local[:1].numel()))
    for start in range(0, len(local), height):
        yield start, min(start + height, len(local))


def _read(part: Part, stored: StoredTensor, local: torch.Tensor) -> None:
    """Read this rank's rows, and columns, of a tensor."""
    for start, stop in _bands(local):
        rows = stored.load_rows(part.rows.start + start, part.rows.start + stop)
        own = rows if part.columns is None else rows[:, part.columns]
        local[start:stop].copy_(torch.from_numpy(own))


def _gradient(part: Part) -> torch.Tensor | None:
    return None if part.parameter.grad is None else _local(part.parameter.grad)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
