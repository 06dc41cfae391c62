"""The rows that the output head computes, with the adapters of a stream's groups."""

from tinsmith_fsdp.streams import Stream
from tinsmith_workers.torch import LossTable, Rows, Span, Vocabulary


def rows_of(stream: Stream, losses: LossTable, vocabulary: Vocabulary, size: int, cap: float | None) -> Rows:
    """Return what the head computes. `size`: of this rank's part of the vocabulary. `cap`: of the logits."""
    own = slice(vocabulary.start, vocabulary.start + size)
    assert stream.batch is not None
    spans = [
        Span(group.start, group.stop, None if group.leaves is None else group.leaves.on_head(own))
        for group in stream.groups
    ]
    return Rows(spans, stream.batch, losses, vocabulary, cap)
