"""The experts of a layer that lie on this rank, with the adapters of all rows that are routed to them.

Rows arrive from all ranks of the expert group. The number of each row's adapter travels with it. They are sorted by
expert and, within it, by adapter, so that every product is one grouped product: the experts' own by expert, the
adapters' by expert and adapter.

Legend: M = rows that have arrived, T = rows of this rank's own part of the stream, E = experts here, G = adapters of
the pass, H = hidden, F = intermediate size.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812  (its name everywhere)
from megatron.core.parallel_state import get_tensor_model_parallel_rank
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.moe.moe_utils import sort_chunks_by_idxs
from torch import nn

from tinsmith_megatron.low_rank import grouped, low_rank
from tinsmith_megatron.streams import Stream
from tinsmith_megatron.untyped import Untyped


class AdaptedExperts(nn.Module):
    """Frozen. Takes and returns what Megatron's own experts do."""

    def __init__(self, num_local_experts: int, config: Untyped, *, pg_collection: Untyped, **_: Untyped) -> None:
        super().__init__()
        self.num_experts = num_local_experts
        self._group = pg_collection.ep
        hidden, inner, dtype = config.hidden_size, config.moe_ffn_hidden_size, config.params_dtype

        def frozen(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_local_experts, *shape, dtype=dtype), requires_grad=False)

        self.gate_up, self.down = frozen(2 * inner, hidden), frozen(hidden, inner)
        self.modules_: Sequence[str] = ()  # the canonical names of gate, up and down
        self.dispatched: Untyped = None  # Megatron's dispatcher, which knows where the rows came from
        self.stream: Stream | None = None  # of the current micro-batch

    def forward(
        self, x_MH: torch.Tensor, rows_per_expert: torch.Tensor, probs_M: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Return each row's output times its routing weight, [M, H]. Rows are sorted by expert."""
        assert self.stream is not None
        num_adapters = len(self.stream.ends_G)
        owner_M = self._owners(len(x_MH)) if num_adapters > 1 else None
        if owner_M is None:
            return self._computed(x_MH, probs_M, rows_per_expert, rows_per_expert, None), None
        expert_M = torch.arange(self.num_experts, device=x_MH.device).repeat_interleave(rows_per_expert.to(x_MH.device))
        key_M = expert_M * num_adapters + owner_M
        order_M = torch.argsort(key_M, stable=True)
        counts = torch.bincount(key_M, minlength=self.num_experts * num_adapters)
        y_MH = self._computed(x_MH[order_M], probs_M[order_M], rows_per_expert, counts, owner_M[order_M])
        return y_MH[torch.argsort(order_M)], None

    def _owners(self, num_rows: int) -> torch.Tensor:
        """Send the number of each row's adapter the way that the row has gone, [M]."""
        assert self.stream is not None
        own, sent = self.stream.owner_T, self.dispatched
        size = sent.hidden_shape_before_permute[0]  # of this rank's part of the sequence
        start = get_tensor_model_parallel_rank() * size
        owner = own[start : start + size].index_select(0, sent.reversed_local_input_permutation_mapping)
        if self._group.size() > 1:
            owner = all_to_all(self._group, owner, sent.output_splits, sent.input_splits)
        if self.num_experts > 1:
            order = sent.sort_input_by_local_experts
            owner, _ = sort_chunks_by_idxs(owner, sent.num_global_tokens_per_local_expert.ravel(), order)
        assert len(owner) == num_rows
        return owner

    def _computed(
        self,
        x_MH: torch.Tensor,
        probs_M: torch.Tensor,
        rows_per_expert: torch.Tensor,
        rows_per_group: torch.Tensor,
        owner_M: torch.Tensor | None,
    ) -> torch.Tensor:
        assert self.stream is not None
        scales = self.stream.scales_G1
        scale_M1 = scales.expand(len(x_MH), 1) if owner_M is None else scales[owner_M]
        ends_E, ends_EG = (_ends(counts, x_MH.device) for counts in (rows_per_expert, rows_per_group))

        def delta(number: int, x: torch.Tensor) -> torch.Tensor | int:
            pair = self.stream.stacks.pairs.get(self.modules_[number])  # type: ignore[union-attr]  # asserted above
            if pair is None:
                return 0
            A, B = (by_expert_and_adapter(leaf, self.num_experts) for leaf in pair)
            return low_rank(x, A, B, scale_M1, ends_EG)

        def activated() -> torch.Tensor:
            """Apart, so that the products without adapters are free again before the next ones run."""
            gate_MF, up_MF = grouped(x_MH, self.gate_up, ends_E).chunk(2, dim=-1)
            return F.silu(gate_MF + delta(0, x_MH)) * (up_MF + delta(1, x_MH))

        inner_MF = (activated() * probs_M[:, None]).to(x_MH.dtype)
        return grouped(inner_MF, self.down, ends_E) + delta(2, inner_MF)


def _ends(counts: torch.Tensor, device: torch.device) -> torch.Tensor:
    return counts.to(device).cumsum(0).to(torch.int32)


def by_expert_and_adapter(leaf: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Map [G, E or 1, ...] to [E * G, ...]."""
    return leaf.transpose(0, 1).expand(num_experts, -1, -1, -1).reshape(-1, *leaf.shape[2:])
