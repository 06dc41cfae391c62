"""How much of the gated delta rule `tinsmith_workers.torch` computes at once, and what memory it takes. No torch."""

from typing import Final

from tinsmith_checkpoints.huggingface.hybrid import DeltaRule

CHUNK: Final = 64
"""Tokens that are computed at once."""
BLOCK: Final = 32
"""Chunks whose intermediate results exist at a time."""

_KEYS, _VALUES, _CHUNKS = 10, 8, 5  # numbers of float32 for each token and head, by what they are as long as


def delta_block_bytes(rule: DeltaRule) -> int:
    """Return the memory of a block while it is differentiated, whatever the stream: a fit to measured peaks."""
    numbers = _KEYS * rule.key_dim + _VALUES * rule.value_dim + _CHUNKS * CHUNK
    return 4 * BLOCK * CHUNK * rule.value_heads * numbers
