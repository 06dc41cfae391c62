"""The division of a micro-batch among ranks. No torch."""

from collections.abc import Iterable

from tinsmith_fsdp.messages import Owner
from tinsmith_workers import MicroBatch


def most_tokens(micros: Iterable[MicroBatch]) -> int:
    """Return the tokens of the largest share of a rank in a micro-batch."""
    return max(sum(segment.num_tokens for segment in share) for micro in micros for share in micro)


def owners(micro: MicroBatch) -> list[Owner]:
    """Return the owner of each position."""
    placed = {
        segment.position: Owner(model_id=segment.model_id, dp_rank=dp_rank)
        for dp_rank, share in enumerate(micro)
        for segment in share
    }
    return [placed[position] for position in range(len(placed))]
