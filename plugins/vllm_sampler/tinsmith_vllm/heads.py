"""Adapters of the output head. vLLM applies them for some models only, and not to prompts, so it is told of none.

What an adapter adds to the logits is added where the head computes them: for models of any class, before soft caps and
scales, and to a matrix that the embedding may share. Each row gets the adapter of its own request.

Runs in vLLM's workers. Array suffixes: R = rows, V = vocabulary, H = hidden size, r = rank.
"""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

HEAD_A, HEAD_B = (f"base_model.model.lm_head.lora_{side}.weight" for side in "AB")

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class HeadAdapter:
    """The head's part of an adapter: `scale` B A. On the host, or in a slot of `Heads`."""

    A_rH: torch.Tensor
    B_Vr: torch.Tensor
    scale: float


class Heads:
    """The slots on the device for adapters of the head: one for each adapter that is applied at a time.

    On a CPU, each row is computed alone, so that its bits depend on no other row. Elsewhere, the rows of an adapter are
    computed together: a kernel for each row would take longer than the rest of the step.
    """

    def __init__(
        self, *, slots: int, hidden: int, vocabulary: int, rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._hidden, self._vocabulary, self._rank = hidden, vocabulary, rank
        self._add = _add_alone if device.type == "cpu" else _add_together
        # each with memory of its own: where it begins could change the bits of a product
        self._slots = [
            (
                torch.empty(rank * hidden, dtype=torch.float32, device=device),
                torch.empty(vocabulary * rank, dtype=dtype, device=device),
            )
            for _ in range(slots)
        ]
        self._ids: list[int | None] = [None] * slots
        self._heads: dict[int, HeadAdapter] = {}
        self._scored: int | None = None

    def take(self, tensors: MutableMapping[str, torch.Tensor], scale: float) -> HeadAdapter | None:
        """Take the head's part out of an adapter's tensors, if it has one.

        Raise ValueError if it is not one of this model's head, or its rank is too large.
        """
        if HEAD_A not in tensors:
            return None
        A_rH, B_Vr = tensors.pop(HEAD_A), tensors.pop(HEAD_B)
        rank = len(A_rH)
        found, expected = (A_rH.shape, B_Vr.shape), ((rank, self._hidden), (self._vocabulary, rank))
        if found != expected or rank > self._rank:
            msg = (
                f"the adapter of lm_head has the shapes {list(found[0])} and {list(found[1])}; this model's are "
                f"[rank, {self._hidden}] and [{self._vocabulary}, rank], the rank at most {self._rank}"
            )
            raise ValueError(msg)
        return HeadAdapter(A_rH, B_Vr, scale)

    def put(self, slot: int, adapter_id: int, head: HeadAdapter | None) -> None:
        """Give a slot to an adapter, which may have no part for the head."""
        if (last := self._ids[slot]) is not None:
            self._heads.pop(last, None)
        self._ids[slot] = adapter_id
        if head is None:
            return
        A_rH, B_Vr = (
            room[: given.numel()].view(given.shape).copy_(given)
            for room, given in zip(self._slots[slot], (head.A_rH, head.B_Vr), strict=True)
        )
        self._heads[adapter_id] = HeadAdapter(A_rH, B_Vr, head.scale)

    @contextmanager
    def scoring(self, adapter_id: int) -> Iterator[None]:
        """In the block, all rows are of one adapter, or of none (0)."""
        self._scored = adapter_id
        try:
            yield
        finally:
            self._scored = None

    def add(self, logits_RV: torch.Tensor, hidden_RH: torch.Tensor, ids_of_step_R: Ids) -> None:
        """Add to the head's own logits. `ids_of_step_R`: each row's adapter in a step, 0 = none."""
        if not self._heads:
            return
        ids_R = ids_of_step_R if self._scored is None else np.full(len(hidden_RH), self._scored)
        for adapter_id in set(ids_R.tolist()) & self._heads.keys():
            self._add(logits_RV, hidden_RH, self._heads[adapter_id], np.flatnonzero(ids_R == adapter_id))


def _add_alone(logits_RV: torch.Tensor, hidden_RH: torch.Tensor, head: HeadAdapter, rows: Ids) -> None:
    for row in rows.tolist():
        low_r = torch.mv(head.A_rH, hidden_RH[row].float()).mul_(head.scale)
        logits_RV[row].add_(torch.mv(head.B_Vr, low_r.to(head.B_Vr.dtype)))


def _add_together(logits_RV: torch.Tensor, hidden_RH: torch.Tensor, head: HeadAdapter, rows: Ids) -> None:
    index = torch.from_numpy(rows).to(logits_RV.device, non_blocking=True)
    low_Rr = (hidden_RH[index].float() @ head.A_rH.T).mul_(head.scale)
    added_RV = low_Rr.to(head.B_Vr.dtype) @ head.B_Vr.T
    logits_RV.index_add_(0, index, added_RV.to(logits_RV.dtype))
