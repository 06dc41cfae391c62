"""The output head in chunks of rows: logprobs of given targets, losses and, in the same pass, all gradients.

Every loss returns its derivative by the logprob along with its value. The gradient of the logits is therefore known as
soon as a chunk's logits are, and only one chunk of logits ever exists (as in Liger-Kernel's fused linear cross
entropy).

With tensor parallelism, each rank has the rows of its part of the vocabulary. Ranks exchange two numbers and the
targets' logits for each row of a chunk; gradients of the hidden states are those of the part, for the caller to add up.

Legend: C = rows of a chunk, T = tokens, K = targets per token, H = hidden, V = vocabulary (or this rank's part),
r = rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tinsmith.huggingface import HEAD
from tinsmith.torch_workers import LossBatch, LossTable, begin_to_host
from tinsmith_fsdp.streams import Group, Stream

CPU_LOGITS = 1 << 22  # of one chunk: 16 MiB stay near the caches
GPU_LOGITS = 1 << 27
_MIN_ROWS = 64


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


class _Head(torch.autograd.Function):
    """Returns the summed loss. The forward pass already computes its gradients; backward only hands them on.

    Adapter gradients are added to their leaves at once: this runs once per pass, never again for recomputation. The
    gradient of the head's own weight exists if the head is trained.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: torch.Tensor,
        weight_VH: torch.Tensor,
        vocabulary: Vocabulary,
        stream: Stream,
        losses: LossTable,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        d_hidden = torch.zeros_like(hidden_TH)
        d_weight = torch.zeros_like(weight_VH, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        scores = _score(hidden_TH, weight_VH, vocabulary, stream, losses, _Gradients(d_hidden, d_weight))
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.mark_non_differentiable(scores.logp_TK, scores.loss_TK)
        return scores.loss_TK.sum(), scores.logp_TK, scores.loss_TK

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * grads[0], None if d_weight is None else d_weight * grads[0], None, None, None


@dataclass(frozen=True, slots=True)
class _Gradients:
    """The destinations of gradients."""

    d_hidden_TH: torch.Tensor
    d_weight_VH: torch.Tensor | None  # None: the head itself is frozen


def score(
    hidden_TH: torch.Tensor, weight_VH: torch.Tensor, vocabulary: Vocabulary, stream: Stream, losses: LossTable
) -> Scores:
    """Compute logprobs and losses."""
    return _score(hidden_TH, weight_VH, vocabulary, stream, losses, None)


def score_with_gradients(
    hidden_TH: torch.Tensor, weight_VH: torch.Tensor, vocabulary: Vocabulary, stream: Stream, losses: LossTable
) -> tuple[torch.Tensor, Scores]:
    """Return the scores, and the summed loss as a tensor on which to call backward."""
    total, logp_TK, loss_TK = _Head.apply(hidden_TH, weight_VH, vocabulary, stream, losses)  # type: ignore[no-untyped-call]
    return total, Scores(logp_TK, loss_TK)


def _score(
    hidden_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    vocabulary: Vocabulary,
    stream: Stream,
    losses: LossTable,
    gradients: _Gradients | None,
) -> Scores:
    budget = GPU_LOGITS if hidden_TH.is_cuda else CPU_LOGITS
    size = max(_MIN_ROWS, budget // weight_VH.shape[0])
    logp, loss = [], []
    for group in stream.groups:
        for start in range(group.start, group.stop, size):
            stop = min(start + size, group.stop)
            chunk = stream.batch.rows(start, stop)
            logp_CK, loss_CK = _chunk(hidden_TH, weight_VH, vocabulary, group, (start, stop), chunk, losses, gradients)
            logp.append(logp_CK)
            loss.append(loss_CK)
    return Scores(torch.cat(logp), torch.cat(loss))


def _chunk(
    hidden_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    vocabulary: Vocabulary,
    group: Group,
    rows: tuple[int, int],
    batch: LossBatch,
    losses: LossTable,
    gradients: _Gradients | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    hidden_CH = hidden_TH[rows[0] : rows[1]]
    # 1. Logits, the adapter's part in float32.
    logits_CV = (hidden_CH @ weight_VH.T).float()
    pair = None if group.leaves is None else group.leaves.pairs.get(HEAD)
    if pair is not None:
        assert group.leaves is not None
        (A_rH, whole_B), scale = pair, group.leaves.scale
        rows_of_B = slice(vocabulary.start, vocabulary.start + len(weight_VH))
        B_Vr = whole_B[rows_of_B]
        h_Cr = hidden_CH.float() @ A_rH.T
        logits_CV += (h_Cr @ B_Vr.T) * scale
    # 2. Logprobs, losses, and the losses' derivatives.
    own_CK, index_CK = vocabulary.own(batch.targets_TK, len(weight_VH))
    target_CK, lse_C1 = _exchanged(logits_CV, own_CK, index_CK, vocabulary.group)
    logp_CK = target_CK - lse_C1
    loss_CK, d_logp_CK = losses.per_token(logp_CK, batch)
    if gradients is None:
        return logp_CK, loss_CK
    # 3. d logp_k / d logits = onehot(target_k) - softmax, in the memory of the logits.
    d_logits_CV = logits_CV.sub_(lse_C1).exp_().mul_(-d_logp_CK.sum(dim=-1, keepdim=True))
    d_logits_CV.scatter_add_(1, index_CK, d_logp_CK * own_CK)
    narrow_CV = d_logits_CV.to(weight_VH.dtype)
    d_hidden_CH = narrow_CV @ weight_VH
    if gradients.d_weight_VH is not None:
        gradients.d_weight_VH.add_(narrow_CV.T @ hidden_CH)
    if pair is not None:
        d_h_Cr = (d_logits_CV @ B_Vr) * scale
        d_hidden_CH = d_hidden_CH + (d_h_Cr @ A_rH).to(d_hidden_CH.dtype)
        assert A_rH.grad is not None
        assert whole_B.grad is not None
        A_rH.grad += d_h_Cr.T @ hidden_CH.float()
        whole_B.grad[rows_of_B] += (d_logits_CV.T @ h_Cr) * scale
    gradients.d_hidden_TH[rows[0] : rows[1]] = d_hidden_CH
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
