"""RMSNorm as Megatron builds it. Its own refuses divided sequences."""

import torch
import torch.nn.functional as F  # noqa: N812  (its name everywhere)
from torch import nn

from tinsmith_megatron.untyped import Untyped


class Norm(nn.RMSNorm):
    def __init__(self, *, config: Untyped, hidden_size: int, eps: float, **_: Untyped) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self._less_1 = config.layernorm_zero_centered_gamma

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._less_1:
            return super().forward(x)
        return F.rms_norm(x.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps).to(x.dtype)
