"""A stream: concatenated sequences, grouped by adapter, that one forward pass processes.

Legend: T = tokens of the stream, K = targets per token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from tinsmith_fsdp.adapter_pack import AdapterPack
from tinsmith_fsdp.lora import Factors, factors_of
from tinsmith_workers import Segment
from tinsmith_workers.torch import Leaves, LossBatch, LossTable, to_device

Call = tuple[tuple[Any, ...], Mapping[str, Any]]
"""The arguments that transformers gives to a layer in addition to hidden states: positional and named."""


@dataclass(frozen=True, slots=True)
class Group:
    """Contiguous tokens of one adapter."""

    start: int
    stop: int
    leaves: Leaves | None  # None: the base model without an adapter


@dataclass(slots=True)
class Stream:
    """The tokens of one forward pass with all their data. The model fills in `calls`."""

    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    bounds: tuple[tuple[int, int], ...]  # of the sequences; the last one may have tokens more
    ends: torch.Tensor  # int32 [sequences + 1], from 0
    longest: int  # tokens of the longest sequence, or somewhat more
    groups: tuple[Group, ...]
    factors: Mapping[str, Factors]  # by module; no entry: no adapter trains it
    batch: LossBatch | None = None  # None: it is not scored
    calls: Sequence[Call] = ()  # of the layers


def make_stream(
    segments: Sequence[Segment],
    leaves: Sequence[Leaves | None],
    losses: LossTable,
    device: torch.device,
    *,
    pack: AdapterPack | None = None,
    multiple: int = 1,
) -> Stream:
    """Concatenate segments. Those with the same leaves must be adjacent; leaves None: the model has no adapter.

    `pack`: the adapters of the groups, in order. Without one, all segments have the same leaves. `multiple`: pad the
    stream to a multiple of this with tokens without a loss, after all others.
    """
    lengths = [segment.num_tokens for segment in segments]
    padding = -sum(lengths) % multiple
    lengths[-1] += padding
    ends, tokens = np.cumsum([0, *lengths]), [segment.tokens_T for segment in segments]
    groups = _groups(ends.tolist(), leaves)
    if pack is not None:
        factors = pack.factors([group.stop for group in groups])
    else:
        (group,) = groups
        factors = {} if group.leaves is None else factors_of(group.leaves)
    return Stream(
        tokens_T=to_device(np.concatenate([*tokens, np.zeros(padding, np.int64)], dtype=np.int64), device),
        positions_T=to_device(np.concatenate([np.arange(length) for length in lengths], dtype=np.int64), device),
        bounds=tuple(pairwise(ends.tolist())),
        ends=to_device(ends.astype(np.int32), device),
        longest=_at_least(max(lengths)),
        groups=groups,
        factors=factors,
        batch=losses.batch(segments, device, padding=padding),
    )


def bare_stream(sequences: Sequence[torch.Tensor]) -> Stream:
    """Make a stream of token ids alone, which the head cannot score, on the CPU."""
    lengths = [len(sequence) for sequence in sequences]
    ends = np.cumsum([0, *lengths])
    return Stream(
        tokens_T=torch.cat(list(sequences)),
        positions_T=torch.cat([torch.arange(length) for length in lengths]),
        bounds=tuple(pairwise(ends.tolist())),
        ends=torch.from_numpy(ends.astype(np.int32)),
        longest=_at_least(max(lengths)),
        groups=(Group(0, sum(lengths), None),),
        factors={},
    )


def empty_stream(losses: LossTable, device: torch.device, *, length: int = 1) -> Stream:
    """Make a stream of a few tokens without a loss, for a rank that only helps to gather the layers."""
    zeros = torch.zeros(length, dtype=torch.long, device=device)
    ends = torch.tensor([0, length], dtype=torch.int32, device=device)
    group = Group(0, length, None)
    batch = losses.batch([], device, padding=length)
    return Stream(zeros, zeros, ((0, length),), ends, _at_least(length), (group,), {}, batch)


def _groups(ends: Sequence[int], leaves: Sequence[Leaves | None]) -> tuple[Group, ...]:
    groups: list[Group] = []
    for (start, stop), own in zip(pairwise(ends), leaves, strict=True):
        if groups and groups[-1].leaves is own:
            groups[-1] = Group(groups[-1].start, stop, own)
        else:
            groups.append(Group(start, stop, own))
    return tuple(groups)


def _at_least(length: int) -> int:
    """Round up to a power of two, so that compiled code sees few values."""
    return 1 << (length - 1).bit_length()
