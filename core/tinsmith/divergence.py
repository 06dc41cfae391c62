"""What every sampler answers where weights have diverged: a refusal by name, for the sender of that request alone."""

from collections.abc import Mapping

import numpy as np

from tinsmith.operations import Array, Failed, Sample, SampleOutput


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
    return scores
