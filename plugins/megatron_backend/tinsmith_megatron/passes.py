"""A pass of streams through the pipeline, and its results by sequence."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from tinsmith.torch_workers import to_host
from tinsmith.workers import Scored
from tinsmith_megatron.head import Scores
from tinsmith_megatron.stage import Stage
from tinsmith_megatron.streams import Stream


def run_pipeline(stage: Stage, streams: Sequence[Stream], *, backward: bool) -> list[Scores]:
    """Run Megatron's pipeline schedule. The ranks of the last stage get scores, the others nothing."""

    def step(remaining: Iterator[Stream], stage: Stage) -> tuple[torch.Tensor, Any]:
        output, scores = stage(next(remaining), backward=backward)
        return output, partial(_kept, scores)

    with torch.set_grad_enabled(backward):
        scores: list[Scores] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(streams),
            model=stage,
            num_microbatches=len(streams),
            seq_length=streams[0].num_rows,  # of no account: lengths vary, and are sent along
            micro_batch_size=1,
            forward_only=not backward,
        )
    return scores


def _kept(scores: Scores, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Scores]:
    """Tell the schedule the loss, a number of tokens that it does not need, and what it shall keep."""
    return loss.clone(), torch.ones((), dtype=torch.int, device=loss.device), scores


def scored(stream: Stream, scores: Scores) -> Iterator[Scored]:
    for segment, (start, stop) in zip(stream.segments, stream.bounds, strict=False):  # the last may be padding
        rows, width = slice(start, stop), segment.targets_TK.shape[1]
        loss = float(scores.loss_TK[rows, :width].sum(dtype=torch.float64))
        yield Scored(index=segment.index, logp_TK=to_host(scores.logp_TK[rows, :width]), loss=loss)
