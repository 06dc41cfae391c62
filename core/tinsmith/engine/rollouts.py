"""What a pass of reinforcement learning shows: how far sampler and trainer are apart, and its rollouts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Final

import numpy as np
import numpy.typing as npt

from tinsmith import operations as ops
from tinsmith.corrections import drift_of, has_sampler_logprobs, sampler_kl
from tinsmith.engine.claimed import Finished
from tinsmith.store import RolloutsTrained
from tinsmith.store.rollouts import Rollout, encode_rollouts

_LEAST_PASSES: Final = 8  # that fit into a run's budget
_ITEM_BYTES: Final = 64  # of a rollout, without its tokens


def shows_rollouts(finished: Finished) -> bool:
    operation, result = finished.claimed.operation, finished.outcome.result
    return (
        isinstance(operation, ops.ForwardBackward)
        and not isinstance(operation, ops.Forward)
        and isinstance(result, ops.ForwardBackwardOutput)
        and has_sampler_logprobs(operation)
    )


def with_rollouts(finished: Finished, max_bytes: int) -> Finished:
    """Add what a pass shows to what is recorded with its result. `max_bytes`: of the run's rollouts; 0 keeps none."""
    operation, result = finished.claimed.operation, finished.outcome.result
    assert isinstance(operation, ops.ForwardBackward)
    assert isinstance(result, ops.ForwardBackwardOutput)
    outcome = replace(finished.outcome, seen=sampler_kl(operation, result.loss_fn_outputs))
    if max_bytes:
        trained = RolloutsTrained(
            model_id=operation.model_id,
            step=finished.step,
            seq_id=finished.claimed.record.seq_id,
            number=len(operation.data),
            content=encode_rollouts(*_kept(operation, result, max_bytes // _LEAST_PASSES)),
            max_bytes=max_bytes,
        )
        outcome = replace(outcome, effects=(*outcome.effects, trained))
    return replace(finished, outcome=outcome)


def _kept(
    operation: ops.ForwardBackward, result: ops.ForwardBackwardOutput, max_bytes: int
) -> tuple[list[Rollout], list[Rollout]]:
    """Return the rollouts of a pass to keep, and the others, for which there is no room.

    Those with the highest and the lowest advantages are kept first.
    """
    pairs = zip(operation.data, result.loss_fn_outputs, strict=True)
    every = list(_extremes_first([_rollout(datum, output) for datum, output in pairs]))
    sizes = accumulate(_ITEM_BYTES + len(each.tokens) for each in every)
    number = sum(size <= max_bytes for size in sizes)
    return every[:number], every[number:]


def _extremes_first(rollouts: Sequence[Rollout]) -> Iterator[Rollout]:
    ordered = sorted(rollouts, key=lambda each: each.advantage, reverse=True)
    for at in range((len(ordered) + 1) // 2):
        yield ordered[at]
        if at < len(ordered) - 1 - at:
            yield ordered[-1 - at]


def _rollout(datum: ops.Datum, output: Mapping[str, ops.Array]) -> Rollout:
    inputs, drift = datum.loss_inputs, drift_of(datum.loss_inputs, output)
    sampled_T = inputs["logprobs"].reshape(len(datum.tokens_T), -1)[:, 0] != 0
    advantages = inputs["advantages"].reshape(-1) if "advantages" in inputs else np.zeros(0)
    advantages = advantages[inputs["logprobs"].reshape(-1) != 0] if advantages.size else advantages
    return Rollout(
        tokens=np.append(datum.tokens_T, datum.targets_TK[-1:, 0]).astype("<i4").tobytes(),
        sampled=_stretches(sampled_T),
        advantage=float(advantages.mean()) if advantages.size else 0.0,
        kl=-float(drift.mean()) if drift.size else 0.0,
    )


def _stretches(sampled_T: npt.NDArray[np.bool_]) -> tuple[tuple[int, int], ...]:
    """Return where targets were sampled, as positions in the sequence: target i is its token i + 1."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], sampled_T, [False]]).astype(np.int8)))
    return tuple((int(first) + 1, int(after) + 1) for first, after in edges.reshape(-1, 2))
