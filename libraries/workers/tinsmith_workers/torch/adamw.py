"""AdamW for several models in one pass over their tensors, each with its own hyper-parameters, as torch.optim.AdamW.

torch.optim itself takes one set of hyper-parameters per group of tensors and keeps its own step counts; here they
belong to one step of one tenant. Bias corrections are computed in float64, once per step.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tinsmith.operations import AdamParams

_CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_ divides by the norm plus this


@dataclass(frozen=True, slots=True)
class Stepped:
    """One tensor in one step. All four are float32 of one shape; weights and moments are updated in place."""

    weights: torch.Tensor
    gradient: torch.Tensor  # consumed by the step
    m: torch.Tensor
    v: torch.Tensor
    adam: AdamParams
    norm: float  # of the whole model's gradient
    step: int  # counted from 1


Step = Callable[[Sequence[Stepped]], None]
"""An optimizer: steps all tensors in place."""


def norms(gradients: Sequence[torch.Tensor]) -> list[float]:
    """Return the root of each one's sum of squares, in float64. Waits for the device once, for all of them."""
    if not gradients:
        return []
    found: list[float] = torch.stack(torch._foreach_norm(list(gradients), 2.0, dtype=torch.float64)).tolist()  # noqa: SLF001
    return found


@torch.no_grad()
def adamw_(tensors: Sequence[Stepped]) -> None:
    """Step all tensors in place."""
    if not tensors:
        return
    clipped = [(t, factor) for t in tensors if (factor := _clip_factor(t)) != 1.0]
    if clipped:
        torch._foreach_mul_([t.gradient for t, _ in clipped], [factor for _, factor in clipped])
    step = fused_adamw_ if tensors[0].weights.is_cuda else foreach_adamw_
    step(tensors)


def fused_adamw_(tensors: Sequence[Stepped]) -> None:
    """Step tensors with torch's own kernel, which reads and writes each number once. Gradients are already clipped."""
    together: dict[tuple[float, ...], list[Stepped]] = {}
    for each in tensors:
        adam = each.adam
        if each.weights.numel():
            settings = (adam.learning_rate, adam.beta1, adam.beta2, adam.weight_decay, adam.eps)
            together.setdefault(settings, []).append(each)
    for (rate, beta1, beta2, decay, eps), own in together.items():
        torch._fused_adamw_(
            [t.weights for t in own], [t.gradient for t in own], [t.m for t in own], [t.v for t in own], [],
            [torch.full((), float(t.step), device=t.weights.device) for t in own],
            lr=rate, beta1=beta1, beta2=beta2, weight_decay=decay, eps=eps, amsgrad=False, maximize=False,
        )  # fmt: skip


def foreach_adamw_(tensors: Sequence[Stepped]) -> None:
    """Step tensors operation by operation. Gradients are already clipped."""
    weights, gradients = [t.weights for t in tensors], [t.gradient for t in tensors]
    m, v = [t.m for t in tensors], [t.v for t in tensors]
    adams = [t.adam for t in tensors]
    # the moments
    torch._foreach_mul_(m, [adam.beta1 for adam in adams])
    scaled = torch._foreach_mul(gradients, [1.0 - adam.beta1 for adam in adams])  # noqa: SLF001
    torch._foreach_add_(m, scaled)
    torch._foreach_mul_(v, [adam.beta2 for adam in adams])
    torch._foreach_addcmul_(v, gradients, gradients, [1.0 - adam.beta2 for adam in adams])
    # decay, then move
    torch._foreach_mul_(weights, [1.0 - adam.learning_rate * adam.weight_decay for adam in adams])
    roots = torch._foreach_sqrt(v)  # noqa: SLF001
    torch._foreach_div_(roots, [math.sqrt(1.0 - t.adam.beta2**t.step) for t in tensors])
    torch._foreach_add_(roots, [adam.eps for adam in adams])
    sizes = [-t.adam.learning_rate / (1.0 - t.adam.beta1**t.step) for t in tensors]
    torch._foreach_addcdiv_(weights, m, roots, sizes)


def _clip_factor(tensor: Stepped) -> float:
    limit = tensor.adam.grad_clip_norm
    return min(1.0, limit / (tensor.norm + _CLIP_EPS)) if limit > 0.0 else 1.0
