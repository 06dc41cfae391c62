"""AdamW with the hyper-parameters of one step of one model, as torch.optim.AdamW.

Bias corrections are computed in float64, once per step.
"""

import math
from collections.abc import Sequence

import torch

from tinsmith_workers.torch import Stepped

_CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_ divides by the norm plus this


@torch.no_grad()
def adamw_(tensors: Sequence[Stepped]) -> None:
    """Step all tensors in place, one after the other: temporaries are as large as one."""
    for each in tensors:
        adam, step, gradient = each.adam, each.step, each.gradient
        if 0.0 < adam.grad_clip_norm < each.norm + _CLIP_EPS:
            gradient.mul_(adam.grad_clip_norm / (each.norm + _CLIP_EPS))
        each.m.mul_(adam.beta1).add_(gradient, alpha=1.0 - adam.beta1)
        each.v.mul_(adam.beta2).addcmul_(gradient, gradient, value=1.0 - adam.beta2)
        each.weights.mul_(1.0 - adam.learning_rate * adam.weight_decay)
        roots = each.v.sqrt().div_(math.sqrt(1.0 - adam.beta2**step)).add_(adam.eps)
        each.weights.addcdiv_(each.m, roots, value=-adam.learning_rate / (1.0 - adam.beta1**step))
