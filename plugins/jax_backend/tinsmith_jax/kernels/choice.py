"""Which form of each kernel a program uses.

The choice is a value that is passed along, because programs are also compiled for machines other than the one that
compiles them.
"""

from dataclasses import dataclass
from typing import Final, Literal

Attention = Literal["tile_by_tile", "all_tiles", "splash", "flash"]
Products = Literal["by_tile", "side_by_side", "grouped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Hashable, so that compiled functions may close over it."""

    attention: Attention = "tile_by_tile"
    products: Products = "by_tile"
    equal_blocks: bool = True
    """Compute norms of heads in blocks of one size, which XLA:CPU needs to round them alike."""
    native: bool = False
    """Run the layers by the kernels in C++ (native/)."""
    rounds: bool = False
    """These round to bfloat16 what the model's matrices multiply."""
    triton: bool = False
    """Sample by Pallas kernels for GPUs (paged.py, row_products.py)."""
    longest: int | None = None
    """Tokens of the longest sequence; None if it may fill the stream."""
    interpret: bool = False
    """Run Pallas kernels as plain JAX, on any device: for tests."""


REFERENCE: Final = Kernels()
"""The kernels of CPUs, and the reference for all others."""


def choose(platform: str, *, longest: int | None = None, reference: bool = False) -> Kernels:
    """Return the kernels of a platform: "cpu", "tpu", "gpu" or another name that JAX has for one.

    With `reference`, accelerators use XLA's forms of the CPU's kernels.
    """
    if platform == "cpu":
        return REFERENCE
    if reference or platform not in _OWN:
        return Kernels(attention="all_tiles", equal_blocks=False)
    attention, products = _OWN[platform]
    return Kernels(attention=attention, products=products, equal_blocks=False, longest=longest)


_OWN: Final[dict[str, tuple[Attention, Products]]] = {
    "tpu": ("splash", "side_by_side"),
    "gpu": ("flash", "grouped"),
    "cuda": ("flash", "grouped"),
}
