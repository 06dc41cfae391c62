"""The sequences of operations, dealt out to the data-parallel ranks of a backend, and their results put together again.

Array suffixes: T = tokens of one sequence, K = targets per token; L = layers, C = experts of a token,
E = experts of a layer.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tinsmith.divergence import NOT_FINITE
from tinsmith.expert_load import expert_metrics
from tinsmith.losses import LossSpec
from tinsmith.operations import Array, Datum, FloatArray, ForwardBackward, ForwardBackwardOutput, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One sequence of a micro-batch, and the place of its results."""

    model_id: str
    index: int  # among the sequences of the call
    position: int  # position in the micro-batch, over all ranks: the order in which gradients are added
    tokens_T: Array
    targets_TK: Array
    loss_fn: str
    loss_inputs: Mapping[str, Array]  # [T, K] each
    loss_config: Mapping[str, float]
    experts_TLC: Array | None = None  # of the first tokens, there may be fewer; None: routing is not replayed
    operation: int = 0  # position in the call

    @property
    def num_tokens(self) -> int:
        return len(self.tokens_T)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A segment's results."""

    index: int
    logp_TK: FloatArray
    loss: float


@dataclass(frozen=True, slots=True)
class NotFinite:
    """A rank returns it beside its results: the model's pending gradient, or the rank's part of it, is not finite."""

    model_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoad:
    """A rank returns it beside its results: how many tokens of an operation each expert of its layers has computed.

    Of these tokens, and of these layers, others may have computed the rest.
    """

    operation: int  # position in the call
    first_layer: int
    num_tokens_LE: IntArray


Answer = Scored | NotFinite | ExpertLoad
"""A rank's results of a call."""

MicroBatch = list[list[Segment]]
"""By data-parallel rank. A sequence stays whole, on one rank. A rank may have none, but takes part in every batch."""


def segments(ops: Iterable[ForwardBackward], losses: Mapping[str, LossSpec]) -> Iterator[Segment]:
    """Yield every sequence in order. `index` counts them; `position` is set when they are dealt out."""
    pairs = [(number, op, datum) for number, op in enumerate(ops) for datum in op.data]
    for index, (number, op, datum) in enumerate(pairs):
        yield _segment(op, datum, losses[op.loss_fn], index, number)


def _segment(op: ForwardBackward, datum: Datum, spec: LossSpec, index: int, operation: int) -> Segment:
    targets, experts = datum.targets_TK, datum.routed_experts
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
        experts_TLC=None if experts is None or len(experts) == 0 else experts,
        operation=operation,
    )


def deal(
    work: Sequence[Segment], num_ranks: int, max_tokens: int, *, max_sequences: int | None = None
) -> Iterator[MicroBatch]:
    """Fill micro-batches in order. Each sequence goes to the rank with the fewest tokens, if it fits there.

    max_sequences: of a rank, in a micro-batch.
    """
    batch, loads, position = _empty(num_ranks), [0] * num_ranks, 0
    for segment in work:
        lightest = min(range(num_ranks), key=loads.__getitem__)
        full = max_sequences is not None and len(batch[lightest]) >= max_sequences
        if loads[lightest] and (full or loads[lightest] + segment.num_tokens > max_tokens):
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


def _empty(num_ranks: int) -> MicroBatch:
    return [[] for _ in range(num_ranks)]


def combined_outputs(
    ops: Sequence[ForwardBackward], answers: Iterable[Sequence[Answer]]
) -> list[ForwardBackwardOutput]:
    """Put together what the ranks have scored, in any order, into one output for each operation.

    Each datum's logprobs get the shape of its targets. Losses are summed in order, in float64.
    """
    every = [each for answer in answers for each in answer]
    found = {each.index: each for each in every if isinstance(each, Scored)}
    diverged = {each.model_id for each in every if isinstance(each, NotFinite)}
    loads = defaultdict(list)
    for each in every:
        if isinstance(each, ExpertLoad):
            loads[each.operation].append(each)
    results, start = [], 0
    for number, op in enumerate(ops):
        own = [found[index] for index in range(start, start + len(op.data))]
        start += len(op.data)
        logprobs = tuple(
            {"logprobs": np.ascontiguousarray(each.logp_TK.reshape(np.shape(datum.loss_inputs["target_tokens"])))}
            for datum, each in zip(op.data, own, strict=True)
        )
        metrics = {"loss:sum": float(sum(each.loss for each in own))}
        metrics |= _expert_metrics(loads[number])
        if op.model_id in diverged:
            metrics[NOT_FINITE] = 1.0
        results.append(ForwardBackwardOutput(loss_fn_outputs=logprobs, metrics=metrics))
    return results


def _expert_metrics(loads: Sequence[ExpertLoad]) -> Mapping[str, float]:
    """Return an operation's metrics of its experts; none if no rank has any. Counts of the same layers add up."""
    totals: dict[int, IntArray] = {}
    for load in loads:
        totals[load.first_layer] = load.num_tokens_LE + totals.get(load.first_layer, 0)
    return expert_metrics(np.concatenate([totals[first] for first in sorted(totals)])) if totals else {}
