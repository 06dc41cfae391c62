"""AdamW with the hyper-parameters of one step of one model, as torch.optim.AdamW.

Bias corrections are computed in float64, once per step.
"""

import math

import torch

from tinsmith import AdamParams

_CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_ divides by the norm plus this


def square_norm(gradient: torch.Tensor) -> torch.Tensor:
    """Sum the squares in float64."""
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    return norm.square()


@torch.no_grad()
def adamw_(
    weights: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    gradient: torch.Tensor,
    adam: AdamParams,
    norm: float,
    step: int,
) -> None:
    """Step this rank's part of a model in place, all float32. The gradient is consumed.

    `norm` is that of the whole model's gradient; `step` counts from 1.
    """
    if 0.0 < adam.grad_clip_norm < norm + _CLIP_EPS:
        gradient.mul_(adam.grad_clip_norm / (norm + _CLIP_EPS))
    m.mul_(adam.beta1).add_(gradient, alpha=1.0 - adam.beta1)
    v.mul_(adam.beta2).addcmul_(gradient, gradient, value=1.0 - adam.beta2)
    weights.mul_(1.0 - adam.learning_rate * adam.weight_decay)
    roots = v.sqrt().div_(math.sqrt(1.0 - adam.beta2**step)).add_(adam.eps)
    weights.addcdiv_(m, roots, value=-adam.learning_rate / (1.0 - adam.beta1**step))
