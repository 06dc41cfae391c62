"""The adapters of the groups of a stream as one pair of tensors for each linear layer.

All adapters of a pack are padded with zeros to one rank, and a layer that one of them does not train has zeros for it.
So every layer computes all groups in the same few kernels, whoever they belong to.

Legend: G = groups, R = the common rank.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch

from tinsmith.huggingface import HEAD
from tinsmith.workers import AdapterLayout, Pair, Slot
from tinsmith_fsdp.lora import Factors

RANK_STEP: Final = 8  # grouped products need rows aligned to 16 bytes

Layers = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""A [G, R, in] and B [G, out, R] of each linear layer."""


class AdapterPack:
    """The adapters of a stream's groups, in order: copies, which do not follow later changes."""

    def __init__(
        self, adapters: Sequence[tuple[AdapterLayout, torch.Tensor]], dtype: torch.dtype, *, backward: bool
    ) -> None:
        """`adapters`: each one's layout and flat float32 weights. `dtype`: that of the stream."""
        self._layouts = [layout for layout, _ in adapters]
        self._weights = _zeros(self._layouts, dtype, adapters[0][1].device)
        for group, (layout, flat) in enumerate(adapters):
            A, B = _of_vector(layout, flat)
            _copy([*A, *_times(B, layout.lora.scale)], _of_group(self._weights, layout, group))
        for weight in self._matrices():
            weight.requires_grad_(backward)

    def factors(self, ends_G: torch.Tensor) -> dict[str, Factors]:
        """Return what each layer needs. `ends_G`: where each group's tokens end in the stream."""
        return {name: Factors(A, B, None, ends_G) for name, (A, B) in self._weights.items()}

    def move_gradients(self, sums: Sequence[torch.Tensor]) -> None:
        """Add each group's gradient to its flat float32 vector, and forget it."""
        gradients = {name: (_gradient(A), _gradient(B)) for name, (A, B) in self._weights.items()}
        for group, (layout, total) in enumerate(zip(self._layouts, sums, strict=True)):
            wide = torch.zeros_like(total)
            A, B = _of_vector(layout, wide)
            _copy(_of_group(gradients, layout, group), [*A, *B])
            _copy(_times(B, layout.lora.scale), B)
            total.add_(wide)
        for weight in self._matrices():
            weight.grad = None

    def _matrices(self) -> Iterator[torch.Tensor]:
        return (weight for pair in self._weights.values() for weight in pair)


def _gradient(weight: torch.Tensor) -> torch.Tensor:
    """Return zeros for a matrix that this rank does not count."""
    return torch.zeros_like(weight) if weight.grad is None else weight.grad


def _zeros(layouts: Sequence[AdapterLayout], dtype: torch.dtype, device: torch.device) -> Layers:
    """Make room for every layer that any of the adapters trains."""
    rank = -(-max(layout.lora.rank for layout in layouts) // RANK_STEP) * RANK_STEP
    pairs = {pair.module: pair for layout in layouts for pair in _pairs(layout)}

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(len(layouts), *shape, dtype=dtype, device=device)

    return {name: (zeros(rank, pair.A.shape[1]), zeros(pair.B.shape[0], rank)) for name, pair in pairs.items()}


def _pairs(layout: AdapterLayout) -> Iterator[Pair]:
    """List the modules of the layers. The head computes for itself."""
    return (pair for name, pair in layout.pairs.items() if name != HEAD)


def _of_vector(layout: AdapterLayout, flat: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return every A and every B."""

    def view(slot: Slot) -> torch.Tensor:
        return flat[slot.offset : slot.stop].view(slot.shape)

    pairs = list(_pairs(layout))
    return [view(pair.A) for pair in pairs], [view(pair.B) for pair in pairs]


def _of_group(layers: Layers, layout: AdapterLayout, group: int) -> list[torch.Tensor]:
    """Return the group's part of every A, then of every B."""
    rank = layout.lora.rank
    own = [layers[pair.module] for pair in _pairs(layout)]
    return [A[group, :rank] for A, _ in own] + [B[group, :, :rank] for _, B in own]


@torch.no_grad()
def _copy(source: list[torch.Tensor], target: list[torch.Tensor]) -> None:
    """Copy all matrices in a few kernels."""
    if source:
        torch._foreach_copy_(target, source)


@torch.no_grad()
def _times(matrices: list[torch.Tensor], scale: float) -> list[torch.Tensor]:
    return list(torch._foreach_mul(matrices, scale)) if matrices else []  # noqa: SLF001
