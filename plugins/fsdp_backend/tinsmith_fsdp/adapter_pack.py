"""The adapters of the groups of a stream as one pair of tensors for each linear layer.

All adapters of a pack are padded with zeros to one rank, and a layer that one of them does not train has zeros for it.
So every layer computes all groups in the same few kernels, whatever their owners.

Layers repeat, alone or several of different kinds in turn. The matrices of each of these are one tensor over all
repetitions, and at equal distances in an adapter's vector: what a micro-batch does for each adapter is a few
operations, for any number of layers.

Legend: L = repetitions (layers, if all are alike), G = groups, R = the common rank, r = an adapter's own.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Final

import numpy as np
import torch

from tinsmith_checkpoints.huggingface import HEAD
from tinsmith_fsdp.lora import Factors
from tinsmith_workers import AdapterLayout, Pair, Slot
from tinsmith_workers.torch import to_device

RANK_STEP: Final = 8  # grouped products need rows aligned to 16 bytes

Stacks = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""A [L, G, R, in] and B [L, G, out, R] of each linear layer of a repetition; of experts, with an axis after G."""


class AdapterPack:
    """The adapters of a stream's groups, in order: copies, which do not follow later changes."""

    def __init__(
        self, adapters: Sequence[tuple[AdapterLayout, torch.Tensor]], dtype: torch.dtype, *, backward: bool
    ) -> None:
        """`adapters`: each one's layout and flat float32 weights. `dtype`: the stream's."""
        self._layouts = [layout for layout, _ in adapters]
        self._device = adapters[0][1].device
        weights = _zeros(self._layouts, dtype, self._device)
        for (layout, flat), own in zip(adapters, _by_group(weights, self._layouts), strict=True):
            if own:
                torch._foreach_copy_(own, _of_vector(layout, flat))
        self._gradients = _zeros(self._layouts, dtype, self._device) if backward else None
        self._layers = self._by_layer(weights)
        if self._gradients is not None:
            for name, gradients in self._by_layer(self._gradients).items():
                for leaf, gradient in zip(self._layers[name], gradients, strict=True):
                    leaf.requires_grad_()
                    leaf.grad = gradient  # autograd accumulates into it in place

    def _by_layer(self, stacks: Stacks) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return A and B of each linear layer: to autograd and to compiled code, tensors of their own."""
        period = self._layouts[0].period
        pairs = {pair.module: pair for layout in self._layouts for pair in _first_period(layout)}
        return {
            f"model.layers.{pairs[name].layer + number * period}.{pairs[name].kind}": (A.detach(), B.detach())
            for name, stack in stacks.items()
            for number, (A, B) in enumerate(zip(*(each.unbind() for each in stack), strict=True))
        }

    def factors(self, ends: Sequence[int]) -> dict[str, Factors]:
        """Return what each layer needs. `ends`: where each group's tokens end in the stream."""
        scales = np.array([layout.lora.scale for layout in self._layouts], np.float32)
        scale_T1 = to_device(np.repeat(scales, np.diff(ends, prepend=0))[:, None], self._device)
        ends_G = to_device(np.array(ends, np.int32), self._device)
        return {name: Factors(A, B, scale_T1, ends_G) for name, (A, B) in self._layers.items()}

    def move_gradients(self, sums: Sequence[torch.Tensor]) -> None:
        """Add each group's gradient to its flat float32 vector, and forget it."""
        assert self._gradients is not None
        own = _by_group(self._gradients, self._layouts)
        for layout, total, gradients in zip(self._layouts, sums, own, strict=True):
            if gradients:
                torch._foreach_add_(_of_vector(layout, total), gradients)
        for A, B in self._gradients.values():
            A.zero_()
            B.zero_()


def _zeros(layouts: Sequence[AdapterLayout], dtype: torch.dtype, device: torch.device) -> Stacks:
    """Make room for every layer that any of the adapters trains."""
    rank = -(-max(layout.lora.rank for layout in layouts) // RANK_STEP) * RANK_STEP
    pairs = {pair.module: pair for layout in layouts for pair in _first_period(layout)}
    of_each = (_repetitions(layouts[0]), len(layouts))

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(*of_each, *shape, dtype=dtype, device=device)

    return {
        name: (zeros(*pair.A.shape[:-2], rank, pair.A.shape[-1]), zeros(*pair.B.shape[:-1], rank))
        for name, pair in pairs.items()
    }


def _first_period(layout: AdapterLayout) -> Sequence[Pair]:
    """List the modules of the first layers, which the others repeat. The head computes for itself."""
    return list(takewhile(lambda pair: pair.layer < layout.period and pair.kind != HEAD, layout.pairs.values()))


def _repetitions(layout: AdapterLayout) -> int:
    return len(layout.part.layers) // layout.period


def _by_group(stacks: Stacks, layouts: Sequence[AdapterLayout]) -> Iterator[list[torch.Tensor]]:
    """List each group's part, in the order of `_of_vector`."""
    groups = {name: (A.unbind(1), B.unbind(1)) for name, (A, B) in stacks.items()}
    for group, layout in enumerate(layouts):
        own = [groups[pair.module] for pair in _first_period(layout)]
        yield [part for A, B in own for part in _of_rank(A[group], B[group], layout.lora.rank)]


def _of_rank(A: torch.Tensor, B: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    return (A, B) if A.shape[-2] == rank else (A[..., :rank, :], B[..., :rank])


def _of_vector(layout: AdapterLayout, flat: torch.Tensor) -> list[torch.Tensor]:
    """Return A [L, r, in] and B [L, out, r] of each linear layer of a repetition; of experts, with an axis after L."""
    head, number = layout.pairs.get(HEAD), _repetitions(layout)
    distance = (layout.shared_size if head is None else head.A.offset) // number
    of_experts = (layout.size - layout.shared_size) // number  # in a region of its own

    def all_repetitions(first: Slot) -> torch.Tensor:
        strides = [math.prod(first.shape[axis + 1 :]) for axis in range(len(first.shape))]
        apart = of_experts if first.of_experts else distance
        return flat.as_strided((number, *first.shape), (apart, *strides), first.offset)

    return [all_repetitions(slot) for pair in _first_period(layout) for slot in (pair.A, pair.B)]
