"""From operations to micro-batches distributed over the ranks. No torch.

Each sequence stays whole, on one rank. All ranks get the same number of micro-batches, because gathering a layer takes
all of them; a rank without work gets an empty one.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from tinsmith import Datum, ForwardBackward, LossSpec
from tinsmith_fsdp.messages import Owner, Segment

MicroBatch = list[list[Segment]]  # by data-parallel rank


def segments(ops: Iterable[ForwardBackward], losses: Mapping[str, LossSpec]) -> Iterator[Segment]:
    """Yield every sequence in order. `index` counts them; `position` is set when they are distributed."""
    pairs = [(op, datum) for op in ops for datum in op.data]
    for index, (op, datum) in enumerate(pairs):
        spec = losses[op.loss_fn]
        yield _segment(op, datum, spec, index)


def _segment(op: ForwardBackward, datum: Datum, spec: LossSpec, index: int) -> Segment:
    targets = datum.targets_TK
    return Segment(
        model_id=op.model_id,
        index=index,
        position=0,
        tokens_T=np.asarray(datum.tokens_T),
        targets_TK=targets,
        loss_fn=op.loss_fn,
        loss_inputs={
            name: np.asarray(datum.loss_inputs[name], np.float32).reshape(targets.shape) for name in spec.inputs
        },
        loss_config={**spec.config, **op.loss_fn_config},
    )


def deal(work: Sequence[Segment], num_ranks: int, max_tokens: int) -> Iterator[MicroBatch]:
    """Fill micro-batches in order. Each sequence goes to the rank with the fewest tokens, if it fits there."""
    batch, loads, position = _empty(num_ranks), [0] * num_ranks, 0
    for segment in work:
        lightest = min(range(num_ranks), key=loads.__getitem__)
        if loads[lightest] and loads[lightest] + segment.num_tokens > max_tokens:
            yield batch
            batch, loads, position, lightest = _empty(num_ranks), [0] * num_ranks, 0, 0
        batch[lightest].append(replace(segment, position=position))
        loads[lightest] += segment.num_tokens
        position += 1
    if position:
        yield batch


def one_by_one(work: Sequence[Segment], num_ranks: int) -> Iterator[MicroBatch]:
    """Give every sequence its own micro-batch, in order, so that its gradient is computed separately."""
    for number, segment in enumerate(work):
        batch = _empty(num_ranks)
        batch[number % num_ranks].append(segment)
        yield batch


def owners(micro: MicroBatch) -> list[Owner]:
    """Return the owner of each position."""
    placed = {
        segment.position: Owner(model_id=segment.model_id, dp_rank=dp_rank)
        for dp_rank, share in enumerate(micro)
        for segment in share
    }
    return [placed[position] for position in range(len(placed))]


def _empty(num_ranks: int) -> MicroBatch:
    return [[] for _ in range(num_ranks)]
