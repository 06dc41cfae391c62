"""The answer of every backend to numbers that are not finite: a refusal by name, only for the sender of that request.

An optimizer step that is not finite is not applied, so training does not ruin a model. Weights that are not finite all
the same, because they were loaded for instance, are not sampled.
"""

import math
from collections.abc import Mapping
from typing import Final

import numpy as np

from tinsmith.operations import AdamParams, Array, Failed, OptimStepOutput, Sample, SampleOutput

_MOST: Final = math.sqrt(float(np.finfo(np.float32).max))
"""The largest norm whose square, which the second moment adds up, is finite in float32."""


NOT_FINITE: Final = "not_finite:max"
"""The metric of a pass: 1 if its loss, or the gradient that is then pending, is not finite, else 0."""


def step_result(norm: float, adam: AdamParams) -> OptimStepOutput | Failed:
    """Return the result of an optimizer step by the norm of its gradient before clipping.

    A Failed means that the step must not be applied: the norm is not finite, or what clipping leaves of it is so large
    that the moments would not be.
    """
    left = min(norm, adam.grad_clip_norm) if adam.grad_clip_norm > 0.0 else norm
    if math.isfinite(norm) and left <= _MOST:
        return OptimStepOutput(metrics={"grad_norm": norm})
    return Failed(
        message=f"the norm of the gradient is {norm:.6g}; allowed: finite, and at most {_MOST:.3g} after clipping. The "
        "step was not applied: weights and moments are as before it, and the gradient is dropped. Look at the losses "
        "of the passes since the last step, and send them again with other data or loss inputs",
        gradient_dropped=True,
    )


def refuses_step(norm: float, adam: AdamParams) -> bool:
    """Return whether `step_result` is a failure."""
    return isinstance(step_result(norm, adam), Failed)


def diverged(op: Sample) -> Failed:
    """Return the refusal of a sample whose logits are not finite."""
    whose = "the base model" if op.snapshot_id is None else f"snapshot {op.snapshot_id!r}"
    return Failed(message=f"{whose} gives logits that are not finite: its weights have diverged, sample an earlier one")


def unless_diverged(op: Sample, output: SampleOutput) -> SampleOutput | Failed:
    """Return the output, or a refusal if any score that was asked for is not finite."""
    return output if all(np.isfinite(scores).all() for scores in _scores(op, output)) else diverged(op)


def are_finite(weights: Mapping[str, Array]) -> bool:
    return all(np.isfinite(array).all() for array in weights.values())


def _scores(op: Sample, output: SampleOutput) -> list[Array]:
    P, last_n = len(op.prompt_P), op.prompt_logprobs_last_n
    first = 1 if last_n is None else max(1, P - last_n)  # positions before it are not scored
    scores: list[Array] = []
    for sequence in output.sequences:
        scores.append(sequence.logprobs)
        if sequence.top_logprobs is not None:
            scores.append(sequence.top_logprobs.logprobs)
    if output.prompt_logprobs is not None:
        scores.append(output.prompt_logprobs[first:])
    if output.top_prompt_logprobs is not None:
        scores.append(output.top_prompt_logprobs.logprobs[first:])
    if output.target_prompt_logprobs is not None:
        scores.append(output.target_prompt_logprobs)
    if output.prompt_alt_tokens is not None:
        scores.append(output.prompt_alt_tokens.logprobs)
    return scores
