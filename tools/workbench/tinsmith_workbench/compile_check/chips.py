"""TPU chips and slices: what a program can use of them.

Sources: peak rates, HBM and bandwidths from the tables of docs.cloud.google.com/tpu/docs/v5e, .../v5p and .../v6e (read
in November 2026). Those pages give the bandwidth of a chip's links in both directions together: 400, 1200 and 800 GB/s;
with 4, 6 and 4 links that is 50, 100 and 100 GB/s a link and direction. `hbm_bytes` is what libtpu 0.0.52 lets programs
use, from its own error messages.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tinsmith import ConfigError

_GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    name: str
    flops: float  # a second, bfloat16
    hbm_bytes: int
    hbm_rate: float  # bytes a second
    link_rate: float  # bytes a second, one link in one direction
    dimensions: int  # of the torus
    closed_from: int  # chips along a dimension from which on its two ends are linked
    attends_in_hbm: bool = False  # in sampling: the compiler keeps nothing on the chip of what attention gathers


CHIPS: Final[Mapping[str, Chip]] = {
    chip.name: chip
    for chip in (
        Chip(
            name="v5e", flops=197e12, hbm_bytes=int(15.75 * _GIB), hbm_rate=819e9, link_rate=50e9, dimensions=2,
            closed_from=16,
        ),
        Chip(
            name="v5p", flops=459e12, hbm_bytes=int(95.73 * _GIB), hbm_rate=2765e9, link_rate=100e9, dimensions=3,
            closed_from=4, attends_in_hbm=True,
        ),
        Chip(
            name="v6e", flops=918e12, hbm_bytes=int(31.24 * _GIB), hbm_rate=1640e9, link_rate=100e9, dimensions=2,
            closed_from=16,
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Slice:
    """Chips that are linked to each other."""

    chip: Chip
    sizes: tuple[int, ...]  # chips along each dimension

    @property
    def num_chips(self) -> int:
        return math.prod(self.sizes)

    def links(self, places: Collection[Sequence[int]]) -> float:
        """Return the links by which a chip receives data in a collective among the chips at these coordinates.

        In each dimension in which they extend, data come from both sides if they are all chips of a ring. Else a chip
        at the end has one neighbour, and all wait for it. Chips that are not neighbours share the links between them
        with the groups of those that lie there.
        """
        along = zip(zip(*places, strict=True), self.sizes, strict=False)  # libtpu gives every chip three coordinates
        return sum(self._links_along(sorted(set(coordinates)), size) for coordinates, size in along)

    def _links_along(self, coordinates: Sequence[int], size: int) -> float:
        if len(coordinates) == 1:
            return 0
        distance = coordinates[1] - coordinates[0]
        is_ring = size >= self.chip.closed_from and len(coordinates) * distance == size
        return (2 if is_ring else 1) / distance

    def __str__(self) -> str:
        return f"{self.chip.name}:{'x'.join(map(str, self.sizes))}"


def read_slice(text: str) -> Slice:
    """Read a topology like "v6e:4x4". Raise ConfigError if there is no such chip or shape."""
    name, _, shape = text.partition(":")
    if name not in CHIPS:
        msg = f"topology {text!r}: no chip named {name!r}, known: {', '.join(CHIPS)}"
        raise ConfigError(msg)
    chip, parts = CHIPS[name], shape.split("x")
    if len(parts) != chip.dimensions or not all(part.isdecimal() and int(part) for part in parts):
        example = "x".join(["4"] * chip.dimensions)
        msg = f"topology {text!r}: a {name} slice has {chip.dimensions} dimensions, for example {name}:{example}"
        raise ConfigError(msg)
    return Slice(chip, tuple(map(int, parts)))
