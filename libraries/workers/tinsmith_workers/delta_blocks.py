"""How much of the gated delta rule `tinsmith_workers.torch` computes at once, and what it costs. No torch."""

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


def delta_flops(rule: DeltaRule) -> float:
    """Return the FLOPs of the rule's forward pass for a token in one layer.

    A backward pass computes it again, and takes twice as many.
    """
    keys, values = rule.key_dim, rule.value_dim
    solved = (keys + values) / 2  # a triangle
    products = CHUNK * (2 * keys + values + solved) + 3 * keys * values
    return 2 * rule.value_heads * products
