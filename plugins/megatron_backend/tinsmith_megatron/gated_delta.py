"""The gated delta rule within each sequence of a stream, in the place of Megatron's attention.

Megatron-core's own module needs Triton, and refuses packed sequences.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812  (its name everywhere)
from megatron.core.parallel_state import get_tensor_model_parallel_world_size
from torch import nn

from tinsmith_checkpoints.huggingface import DELTA, DeltaRule
from tinsmith_megatron.linears import ColumnLinear, RowLinear
from tinsmith_megatron.streams import Stream
from tinsmith_megatron.untyped import Untyped
from tinsmith_workers.torch import causal_convolution, gated_delta


def of_rank(rule: DeltaRule, ranks: int) -> DeltaRule:
    """Return the rule of the heads that one of the tensor-parallel ranks computes."""
    return replace(rule, key_heads=rule.key_heads // ranks, value_heads=rule.value_heads // ranks)


class PackedGatedDelta(nn.Module):
    """Frozen where the stage is. Heads are divided over the tensor-parallel ranks."""

    def __init__(self, *, config: Untyped, layer_number: int, rule: DeltaRule, **_: Untyped) -> None:
        super().__init__()
        dtype, prefix = config.params_dtype, f"model.layers.{layer_number - 1}"
        self.in_proj = _DeltaInputs(rule, config)
        self.in_proj.modules_ = [f"{prefix}.{path}" for path in DELTA[:-1]]
        self.out_proj = RowLinear(rule.value_size, config.hidden_size, config=config)
        self.out_proj.modules_ = [f"{prefix}.{DELTA[-1]}"]
        rule = of_rank(rule, get_tensor_model_parallel_world_size())
        self._rule, self._eps = rule, config.layernorm_epsilon
        self.convolution = nn.Parameter(torch.empty(rule.mixed_size, 1, rule.width, dtype=dtype))
        self.decay, self.step = (nn.Parameter(torch.empty(rule.value_heads, dtype=dtype)) for _ in range(2))
        self.norm = nn.Parameter(torch.empty(rule.value_dim, dtype=dtype))
        self.stream: Stream | None = None  # of the current micro-batch

    def forward(self, hidden_T1H: torch.Tensor, *_: Untyped, **__: Untyped) -> tuple[torch.Tensor, None]:
        """Map [T, 1, hidden] to [T, 1, hidden]."""
        rule, stream = self._rule, self.stream
        assert stream is not None
        projected, _bias = self.in_proj(hidden_T1H)
        mixed, z, b, a = projected[:, 0].split(rule.sizes, dim=-1)
        mixed = F.silu(causal_convolution(mixed, self.convolution[:, 0], stream.positions_T))
        q, k, v = mixed.split(rule.mixed_sizes, dim=-1)
        q, k = (x.unflatten(-1, (rule.key_heads, rule.key_dim)) for x in (q, k))
        v = v.unflatten(-1, (rule.value_heads, rule.value_dim))
        g = -self.decay.float().exp() * F.softplus(a.float() + self.step.float())
        out = gated_delta(q, k, v, g, b.sigmoid(), stream.bounds)
        normed = F.rms_norm(out.float(), (rule.value_dim,), eps=self._eps).to(out.dtype) * self.norm
        gated = (normed * F.silu(z.view_as(out).float())).to(out.dtype)
        return self.out_proj(gated.flatten(1)[:, None])  # type: ignore[no-any-return]  # of our own module


class _DeltaInputs(ColumnLinear):
    """Fuses the projections that read hidden states. The first one has queries, keys and values, each by heads."""

    def __init__(self, rule: DeltaRule, config: Untyped) -> None:
        super().__init__(config.hidden_size, sum(rule.sizes), config=config, tp_comm_buffer_name="delta")
        self._whole = rule

    def _parts(self, A: torch.Tensor, B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.tp_size == 1 or B.shape[1] != self._whole.mixed_size:
            return super()._parts(A, B)
        mixed = B.split(self._whole.mixed_sizes, dim=1)
        return A, torch.cat([each[:, self._own(each.shape[1])] for each in mixed], dim=1)
