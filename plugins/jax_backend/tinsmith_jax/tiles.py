"""The unit in which tokens are packed, read and kept: a tile. No jax."""

from typing import Any, Final, NamedTuple

TILE: Final = 64
"""Tokens of a tile."""
MAX_ADAPTERS: Final = 8
"""Adapters in a micro-batch."""


class Tiles(NamedTuple):
    """For each tile of TILE tokens: its adapter, and that adapter's alpha / rank."""

    adapter_n: Any  # jax or NumPy array: int32 row in the adapter stack
    scale_n: Any  # likewise, float32
