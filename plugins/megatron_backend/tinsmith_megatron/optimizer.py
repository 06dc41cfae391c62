"""AdamW for the adapters of several models, each with its own hyper-parameters, as torch.optim.AdamW.

Bias corrections are computed in float64, once per step.
"""

import math

import torch

from tinsmith import AdamParams
from tinsmith_megatron.adapters import Adapter

_CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_ divides by the norm plus this


def square_norm(gradient: torch.Tensor) -> torch.Tensor:
    """Sum the squares in float64."""
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    return norm.square()


@torch.no_grad()
def adamw_(adapter: Adapter, gradient: torch.Tensor, adam: AdamParams, norm: float) -> None:
    """Step this rank's part of a model in place. `norm` is that of the whole model's gradient, which is consumed."""
    if adapter.m is None or adapter.v is None:
        adapter.m, adapter.v = torch.zeros_like(adapter.weights), torch.zeros_like(adapter.weights)
    adapter.step += 1
    if 0.0 < adam.grad_clip_norm < norm + _CLIP_EPS:
        gradient.mul_(adam.grad_clip_norm / (norm + _CLIP_EPS))
    adapter.m.mul_(adam.beta1).add_(gradient, alpha=1.0 - adam.beta1)
    adapter.v.mul_(adam.beta2).addcmul_(gradient, gradient, value=1.0 - adam.beta2)
    adapter.weights.mul_(1.0 - adam.learning_rate * adam.weight_decay)
    roots = adapter.v.sqrt().div_(math.sqrt(1.0 - adam.beta2**adapter.step)).add_(adam.eps)
    size = adam.learning_rate / (1.0 - adam.beta1**adapter.step)
    adapter.weights.addcdiv_(adapter.m, roots, value=-size)
