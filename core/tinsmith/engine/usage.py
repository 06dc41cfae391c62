"""What an operation used, to be recorded with its result."""

from collections.abc import Sequence

from tinsmith import operations as ops
from tinsmith.engine.claimed import Finished
from tinsmith.store import Usage


def usage_of(finished: Sequence[Finished], run_s: float) -> list[Usage]:
    """Divide the time of a batch by tokens, or evenly if it has none. Failed operations count time, but no tokens."""
    shares = [each.claimed.record.num_tokens for each in finished]
    if not any(shares):
        shares = [1] * len(finished)
    return [
        _usage(each.claimed.operation, each.outcome.result, run_s * share / sum(shares))
        for each, share in zip(finished, shares, strict=True)
    ]


def _usage(operation: ops.Operation | None, result: ops.Result, engine_s: float) -> Usage:
    match operation, result:
        case ops.Forward(), ops.ForwardBackwardOutput():
            return Usage(prefilled_tokens=operation.num_tokens, engine_s=engine_s)
        case ops.ForwardBackward(), ops.ForwardBackwardOutput():
            return Usage(trained_tokens=operation.num_tokens, engine_s=engine_s)
        case ops.Sample(), ops.SampleOutput():
            sampled = sum(len(sequence.tokens) for sequence in result.sequences)
            return Usage(prefilled_tokens=len(operation.prompt_P), sampled_tokens=sampled, engine_s=engine_s)
        case _:
            return Usage(engine_s=engine_s)
