"""The adapters of a pass, side by side in one array per weight.

Legend: G = adapters of a pass, r = rank of one of them, R = the largest of these, padded, E = experts of this part.
"""

from collections.abc import Iterator, Sequence

import torch

from tinsmith_workers import Slot
from tinsmith_workers.torch import Adapter

_RANK_STEP = 8  # grouped products need rows aligned to 16 bytes


class Stacks:
    """The weights of several adapters as leaves of one pass: for each module A [G, R, in] and B [G, out, R].

    Experts have one more axis after G, of size E, or 1 for the side that they share. Smaller ranks, and modules that
    an adapter does not train, are padded with zeros, which add nothing. Without adapters, all rows count as one's.
    """

    def __init__(self, adapters: Sequence[Adapter], *, backward: bool) -> None:
        self._adapters = adapters
        widest = max((adapter.layout.lora.rank for adapter in adapters), default=0)
        rank = -(-widest // _RANK_STEP) * _RANK_STEP
        self.scales = tuple(adapter.layout.lora.scale for adapter in adapters) or (0.0,)
        self.pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for adapter in adapters:
            for module, pair in adapter.layout.pairs.items():
                if module not in self.pairs:
                    A_shape, B_shape = (*pair.A.shape[:-2], rank, pair.A.shape[-1]), (*pair.B.shape[:-1], rank)
                    self.pairs[module] = self._zeros(A_shape), self._zeros(B_shape)
        for index, adapter in enumerate(adapters):
            places = list(self._places(index))
            if places:  # a stage without the head has nothing of an adapter of the head alone
                torch._foreach_copy_([own for own, _ in places], [_view(adapter.weights, slot) for _, slot in places])
        for pair_of_leaves in self.pairs.values():
            for leaf in pair_of_leaves:
                leaf.requires_grad_(backward)

    def _zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        return self._adapters[0].weights.new_zeros(len(self._adapters), *shape)

    def _places(self, index: int, *, gradients: bool = False) -> Iterator[tuple[torch.Tensor, Slot]]:
        """Yield the part of each leaf, or of its gradient, that belongs to an adapter, and its slot in the vector."""
        layout = self._adapters[index].layout
        for module, pair in layout.pairs.items():
            A, B = (leaf.grad if gradients else leaf for leaf in self.pairs[module])
            if A is not None and B is not None:  # no gradient: no token passed
                yield A[index, ..., : layout.lora.rank, :], pair.A
                yield B[index, ..., : layout.lora.rank], pair.B

    def gradient(self, index: int) -> torch.Tensor:
        """Return the gradient of an adapter as a new vector."""
        flat = torch.zeros_like(self._adapters[index].weights)
        places = list(self._places(index, gradients=True))
        if places:
            torch._foreach_copy_([_view(flat, slot) for _, slot in places], [own for own, _ in places])
        return flat


def _view(flat: torch.Tensor, slot: Slot) -> torch.Tensor:
    return flat[slot.offset : slot.stop].view(slot.shape)
