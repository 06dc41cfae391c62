"""The output head, divided over the vocabulary: logprobs, losses and, in the same pass, all gradients.

Every loss returns its derivative by the logprob along with its value. The gradient of the logits is therefore known as
soon as a chunk's logits are, and only one chunk of logits ever exists.

Legend: C = rows of a chunk, T = rows, K = targets per token, H = hidden, V = this rank's part of the vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.parallel_state import (
    get_tensor_model_parallel_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)

from tinsmith.huggingface import HEAD
from tinsmith.torch_workers import LossTable
from tinsmith_megatron.low_rank import low_rank
from tinsmith_megatron.streams import Stream

_CPU_LOGITS = 1 << 22  # of one chunk: 16 MiB stay near the caches
_GPU_LOGITS = 1 << 27
_MIN_ROWS = 64


@dataclass(frozen=True, slots=True)
class Scores:
    """Detached results for a stream, float32 [T, K]."""

    logp_TK: torch.Tensor
    loss_TK: torch.Tensor


class _Head(torch.autograd.Function):
    """Returns the summed loss. The forward pass already computes its gradients; backward only hands them on.

    Gradients of adapters are added to their leaves at once: this runs once per pass.
    """

    @staticmethod
    def forward(ctx: Any, hidden_TH: torch.Tensor, weight_VH: torch.Tensor, stream: Stream, losses: LossTable) -> Any:
        d_hidden_TH = torch.zeros_like(hidden_TH)
        d_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if weight_VH.requires_grad else None
        scores = _score(hidden_TH, weight_VH, stream, losses, d_hidden_TH, d_weight_VH)
        ctx.save_for_backward(d_hidden_TH, d_weight_VH)
        ctx.dtype = weight_VH.dtype
        ctx.mark_non_differentiable(scores.logp_TK, scores.loss_TK)
        return scores.loss_TK.sum(), scores.logp_TK, scores.loss_TK

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        d_hidden_TH, d_weight_VH = ctx.saved_tensors
        d_weight = None if d_weight_VH is None else (d_weight_VH * grads[0]).to(ctx.dtype)
        return d_hidden_TH * grads[0], d_weight, None, None


def score(hidden_TH: torch.Tensor, weight_VH: torch.Tensor, stream: Stream, losses: LossTable) -> Scores:
    """Compute logprobs and losses."""
    return _score(hidden_TH, weight_VH, stream, losses, None)


def score_with_gradients(
    hidden_TH: torch.Tensor, weight_VH: torch.Tensor, stream: Stream, losses: LossTable
) -> tuple[torch.Tensor, Scores]:
    """Return the summed loss as a tensor on which to call backward, and the scores.

    The gradient of `hidden_TH` is this rank's part of it: that of its part of the vocabulary.
    """
    total, logp_TK, loss_TK = _Head.apply(hidden_TH, weight_VH, stream, losses)  # type: ignore[no-untyped-call]
    return total, Scores(logp_TK, loss_TK)


def _score(
    hidden_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    stream: Stream,
    losses: LossTable,
    d_hidden_TH: torch.Tensor | None,
    d_weight_VH: torch.Tensor | None = None,
) -> Scores:
    budget = _GPU_LOGITS if hidden_TH.is_cuda else _CPU_LOGITS
    size = max(_MIN_ROWS, budget // weight_VH.shape[0])
    parts = []
    for start in range(0, stream.num_rows, size):
        rows = slice(start, min(start + size, stream.num_rows))
        parts.append(_chunk(hidden_TH, weight_VH, stream, losses, rows, d_hidden_TH, d_weight_VH))
    return Scores(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _chunk(
    hidden_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    stream: Stream,
    losses: LossTable,
    rows: slice,
    d_hidden_TH: torch.Tensor | None,
    d_weight_VH: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch = stream.batch.rows(rows.start, rows.stop)
    hidden_CH = hidden_TH[rows].detach().requires_grad_(d_hidden_TH is not None)
    # 1. Logits of this rank's part of the vocabulary, the adapters' part in float32.
    with torch.set_grad_enabled(d_hidden_TH is not None):
        delta_CV = _adapted(hidden_CH, stream, rows, weight_VH.shape[0])
    with torch.no_grad():
        logits_CV = (hidden_CH @ weight_VH.T).float()
        if delta_CV is not None:
            logits_CV += delta_CV
        # 2. Logprobs, losses, and the losses' derivatives.
        lse_C1 = _logsumexp(logits_CV)
        inside_CK, local_CK = _own_targets(batch.targets_TK, weight_VH.shape[0])
        logp_CK = _summed(logits_CV.gather(1, local_CK) * inside_CK) - lse_C1
        loss_CK, d_logp_CK = losses.per_token(logp_CK, batch)
        if d_hidden_TH is None:
            return logp_CK, loss_CK
        # 3. d logp_k / d logits = onehot(target_k) - softmax, in the memory of the logits.
        d_logits_CV = logits_CV.sub_(lse_C1).exp_().mul_(-d_logp_CK.sum(dim=-1, keepdim=True))
        d_logits_CV.scatter_add_(1, local_CK, d_logp_CK * inside_CK)
        d_hidden_CH = d_logits_CV.to(weight_VH.dtype) @ weight_VH
        if d_weight_VH is not None:
            d_weight_VH += d_logits_CV.to(weight_VH.dtype).T @ hidden_CH.detach()
    # 4. The adapters' part, by autograd.
    if delta_CV is not None:
        torch.autograd.backward(delta_CV, d_logits_CV)
        assert hidden_CH.grad is not None
        d_hidden_CH = d_hidden_CH + hidden_CH.grad
    d_hidden_TH[rows] = d_hidden_CH
    return logp_CK, loss_CK


def _adapted(hidden_CH: torch.Tensor, stream: Stream, rows: slice, size: int) -> torch.Tensor | None:
    """Return what adapters add to this rank's logits of a chunk, in float32, or None if none trains the head."""
    pair = stream.stacks.pairs.get(HEAD)
    if pair is None:
        return None
    A, B = pair
    start = get_tensor_model_parallel_rank() * size
    ends_G = (stream.ends_G - rows.start).clamp(0, rows.stop - rows.start)
    return low_rank(hidden_CH.float(), A, B[:, start : start + size], stream.scale_T1[rows], ends_G)


def _own_targets(targets_CK: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which targets lie in this rank's part of the vocabulary, and where; 0 for the others."""
    if get_tensor_model_parallel_world_size() == 1:
        return torch.ones((), dtype=torch.float32, device=targets_CK.device), targets_CK
    local_CK = targets_CK - get_tensor_model_parallel_rank() * size
    inside_CK = (local_CK >= 0) & (local_CK < size)
    return inside_CK.float(), local_CK.where(inside_CK, 0)


def _logsumexp(logits_CV: torch.Tensor) -> torch.Tensor:
    """Return log(sum(exp(logits))) over the whole vocabulary, [C, 1]."""
    if get_tensor_model_parallel_world_size() == 1:
        return torch.logsumexp(logits_CV, dim=-1, keepdim=True)
    top_C1 = logits_CV.amax(dim=-1, keepdim=True)
    dist.all_reduce(top_C1, dist.ReduceOp.MAX, group=get_tensor_model_parallel_group())
    shifted_CV = logits_CV - top_C1
    return top_C1 + _summed(shifted_CV.exp_().sum(dim=-1, keepdim=True)).log()


def _summed(part: torch.Tensor) -> torch.Tensor:
    if get_tensor_model_parallel_world_size() > 1:
        dist.all_reduce(part, group=get_tensor_model_parallel_group())
    return part
