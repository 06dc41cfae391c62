"""A stream: the sequences of a micro-batch, placed end to end in the order of their adapters.

Legend: T = rows of the stream, G = adapters of the pass, L = layers of this rank's stage, C = experts of a row,
E = experts of a layer, O = operations that have sequences in the stream, and one for rows that pad it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from tinsmith import Array
from tinsmith_megatron.adapters import Stacks
from tinsmith_workers import Segment
from tinsmith_workers.torch import LossBatch, LossTable


@dataclass(frozen=True, slots=True)
class Stream:
    """The rows of one forward pass with all their data. The last rows may be padding, which has no loss."""

    segments: tuple[Segment, ...]  # in the order of their rows
    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    bounds: tuple[tuple[int, int], ...]  # of the sequences
    starts: torch.Tensor  # int32 [sequences + 1]: the bounds, for kernels
    longest: int
    batch: LossBatch
    stacks: Stacks
    owner_T: torch.Tensor  # int64: which adapter of the pass a row uses; ascending
    scale_T1: torch.Tensor
    scales_G1: torch.Tensor
    ends_G: torch.Tensor  # int32: where the rows of each adapter end
    experts_LTC: torch.Tensor | None  # int16; -1: the router chooses. None: it chooses for all rows
    operations: tuple[int, ...]  # their numbers, without the padding's
    operation_T: torch.Tensor  # int64: which of them a row belongs to
    loads: dict[int, torch.Tensor] = field(default_factory=dict)
    """Of a layer, how many rows of each operation every expert computes: int32 [O, E]. The layers add them."""

    @property
    def num_rows(self) -> int:
        return len(self.tokens_T)


def make_stream(
    segments: Sequence[Segment],
    owners: Mapping[str, int],
    stacks: Stacks,
    losses: LossTable,
    *,
    multiple: int,
    device: torch.device,
) -> Stream:
    """Place segments end to end. `owners` gives each model's adapter in the stacks.

    Pad to a multiple of `multiple` rows; without segments, everything is padding.
    """
    ordered = sorted(segments, key=lambda segment: owners[segment.model_id])
    lengths = [segment.num_tokens for segment in ordered]
    padding = -sum(lengths) % multiple if lengths else multiple
    if padding:
        lengths.append(padding)  # a sequence of its own, which the last adapter of the pass computes
    starts = np.cumsum([0, *lengths])
    last = len(owners) - 1
    owner_T = np.repeat([*(owners[s.model_id] for s in ordered), *([last] if padding else [])], lengths)
    counts = np.bincount(owner_T, minlength=len(owners))
    experts_LTC = _experts(ordered, starts)
    operations = list(dict.fromkeys(s.operation for s in ordered))
    numbers = [*(operations.index(s.operation) for s in ordered), *([len(operations)] if padding else [])]

    def placed(array: Array, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device, dtype)

    return Stream(
        segments=tuple(ordered),
        tokens_T=placed(np.concatenate([*(s.tokens_T for s in ordered), np.zeros(padding)]), torch.int64),
        positions_T=placed(np.concatenate([np.arange(length) for length in lengths]), torch.int64),
        bounds=tuple(pairwise(starts.tolist())),
        starts=placed(starts, torch.int32),
        longest=max(lengths),
        batch=losses.batch(ordered, device, padding=padding),
        stacks=stacks,
        owner_T=placed(owner_T, torch.int64),
        scale_T1=placed(np.asarray(stacks.scales)[owner_T][:, None], torch.float32),
        scales_G1=placed(np.asarray(stacks.scales)[:, None], torch.float32),
        ends_G=placed(np.cumsum(counts), torch.int32),
        experts_LTC=None if experts_LTC is None else placed(experts_LTC, torch.int16),
        operations=tuple(operations),
        operation_T=placed(np.repeat(numbers, lengths), torch.int64),
    )


def _experts(segments: Sequence[Segment], starts: Array) -> Array | None:
    replayed = [
        (start, segment.experts_TLC)
        for start, segment in zip(starts, segments, strict=False)  # the last rows may be padding
        if segment.experts_TLC is not None
    ]
    if not replayed:
        return None
    _, num_layers, top_k = replayed[0][1].shape
    experts_LTC = np.full((num_layers, starts[-1], top_k), -1, np.int16)
    for start, own_TLC in replayed:
        experts_LTC[:, start : start + len(own_TLC)] = own_TLC.swapaxes(0, 1)
    return experts_LTC
