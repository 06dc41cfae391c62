"""Who computes what in a micro-batch. No torch."""

from tinsmith.workers import MicroBatch
from tinsmith_fsdp.messages import Owner


def owners(micro: MicroBatch) -> list[Owner]:
    """Return the owner of each position."""
    placed = {
        segment.position: Owner(model_id=segment.model_id, dp_rank=dp_rank)
        for dp_rank, share in enumerate(micro)
        for segment in share
    }
    return [placed[position] for position in range(len(placed))]
