"""The adapters of a stream's groups on the output head.

Legend: C = rows of a chunk, H = hidden, V = vocabulary (or this rank's part), r = rank.
"""

from functools import partial

import torch

from tinsmith.huggingface import HEAD
from tinsmith.torch_workers import HeadAdapters, LossTable, Rows, Span, Vocabulary
from tinsmith_fsdp.streams import Leaves, Stream


def rows_of(stream: Stream, losses: LossTable, vocabulary: Vocabulary, size: int) -> Rows:
    """Return what the head computes. `size`: of this rank's part of the vocabulary."""
    own = slice(vocabulary.start, vocabulary.start + size)
    spans = [
        Span(
            group.start,
            group.stop,
            None if group.leaves is None or HEAD not in group.leaves.pairs else partial(_Adapter, group.leaves, own),
        )
        for group in stream.groups
    ]
    return Rows(spans, stream.batch, losses, vocabulary)


class _Adapter(HeadAdapters):
    def __init__(self, leaves: Leaves, own: slice, _: slice, hidden_CH: torch.Tensor) -> None:
        """`own`: this rank's rows of B."""
        (self._A_rH, self._whole_B), self._own, self._scale = leaves.pairs[HEAD], own, leaves.scale
        self._hidden_CH = hidden_CH

    def delta(self) -> torch.Tensor:
        self._h_Cr = self._hidden_CH.float() @ self._A_rH.T
        return (self._h_Cr @ self._whole_B[self._own].T) * self._scale

    def backward(self, d_logits_CV: torch.Tensor) -> torch.Tensor:
        d_h_Cr = (d_logits_CV @ self._whole_B[self._own]) * self._scale
        assert self._A_rH.grad is not None
        assert self._whole_B.grad is not None
        self._A_rH.grad += d_h_Cr.T @ self._hidden_CH.float()
        self._whole_B.grad[self._own] += (d_logits_CV.T @ self._h_Cr) * self._scale
        return (d_h_Cr @ self._A_rH).to(self._hidden_CH.dtype)
