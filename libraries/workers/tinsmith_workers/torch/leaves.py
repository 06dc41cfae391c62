"""An adapter's weights as a pass takes them: leaves of autograd, whose gradients are added into one flat vector.

Legend: C = rows of a chunk, H = hidden, V = vocabulary (or this worker's part), r = rank.
"""

from collections.abc import Callable, Collection
from functools import partial

import torch

from tinsmith_checkpoints.huggingface.decoder import HEAD
from tinsmith_workers.adapter_layout import AdapterLayout
from tinsmith_workers.torch.head import HeadAdapters


class Leaves:
    """The A [rank, in] and B [out, rank] of each module, by its name in `AdapterLayout.pairs`."""

    def __init__(
        self,
        layout: AdapterLayout,
        weights: torch.Tensor,
        gradients: torch.Tensor | None,
        *,
        modules: Collection[str] | None = None,
    ) -> None:
        """Take flat vectors. `gradients` None: there is no backward pass. `modules`: those wanted; default all."""
        self.scale = layout.lora.scale
        self.gradients = gradients
        self.pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for module in layout.pairs if modules is None else layout.pairs.keys() & modules:
            pair = layout.pairs[module]
            A, B = (_leaf(weights, gradients, slot.offset, slot.stop, slot.shape) for slot in (pair.A, pair.B))
            self.pairs[module] = (A, B)

    def on_head(self, own: slice) -> Callable[[slice, torch.Tensor], HeadAdapters] | None:
        """Return what a `Span` of this adapter's rows takes. `own`: this worker's part of the vocabulary."""
        return partial(_OnHead, self, own) if HEAD in self.pairs else None


def _leaf(
    weights: torch.Tensor, gradients: torch.Tensor | None, start: int, stop: int, shape: tuple[int, ...]
) -> torch.Tensor:
    leaf = weights[start:stop].view(shape)
    if gradients is not None:
        leaf.requires_grad_()
        leaf.grad = gradients[start:stop].view(shape)  # autograd accumulates into it in place
    return leaf


class _OnHead(HeadAdapters):
    def __init__(self, leaves: Leaves, own: slice, _: slice, hidden_CH: torch.Tensor) -> None:
        """`own`: this worker's rows of B."""
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
