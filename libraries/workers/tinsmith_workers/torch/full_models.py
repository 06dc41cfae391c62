"""A worker's part of a model whose own weights are trained: optimizer steps on its shards, and its state in slices."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import torch
import torch.distributed as dist

from tinsmith.divergence import refuses_step
from tinsmith.operations import AdamParams
from tinsmith_checkpoints.huggingface.safetensors_files import StoredTensor
from tinsmith_checkpoints.huggingface.state_files import Kind, Targets
from tinsmith_workers.program import FullState
from tinsmith_workers.sequences import Answer, Segment
from tinsmith_workers.state_writer import Slice
from tinsmith_workers.torch.adamw import Step, Stepped, adamw_
from tinsmith_workers.torch.transfers import HostCopies

_TOGETHER: Final = 16  # tensors per call of the optimizer, whose temporaries are as large as the tensors
_PIECE: Final = 1 << 22  # numbers that are copied at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Rows of a parameter, or of a worker's shard of it, that are rows of one canonical tensor."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    start: int  # the first row in the tensor
    local: int  # and in the parameter, or the shard
    count: int
    columns: slice | None = None  # None: all

    def within(self, rows: range) -> "Piece | None":
        """Return what lies in these rows of the parameter, as a piece of them."""
        first, last = max(self.local, rows.start), min(self.local + self.count, rows.stop)
        if first >= last:
            return None
        return Piece(
            name=self.name,
            shape=self.shape,
            start=self.start + first - self.local,
            local=first - rows.start,
            count=last - first,
            columns=self.columns,
        )


class TrainedShard(Protocol):
    """A worker's rows of one parameter, and their moments, in float32."""

    @property
    def weights(self) -> torch.Tensor: ...

    @property
    def m(self) -> torch.Tensor: ...

    @property
    def v(self) -> torch.Tensor: ...

    @property
    def gradient(self) -> torch.Tensor | None:
        """The pending one."""

    @property
    def counts(self) -> bool:
        """True if this worker, of those with the same numbers, counts and writes them."""

    @property
    def own_pieces(self) -> Iterable[Piece]: ...

    def begin_gradient(self) -> None:
        """Make the pending gradient zeros."""

    def drop_gradient(self) -> None: ...


class FullModelOfWorker(ABC):
    """A subclass runs passes. All workers get the same calls."""

    def __init__(self, device: torch.device, shards: Sequence[TrainedShard], optimizer: Step = adamw_) -> None:
        self._device, self.shards, self._optimizer = device, shards, optimizer
        self._moments = False  # True after a step, or if moments were restored
        self._step = 0
        self._copies = HostCopies(device)

    @abstractmethod
    def score(self, micros: Sequence[Sequence[Segment]], *, backward: bool) -> Sequence[Answer]:
        """Score this worker's segments by micro-batch. Add to the gradients."""

    def _spread(self) -> None:
        """Weights have changed: give others what they compute with."""

    # steps

    def optim_step(self, adam: AdamParams) -> float:
        """Step this worker's shards, unless that is refused. Return the norm of the whole gradient before clipping."""
        gradients = [
            torch.zeros_like(shard.weights) if shard.gradient is None else shard.gradient for shard in self.shards
        ]
        norm = self._norm(gradients)
        if refuses_step(norm, adam):
            self.drop_gradient()
            return norm
        self._step += 1
        self._moments = True
        tensors = [
            Stepped(shard.weights, gradient, shard.m, shard.v, adam, norm, self._step)
            for shard, gradient in zip(self.shards, gradients, strict=True)
        ]
        for start in range(0, len(tensors), _TOGETHER):
            self._optimizer(tensors[start : start + _TOGETHER])
        self.drop_gradient()
        self._spread()
        return norm

    def _norm(self, gradients: Sequence[torch.Tensor]) -> float:
        """Count every element of the whole gradient exactly once."""
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        for shard, gradient in zip(self.shards, gradients, strict=True):
            if shard.counts:
                squares += square_norm(gradient)
        if dist.get_world_size() > 1:
            dist.all_reduce(squares)
        return math.sqrt(float(squares))

    def gradients(self) -> Iterator[torch.Tensor]:
        """Yield this worker's part of the pending gradient."""
        return (shard.gradient for shard in self.shards if shard.gradient is not None)

    def drop_gradient(self) -> None:
        for shard in self.shards:
            shard.drop_gradient()

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield this worker's part of the state."""
        for shard in self.shards:
            yield from (shard.weights, shard.m, shard.v)
        yield from self.gradients()

    # state

    def state(self) -> FullState:
        return FullState(step=self._step, moments=self._moments, pending=any(True for _ in self.gradients()))

    def begin_copying(self) -> None:
        """Record an event that readers of slices wait for."""
        self._copies.begin()

    def slices(self, targets: Targets) -> Iterator[Slice]:
        """List this worker's parts of these tensors: what changes first comes first."""
        for kind in sorted(targets, key=lambda kind: kind != "gradients"):
            for shard in self.shards:
                if shard.counts:
                    for piece in shard.own_pieces:
                        yield from self._slices_of(kind, piece, _tensor(kind, shard), targets[kind][piece.name])

    def _slices_of(self, kind: Kind, piece: Piece, values: torch.Tensor, target: StoredTensor) -> Iterator[Slice]:
        for start, rows in _bands(piece, values):
            yield Slice(
                kind=kind,
                target=target,
                start=start,
                columns=None if piece.columns is None else (piece.columns.start, piece.columns.stop),
                num_bytes=rows.numel() * rows.element_size(),
                read=partial(self._copies.copy, rows),
            )

    def restore(self, state: FullState, stored: Targets) -> None:
        """Replace the current state by this worker's part of these tensors."""
        self.drop_gradient()
        self._moments, self._step = state.moments, state.step
        for shard in self.shards:
            _fill(shard, "weights", stored)
            if state.moments:
                _fill(shard, "adam_m", stored)
                _fill(shard, "adam_v", stored)
            else:
                shard.m.zero_()
                shard.v.zero_()
            if state.pending:
                shard.begin_gradient()
                _fill(shard, "gradients", stored)
        self._spread()


def square_norm(gradient: torch.Tensor) -> torch.Tensor:
    """Sum the squares in float64."""
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    return norm.square()


def _tensor(kind: Kind, shard: TrainedShard) -> torch.Tensor:
    tensors = {"weights": shard.weights, "adam_m": shard.m, "adam_v": shard.v, "gradients": shard.gradient}
    found = tensors[kind]
    assert found is not None
    return found


def _bands(piece: Piece, values: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Divide a piece into bands of a few megabytes. Yield the first row in the tensor, and the rows."""
    own = values[piece.local : piece.local + piece.count]
    height = max(1, _PIECE // max(1, own[:1].numel()))
    for start in range(0, piece.count, height):
        yield piece.start + start, own[start : start + height]


def _fill(shard: TrainedShard, kind: Kind, stored: Targets) -> None:
    """Read this worker's rows, and columns, of the tensors."""
    for piece in shard.own_pieces:
        for start, rows in _bands(piece, _tensor(kind, shard)):
            found = stored[kind][piece.name].load_rows(start, start + len(rows))
            own = found if piece.columns is None else found[:, piece.columns]
            rows.copy_(torch.from_numpy(own.reshape(rows.shape)))
