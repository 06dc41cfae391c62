"""One rank's part of a model whose own weights are trained: passes, AdamW on its shards, and its state in slices."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from tinsmith import AdamParams, refuses_step
from tinsmith.huggingface import Kind, StoredTensor, Targets, WeightFiles
from tinsmith.torch_workers import FullModelOfWorker, HostCopies, LossTable
from tinsmith.workers import Answer, FullState, ModelPart, Segment, Slice
from tinsmith_megatron.adapters import Stacks
from tinsmith_megatron.messages import Setup
from tinsmith_megatron.optimizer import adamw_, square_norm
from tinsmith_megatron.parallel import Place
from tinsmith_megatron.passes import answers, run_pipeline
from tinsmith_megatron.shards import Piece, Shard, shards_of
from tinsmith_megatron.stage import Stage
from tinsmith_megatron.streams import make_stream

_PIECE = 1 << 22  # numbers that are copied at a time


class FullModel(FullModelOfWorker):
    """Receives the same calls on every rank. A stage of its own, beside that of the adapters."""

    def __init__(
        self, model_id: str, setup: Setup, losses: LossTable, place: Place, part: ModelPart, device: torch.device
    ) -> None:
        self._model_id, self._setup, self._losses, self._place = model_id, setup, losses, place
        self._part, self._device = part, device
        self._stage = Stage(setup, losses, trainable=True).to(device)
        shape = setup.architecture.shape
        self._shards = shards_of(self._stage, shape, place, part, setup.config.tensor_parallel)
        self._moments = False  # True after a step, or if moments were restored
        self._step = 0
        self._copies = HostCopies(device)
        self._read()

    def _read(self) -> None:
        """Read this rank's rows from the model's files, and get the others' from them."""
        with WeightFiles(Path(self._setup.model_path), framework="pt") as files:
            for shard in self._shards:
                for piece in shard.own_pieces:
                    rows = slice(piece.start, piece.start + piece.count)
                    cut = (rows,) if piece.columns is None else (rows, piece.columns)
                    _rows(shard, shard.weights, piece).copy_(
                        files.part(piece.name, piece.shape, cut).reshape(piece.count, -1)
                    )
        self._spread()

    def _spread(self) -> None:
        with torch.no_grad():
            for shard in self._shards:
                shard.spread()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all canonical tensors of which this rank writes a part."""
        return {piece.name: piece.shape for shard in self._written for piece in shard.pieces}

    @property
    def _written(self) -> Iterator[Shard]:
        """Yield what this rank alone holds: each number of the model lies in one such shard."""
        return (shard for shard in self._shards if not shard.is_copy)

    # training

    def run(self, micros: Sequence[Sequence[Segment]], *, backward: bool) -> list[Answer]:
        """Score this rank's segments by micro-batch, and add to the pending gradients.

        With strict isolation, each micro-batch has one sequence, whose gradient is added by itself.
        """
        batches = [[micro] for micro in micros] if self._setup.strict and backward else [list(micros)]
        return [each for batch in batches for each in self._pass(batch, backward=backward)]

    def _pass(self, micros: Sequence[Sequence[Segment]], *, backward: bool) -> list[Answer]:
        stacks, multiple = Stacks([], backward=False), self._setup.config.tensor_parallel
        streams = [
            make_stream(segments, {self._model_id: 0}, stacks, self._losses, multiple=multiple, device=self._device)
            for segments in micros
        ]
        if backward:
            for shard in self._shards:
                shard.begin()
        scores = run_pipeline(self._stage, streams, backward=backward)
        if backward:
            self._complete()
        return list(answers(streams, scores, self._place, self._part))

    @torch.no_grad()
    def _complete(self) -> None:
        """Add what the pass has found to the pending gradients. A table that two stages hold has both their parts."""
        if self._setup.architecture.shape.tied and self._setup.config.pipeline_parallel > 1:
            for shard in self._shards:
                if any(piece.name == "model.embed_tokens.weight" for piece in shard.pieces):
                    dist.all_reduce(shard.passing, group=parallel_state.get_embedding_group())
        for shard in self._shards:
            shard.end()

    def optim_step(self, adam: AdamParams) -> float:
        """Step this rank's shards, and spread the weights, unless that is refused.

        Return the norm of the whole gradient before clipping.
        """
        for shard in self._shards:
            if shard.gradient is None:
                shard.gradient = torch.zeros_like(shard.weights)
        norm = self._norm()
        if refuses_step(norm, adam):
            self.drop_gradient()
            return norm
        self._step += 1
        self._moments = True
        for shard in self._shards:
            assert shard.gradient is not None
            adamw_(shard.weights, shard.m, shard.v, shard.gradient, adam, norm, self._step)
            shard.gradient = None
        self._spread()
        return norm

    def gradients(self) -> Iterator[torch.Tensor]:
        return (shard.gradient for shard in self._shards if shard.gradient is not None)

    def drop_gradient(self) -> None:
        for shard in self._shards:
            shard.gradient = None

    def _norm(self) -> float:
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        for shard in self._written:
            assert shard.gradient is not None
            squares += square_norm(shard.gradient)
        if dist.get_world_size() > 1:
            dist.all_reduce(squares)
        return math.sqrt(float(squares))

    # state

    def state(self) -> FullState:
        return FullState(step=self._step, moments=self._moments, pending=self._shards[0].gradient is not None)

    def slices(self, targets: Targets) -> Iterator[Slice]:
        """List this rank's parts of these tensors: what changes first comes first."""
        for kind in sorted(targets, key=lambda kind: kind != "gradients"):
            for shard in self._written:
                for piece in shard.own_pieces:
                    for band in _bands(piece):
                        yield self._slice(kind, targets[kind][piece.name], band, _tensor(kind, shard), shard)

    def _slice(self, kind: Kind, target: StoredTensor, piece: Piece, values: torch.Tensor, shard: Shard) -> Slice:
        rows = _rows(shard, values, piece)
        return Slice(
            kind=kind,
            target=target,
            start=piece.start,
            columns=None if piece.columns is None else (piece.columns.start, piece.columns.stop),
            num_bytes=rows.numel() * rows.element_size(),
            read=partial(self._copies.copy, rows),
        )

    def begin_copying(self) -> None:
        self._copies.begin()

    def restore(self, state: FullState, stored: Targets) -> None:
        """Replace the current state by this rank's part of these tensors."""
        self._moments, self._step = state.moments, state.step
        for shard in self._shards:
            _fill(shard, shard.weights, stored["weights"])
            for kind, moment in (("adam_m", shard.m), ("adam_v", shard.v)):
                if state.moments:
                    _fill(shard, moment, stored[kind])  # type: ignore[index]  # one of the kinds
                else:
                    moment.zero_()
            shard.gradient = torch.zeros_like(shard.weights) if state.pending else None
            if shard.gradient is not None:
                _fill(shard, shard.gradient, stored["gradients"])
        self._spread()


def _tensor(kind: Kind, shard: Shard) -> torch.Tensor:
    tensors = {"weights": shard.weights, "adam_m": shard.m, "adam_v": shard.v, "gradients": shard.gradient}
    found = tensors[kind]
    assert found is not None
    return found


def _rows(shard: Shard, values: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Return a piece's rows of the shard's values."""
    start = piece.local - shard.rows.start
    return values[start : start + piece.count]


def _bands(piece: Piece) -> Iterator[Piece]:
    """Divide a piece into bands of a few megabytes."""
    width = math.prod(piece.shape[1:])
    height = max(1, _PIECE // width)
    for first in range(piece.local, piece.local + piece.count, height):
        band = piece.within(range(first, first + height))
        assert band is not None
        yield band


def _fill(shard: Shard, values: torch.Tensor, stored: Mapping[str, StoredTensor]) -> None:
    """Read this rank's rows, and columns, of the tensors."""
    for piece in shard.own_pieces:
        for band in _bands(piece):
            rows = stored[band.name].load_rows(band.start, band.start + band.count)
            own = rows if band.columns is None else rows[:, band.columns]
            _rows(shard, values, band).copy_(torch.from_numpy(own.reshape(band.count, -1)))
