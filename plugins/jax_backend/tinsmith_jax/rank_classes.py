"""The ranks to which adapters are padded. No jax."""

from typing import Final

from tinsmith import UserError

_CLASSES: Final = (8, 32, 128)


def rank_classes(max_rank: int) -> tuple[int, ...]:
    """Return the padded ranks in use: 8, 32 and 128 up to the maximum, and the maximum itself."""
    return (*(rank for rank in _CLASSES if rank < max_rank), max_rank)


def class_of(rank: int, max_rank: int) -> int:
    """Return the smallest class that fits the rank. Raise UserError if there is none."""
    if not 1 <= rank <= max_rank:
        msg = f"LoRA rank {rank} is not served: allowed are 1 to {max_rank}, the backend's max_lora_rank"
        raise UserError(msg)
    return next(padded for padded in rank_classes(max_rank) if padded >= rank)
