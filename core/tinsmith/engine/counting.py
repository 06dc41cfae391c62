"""What an engine counts of the operations that it has recorded."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from tinsmith import operations as ops
from tinsmith.engine.claimed import Finished, usage_of
from tinsmith.figures import (
    BATCH_FILL,
    BATCH_OPERATIONS,
    OPERATION_RUN_SECONDS,
    OPERATION_SECONDS,
    PREFIX_TOKENS,
    TOKENS,
    Figures,
)

_PASSES: Final = frozenset({"forward", "forward_backward"})


def count_batch(figures: Figures, finished: Sequence[Finished], run_s: float, *, most_tokens: int) -> None:
    """Count what ran together, once its results are recorded. `most_tokens`: of a batch of passes."""
    now, kind = datetime.now(UTC), finished[0].claimed.record.kind
    figures.observe(BATCH_OPERATIONS, len(finished), kind)
    if kind in _PASSES:
        figures.observe(BATCH_FILL, sum(each.claimed.record.num_tokens for each in finished) / most_tokens)
    for each, usage in zip(finished, usage_of(finished, run_s), strict=True):
        record, result = each.claimed.record, each.outcome.result
        outcome = result.category if isinstance(result, ops.Failed) else "success"
        latency_s = max(0.0, (now - record.created_at).total_seconds())  # another machine's clock may be ahead
        figures.observe(OPERATION_SECONDS, latency_s, record.kind, outcome)
        figures.observe(OPERATION_RUN_SECONDS, run_s, record.kind)
        for of, number in (
            ("trained", usage.trained_tokens),
            ("prefilled", usage.prefilled_tokens),
            ("sampled", usage.sampled_tokens),
        ):
            if number:
                figures.count(TOKENS, number, of)
        if isinstance(result, ops.SampleOutput):
            hits = result.prompt_cache_hit_tokens
            figures.count(PREFIX_TOKENS, hits, "hit")
            figures.count(PREFIX_TOKENS, usage.prefilled_tokens - hits, "miss")
