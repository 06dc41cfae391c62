"""A stream: concatenated sequences, grouped by adapter, that one forward pass processes.

Legend: T = tokens of the stream, K = targets per token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from tinsmith import Array
from tinsmith.workers import Segment
from tinsmith_fsdp.layout import AdapterLayout
from tinsmith_fsdp.loss_table import LossBatch, LossTable

Pairs = Mapping[str, tuple[torch.Tensor, torch.Tensor]]


class Leaves:
    """An adapter's weights as autograd leaves whose gradients are added into one flat vector."""

    def __init__(self, layout: AdapterLayout, weights: torch.Tensor, gradients: torch.Tensor | None) -> None:
        self.scale = layout.lora.scale
        self.gradients = gradients
        self.pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for module, pair in layout.pairs.items():
            A, B = (_leaf(weights, gradients, slot.offset, slot.stop, slot.shape) for slot in (pair.A, pair.B))
            self.pairs[module] = (A, B)


def _leaf(
    weights: torch.Tensor, gradients: torch.Tensor | None, start: int, stop: int, shape: tuple[int, int]
) -> torch.Tensor:
    leaf = weights[start:stop].view(shape)
    if gradients is not None:
        leaf.requires_grad_()
        leaf.grad = gradients[start:stop].view(shape)  # autograd accumulates into it in place
    return leaf


@dataclass(frozen=True, slots=True)
class Group:
    """Contiguous tokens of one adapter."""

    start: int
    stop: int
    leaves: Leaves | None  # None: the base model without an adapter


@dataclass(slots=True)
class Stream:
    """The tokens of one forward pass with all their data. The model fills in `rope`."""

    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    bounds: tuple[tuple[int, int], ...]  # of the sequences
    ends: torch.Tensor  # int32 [sequences + 1], from 0
    longest: int
    groups: tuple[Group, ...]
    batch: LossBatch
    rope: tuple[torch.Tensor, torch.Tensor] | None = None


def make_stream(
    segments: Sequence[Segment], leaves: Sequence[Leaves | None], losses: LossTable, device: torch.device
) -> Stream:
    """Concatenate segments. Those with the same leaves must be adjacent; leaves None: the model has no adapter."""
    lengths = [segment.num_tokens for segment in segments]
    ends = np.cumsum([0, *lengths])
    return Stream(
        tokens_T=_long(np.concatenate([segment.tokens_T for segment in segments]), device),
        positions_T=_long(np.concatenate([np.arange(length) for length in lengths]), device),
        bounds=tuple(pairwise(ends.tolist())),
        ends=torch.from_numpy(ends.astype(np.int32)).to(device),
        longest=max(lengths),
        groups=_groups(ends.tolist(), leaves),
        batch=losses.batch(segments, device),
    )


def empty_stream(losses: LossTable, device: torch.device) -> Stream:
    """Make a stream of one token without a loss, for a rank that only helps to gather the layers."""
    zero = torch.zeros(1, dtype=torch.long, device=device)
    ends = torch.tensor([0, 1], dtype=torch.int32, device=device)
    group = Group(0, 1, None)
    batch = losses.empty(device)
    return Stream(zero, zero, ((0, 1),), ends, 1, (group,), batch)


def _groups(ends: Sequence[int], leaves: Sequence[Leaves | None]) -> tuple[Group, ...]:
    groups: list[Group] = []
    for (start, stop), own in zip(pairwise(ends), leaves, strict=True):
        if groups and groups[-1].leaves is own:
            groups[-1] = Group(groups[-1].start, stop, own)
        else:
            groups.append(Group(start, stop, own))
    return tuple(groups)


def _long(array: Array, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int64)).to(device)
