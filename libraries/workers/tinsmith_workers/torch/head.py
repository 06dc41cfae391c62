"""The output head in chunks of rows: logprobs of given targets, losses and, in the same pass, all gradients.

Every loss returns its derivative by the logprob along with its value. The gradient of the logits is therefore known as
soon as a chunk's logits are, and only one chunk of logits ever exists (as in Liger-Kernel's fused linear cross
entropy). A loss that needs sums over its sequence needs all its logprobs first: then the head runs twice.

Ranks may divide the vocabulary. They exchange two numbers and the targets' logits for each row of a chunk; gradients of
the hidden states' gradient covers a rank's part, for the caller to add up.

Legend: C = rows of a chunk, T = rows, K = targets per row, H = hidden, V = vocabulary (or this rank's part).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.distributed as dist

from tinsmith_workers.sequences import Scored, Segment
from tinsmith_workers.torch.loss_table import LossBatch, LossTable
from tinsmith_workers.torch.transfers import begin_to_host

CPU_LOGITS: Final = 1 << 22  # of one chunk: 16 MiB stay near the caches
GPU_LOGITS: Final = 1 << 27
_MIN_ROWS: Final = 64


@dataclass(frozen=True, slots=True)
class Scores:
    """Detached results for a stream, float32 [T, K]."""

    logp_TK: torch.Tensor
    loss_TK: torch.Tensor

    def begin_to_host(self) -> "Scores":
        """Begin to copy both at once. The copies may be read when the device has been waited for."""
        logp_TK, loss_TK = begin_to_host(torch.stack((self.logp_TK, self.loss_TK)))
        return Scores(logp_TK, loss_TK)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A rank's part of the vocabulary. group: the ranks that have the other parts; None: there are none."""

    start: int
    group: dist.ProcessGroup | None

    def own(self, tokens: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which tokens are in this rank's part of this size, and where: for the others, anywhere."""
        index = tokens - self.start
        return (index >= 0) & (index < size), index.clamp(0, size - 1)


class HeadAdapters(ABC):
    """The adapters' addition to the logits of one chunk."""

    @abstractmethod
    def delta(self) -> torch.Tensor:
        """Return it, float32 [C, V]."""

    @abstractmethod
    def backward(self, d_logits_CV: torch.Tensor) -> torch.Tensor:
        """Add to the adapters' gradients. Return the hidden states' gradient, [C, H] in their dtype."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive rows. adapters: returns the adapters of some rows, given their hidden states; None: no adapters."""

    start: int
    stop: int
    adapters: Callable[[slice, torch.Tensor], HeadAdapters] | None


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a stream, and the results that the head computes for them."""

    spans: Sequence[Span]
    batch: LossBatch
    losses: LossTable
    vocabulary: Vocabulary
    cap: float | None = None  # of the logits: cap * tanh(logits / cap); None: there is none


class _Head(torch.autograd.Function):
    """Returns the summed loss. The forward pass already computes its gradients; backward only hands them on.

    Adapter gradients are added to their leaves at once: this runs once per pass, never again for recomputation. The
    gradient of the head's own weight exists if the head is trained.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_TH: torch.Tensor, weight_VH: torch.Tensor, rows: Rows
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        d_hidden = torch.zeros_like(hidden_TH)
        d_weight = torch.zeros_like(weight_VH, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        scores = _score(hidden_TH, weight_VH, rows, _Gradients(d_hidden, d_weight))
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.mark_non_differentiable(scores.logp_TK, scores.loss_TK)
        return scores.loss_TK.sum(), scores.logp_TK, scores.loss_TK

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * grads[0], None if d_weight is None else d_weight * grads[0], None  # autograd narrows it


@dataclass(frozen=True, slots=True)
class _Gradients:
    """The destinations of gradients."""

    d_hidden_TH: torch.Tensor
    d_weight_VH: torch.Tensor | None  # None: the head itself is frozen


def score(hidden_TH: torch.Tensor, weight_VH: torch.Tensor, rows: Rows) -> Scores:
    """Compute logprobs and losses."""
    return _score(hidden_TH, weight_VH, rows, None)


def score_with_gradients(hidden_TH: torch.Tensor, weight_VH: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, Scores]:
    """Return the summed loss as a tensor on which to call backward, and the scores."""
    total, logp_TK, loss_TK = _Head.apply(hidden_TH, weight_VH, rows)  # type: ignore[no-untyped-call]
    return total, Scores(logp_TK, loss_TK)


@torch.no_grad()
def _score(hidden_TH: torch.Tensor, weight_VH: torch.Tensor, rows: Rows, gradients: _Gradients | None) -> Scores:
    rows = _with_sums(hidden_TH, weight_VH, rows)
    logp, loss = [], []
    for span, chunk in _chunks(hidden_TH, weight_VH, rows):
        logp_CK, loss_CK = score_chunk(hidden_TH, weight_VH, rows, span, chunk, gradients)
        logp.append(logp_CK)
        loss.append(loss_CK)
    return Scores(torch.cat(logp), torch.cat(loss))


def _with_sums(hidden_TH: torch.Tensor, weight_VH: torch.Tensor, rows: Rows) -> Rows:
    """Compute the sums over sequences, of spans in which there are any. Ranks of a vocabulary have the same."""
    if not rows.batch.sequences:
        return rows
    logp_TK = torch.zeros_like(rows.batch.targets_TK, dtype=torch.float32)
    for span, chunk in _chunks(hidden_TH, weight_VH, rows):
        if any(start < span.stop and stop > span.start for start, stop, _ in rows.batch.sequences):
            logp_TK[chunk] = _logprobs(hidden_TH, weight_VH, rows, span, chunk).logp_CK
    return replace(rows, batch=rows.losses.with_sums(logp_TK, rows.batch))


def _chunks(hidden_TH: torch.Tensor, weight_VH: torch.Tensor, rows: Rows) -> Iterator[tuple[Span, slice]]:
    budget = GPU_LOGITS if hidden_TH.is_cuda else CPU_LOGITS
    size = max(_MIN_ROWS, budget // weight_VH.shape[0])
    for span in rows.spans:
        for start in range(span.start, span.stop, size):
            yield span, slice(start, min(start + size, span.stop))


@dataclass(slots=True)
class _Logprobs:
    """Scores of a chunk, and the values that their derivatives need."""

    logp_CK: torch.Tensor
    logits_CV: torch.Tensor
    lse_C1: torch.Tensor
    own_CK: torch.Tensor
    index_CK: torch.Tensor
    adapters: HeadAdapters | None


def _logprobs(hidden_TH: torch.Tensor, weight_VH: torch.Tensor, rows: Rows, span: Span, chunk: slice) -> _Logprobs:
    hidden_CH = hidden_TH[chunk]
    logits_CV = (hidden_CH @ weight_VH.T).float()
    adapters = None if span.adapters is None else span.adapters(chunk, hidden_CH)
    if adapters is not None:
        logits_CV += adapters.delta()
    if rows.cap is not None:
        logits_CV = logits_CV.div_(rows.cap).tanh_().mul_(rows.cap)
    own_CK, index_CK = rows.vocabulary.own(rows.batch.targets_TK[chunk], len(weight_VH))
    target_CK, lse_C1 = _exchanged(logits_CV, own_CK, index_CK, rows.vocabulary.group)
    return _Logprobs(target_CK - lse_C1, logits_CV, lse_C1, own_CK, index_CK, adapters)


def score_chunk(
    hidden_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    rows: Rows,
    span: Span,
    chunk: slice,
    gradients: _Gradients | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    # 1. Logprobs, losses, and the losses' derivatives.
    found = _logprobs(hidden_TH, weight_VH, rows, span, chunk)
    hidden_CH, logp_CK, own_CK, adapters = hidden_TH[chunk], found.logp_CK, found.own_CK, found.adapters
    loss_CK, d_logp_CK = rows.losses.per_token(logp_CK, rows.batch.rows(chunk.start, chunk.stop))
    if gradients is None:
        return logp_CK, loss_CK
    # 2. d logp_k / d logits = onehot(target_k) - softmax, in the memory of the logits.
    slope_CV = None if rows.cap is None else 1 - (found.logits_CV / rows.cap).square_()
    d_logits_CV = found.logits_CV.sub_(found.lse_C1).exp_().mul_(-d_logp_CK.sum(dim=-1, keepdim=True))
    d_logits_CV.scatter_add_(1, found.index_CK, d_logp_CK * own_CK)
    if slope_CV is not None:
        d_logits_CV.mul_(slope_CV)
    narrow_CV = d_logits_CV.to(weight_VH.dtype)
    d_hidden_CH = narrow_CV @ weight_VH
    if gradients.d_weight_VH is not None:
        gradients.d_weight_VH.add_(narrow_CV.T @ hidden_CH)
    if adapters is not None:
        d_hidden_CH = d_hidden_CH + adapters.backward(d_logits_CV)
    gradients.d_hidden_TH[chunk] = d_hidden_CH
    return logp_CK, loss_CK


def _exchanged(
    logits_CV: torch.Tensor, own_CK: torch.Tensor, index_CK: torch.Tensor, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the targets' logits, and logsumexp over the whole vocabulary."""
    target_CK = logits_CV.gather(1, index_CK)
    if group is None:
        return target_CK, torch.logsumexp(logits_CV, dim=-1, keepdim=True)
    top_C1 = logits_CV.amax(dim=-1, keepdim=True)
    dist.all_reduce(top_C1, dist.ReduceOp.MAX, group=group)
    sum_C1 = (logits_CV - top_C1).exp_().sum(dim=-1, keepdim=True)
    both = torch.cat((sum_C1, target_CK * own_CK), dim=1)
    dist.all_reduce(both, group=group)
    return both[:, 1:], top_C1 + both[:, :1].log()


def scored(segment: Segment, scores: Scores, start: int) -> Scored:
    """Return a segment's results, once the device has been waited for. `start`: its first row in the scores."""
    rows, width = slice(start, start + segment.num_tokens), segment.targets_TK.shape[1]
    logp_TK, loss_TK = scores.logp_TK[rows, :width], scores.loss_TK[rows, :width]
    return Scored(index=segment.index, logp_TK=logp_TK.numpy(), loss=float(loss_TK.sum(dtype=torch.float64)))
