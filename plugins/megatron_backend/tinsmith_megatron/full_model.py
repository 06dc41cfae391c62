"""One rank's part of a model whose own weights are trained, and the optimizer of all models."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from tinsmith_checkpoints.huggingface import WeightFiles
from tinsmith_megatron.adapters import Stacks
from tinsmith_megatron.canonical import read
from tinsmith_megatron.parallel import Coordinates
from tinsmith_megatron.passes import answers, run_pipeline
from tinsmith_megatron.program import Setup
from tinsmith_megatron.shards import shards_of
from tinsmith_megatron.stage import Stage
from tinsmith_megatron.streams import make_stream
from tinsmith_workers import Answer, ModelPart, Segment
from tinsmith_workers.torch import FullModelOfWorker, LossTable, Stepped

_CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_ divides by the norm plus this


class FullModel(FullModelOfWorker):
    """A stage of its own, beside the adapters' stage."""

    def __init__(
        self,
        model_id: str,
        setup: Setup,
        losses: LossTable,
        coordinates: Coordinates,
        part: ModelPart,
        device: torch.device,
    ) -> None:
        self._model_id, self._setup, self._losses, self._coordinates = model_id, setup, losses, coordinates
        self._part = part
        self._stage = Stage(setup, losses, trainable=True).to(device)
        self._shards = shards_of(self._stage, setup, coordinates, part)
        super().__init__(device, self._shards, adamw_)
        with WeightFiles(Path(setup.model_path), framework="pt") as files:
            for shard in self._shards:  # its own rows; it gets the others' from the ranks that read them
                read(files, shard.own_pieces, shard.weights)
        self._spread()

    @torch.no_grad()
    def _spread(self) -> None:
        for shard in self._shards:
            shard.spread()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all canonical tensors of which this rank writes a part."""
        return {piece.name: piece.shape for shard in self._shards if shard.counts for piece in shard.pieces}

    def score(self, micros: Sequence[Sequence[Segment]], *, backward: bool) -> list[Answer]:
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
        return list(answers(streams, scores, self._coordinates, self._part))

    @torch.no_grad()
    def _complete(self) -> None:
        """Add what the pass has found to the pending gradients. A table that two stages hold has both their parts."""
        if self._setup.architecture.shape.tied and self._setup.config.pipeline_parallel > 1:
            for shard in self._shards:
                if any(piece.name == "model.embed_tokens.weight" for piece in shard.pieces):
                    dist.all_reduce(shard.passing, group=parallel_state.get_embedding_group())
        for shard in self._shards:
            shard.end()


@torch.no_grad()
def adamw_(tensors: Sequence[Stepped]) -> None:
    """Step all tensors in place as torch.optim.AdamW, one after the other: temporaries are as large as one.

    Bias corrections are computed in float64, once per step.
    """
    for each in tensors:
        adam, step, gradient = each.adam, each.step, each.gradient
        if 0.0 < adam.grad_clip_norm < each.norm + _CLIP_EPS:
            gradient.mul_(adam.grad_clip_norm / (each.norm + _CLIP_EPS))
        each.m.mul_(adam.beta1).add_(gradient, alpha=1.0 - adam.beta1)
        each.v.mul_(adam.beta2).addcmul_(gradient, gradient, value=1.0 - adam.beta2)
        each.weights.mul_(1.0 - adam.learning_rate * adam.weight_decay)
        roots = each.v.sqrt().div_(math.sqrt(1.0 - adam.beta2**step)).add_(adam.eps)
        each.weights.addcdiv_(each.m, roots, value=-adam.learning_rate / (1.0 - adam.beta1**step))
