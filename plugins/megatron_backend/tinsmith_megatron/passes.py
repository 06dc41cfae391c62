"""A pass of streams through the pipeline, its results by sequence, and the load of the experts by operation.

Legend: L = layers of this rank's stage, E = experts of a layer, O = operations.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from tinsmith import IntArray
from tinsmith_megatron.parallel import Coordinates
from tinsmith_megatron.stage import Stage
from tinsmith_megatron.streams import Stream
from tinsmith_workers import ExpertLoad, ModelPart, Scored
from tinsmith_workers.torch import Scores, scored, wait_for


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
    """Give the schedule the loss, a token count that it ignores, and the outputs to keep."""
    return loss.clone(), torch.ones((), dtype=torch.int, device=loss.device), scores


def answers(
    streams: Sequence[Stream], scores: Sequence[Scores], coordinates: Coordinates, part: ModelPart
) -> Iterator[Scored | ExpertLoad]:
    """Yield a rank's results of each sequence, and the load of its layers' experts by operation."""
    yield from _expert_loads(streams, part.layers.start)
    if coordinates.tp_rank:
        return  # the others have computed the same scores
    on_host = [each.begin_to_host() for each in scores]
    wait_for(streams[0].tokens_T.device)
    for stream, found in zip(streams, on_host, strict=False):
        for segment, (start, _) in zip(stream.segments, stream.bounds, strict=False):  # the last may be padding
            yield scored(segment, found, start)


def _expert_loads(streams: Sequence[Stream], first_layer: int) -> Iterator[ExpertLoad]:
    """Yield nothing if there are no experts, or no sequences."""
    counted = [stream for stream in streams if stream.operations and stream.loads]
    if not counted:
        return
    loads = [torch.stack([stream.loads[layer] for layer in sorted(stream.loads)])[:, :-1] for stream in counted]
    load_LOE: IntArray = torch.cat(loads, dim=1).cpu().numpy()
    totals: dict[int, IntArray] = {}
    operations = [operation for stream in counted for operation in stream.operations]
    for number, operation in enumerate(operations):
        totals[operation] = load_LOE[:, number] + totals.get(operation, 0)
    for operation, num_tokens_LE in totals.items():
        yield ExpertLoad(operation=operation, first_layer=first_layer, num_tokens_LE=num_tokens_LE)
