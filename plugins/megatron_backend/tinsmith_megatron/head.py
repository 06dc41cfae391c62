"""The adapters' contribution to the output head in a pass.

Legend: C = rows of a chunk, H = hidden, V = this rank's part of the vocabulary.
"""

from functools import partial

import torch
from megatron.core.parallel_state import (
    get_tensor_model_parallel_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)

from tinsmith_checkpoints.huggingface import HEAD
from tinsmith_megatron.low_rank import low_rank
from tinsmith_megatron.streams import Stream
from tinsmith_workers.torch import HeadAdapters, LossTable, Rows, Span, Vocabulary


def rows_of(stream: Stream, losses: LossTable, size: int, *, backward: bool) -> Rows:
    """Return what the head computes. `size`: of this rank's part of the vocabulary."""
    divided = get_tensor_model_parallel_world_size() > 1
    start = get_tensor_model_parallel_rank() * size
    vocabulary = Vocabulary(start, get_tensor_model_parallel_group() if divided else None)
    adapted = HEAD in stream.stacks.pairs
    adapters = partial(_Adapters, stream, slice(start, start + size), backward) if adapted else None
    return Rows([Span(0, stream.num_rows, adapters)], stream.batch, losses, vocabulary)


class _Adapters(HeadAdapters):
    """By autograd."""

    def __init__(self, stream: Stream, own: slice, backward: bool, chunk: slice, hidden_CH: torch.Tensor) -> None:  # noqa: FBT001
        self._stream, self._own, self._backward, self._chunk = stream, own, backward, chunk
        self._hidden_CH = hidden_CH.detach().requires_grad_(backward)

    def delta(self) -> torch.Tensor:
        chunk, stream = self._chunk, self._stream
        A, B = stream.stacks.pairs[HEAD]
        ends_G = (stream.ends_G - chunk.start).clamp(0, chunk.stop - chunk.start)
        with torch.set_grad_enabled(self._backward):
            self._delta_CV = low_rank(self._hidden_CH.float(), A, B[:, self._own], stream.scale_T1[chunk], ends_G)
        return self._delta_CV

    def backward(self, d_logits_CV: torch.Tensor) -> torch.Tensor:
        torch.autograd.backward(self._delta_CV, d_logits_CV)
        assert self._hidden_CH.grad is not None
        return self._hidden_CH.grad
