"""Routing replay: experts that are given take the place of the router's choice, with the weights that it gives them.

The rows of each operation that every expert computes are counted, whether the router chose or not.

Legend: T = rows of this rank's part of the stream, E = experts of a layer, C = experts of a row, O = operations,
g = groups of experts, e = experts of one.
"""

from collections.abc import Callable

import torch
from megatron.core.parallel_state import get_tensor_model_parallel_rank
from torch import nn

from tinsmith_megatron.streams import Stream
from tinsmith_megatron.untyped import Untyped


class ReplayedRouting(nn.Module):
    """Chooses for Megatron's router, as its `router_replay`. Megatron's own takes one choice for all rows of a pass."""

    def __init__(self, layer: int) -> None:
        """`layer`: its number among those of this rank's stage that have experts."""
        super().__init__()
        self._layer = layer
        self.stream: Stream | None = None  # of the current micro-batch

    def get_replay_topk(
        self,
        scores_TE: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., Untyped],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores and the numbers of the experts of each row, the highest score first."""
        assert self.stream is not None
        start = get_tensor_model_parallel_rank() * len(scores_TE)
        rows = slice(start, start + len(scores_TE))
        open_TE = scores_TE
        if num_groups is not None and group_topk is not None:
            open_TE = of_groups(scores_TE, num_groups, group_topk)
        _, chosen_TC = default_compute_topk(open_TE, topk)
        if self.stream.experts_LTC is not None:
            given_TC = self.stream.experts_LTC[self._layer, rows].long()
            chosen_TC = torch.where(given_TC < 0, chosen_TC, given_TC)
        # The bits of the weights depend on the order. From 0.18 on, Megatron-core sorts only where it takes gradients.
        order_TC = scores_TE.detach().gather(1, chosen_TC).argsort(dim=1, descending=True, stable=True)
        chosen_TC = chosen_TC.gather(1, order_TC)
        self._count(chosen_TC, rows, scores_TE.shape[1])
        return scores_TE.gather(1, chosen_TC), chosen_TC

    def _count(self, chosen_TC: torch.Tensor, rows: slice, num_experts: int) -> None:
        """Count in place of an earlier count, as a layer may be computed again. torch.bincount would wait for a GPU."""
        assert self.stream is not None
        key_P = (self.stream.operation_T[rows, None] * num_experts + chosen_TC).flatten()
        load = torch.zeros((len(self.stream.operations) + 1) * num_experts, dtype=torch.int32, device=key_P.device)
        load.scatter_add_(0, key_P, torch.ones_like(key_P, dtype=torch.int32))
        self.stream.loads[self._layer] = load.view(-1, num_experts)


def of_groups(scores_TE: torch.Tensor, num_groups: int, chosen: int) -> torch.Tensor:
    """Return the scores, and -inf outside the groups whose two best experts together have the highest scores.

    So DeepSeek V3 chooses (arXiv 2412.19437). Megatron-core adds up the `topk // chosen` best of a group: other groups,
    unless that is 2.
    """
    scores_Tge: torch.Tensor = scores_TE.detach().unflatten(1, (num_groups, -1))
    best_Tx = scores_Tge.topk(2, dim=-1).values.sum(-1).topk(chosen, dim=-1).indices
    closed_Tg = torch.ones_like(scores_Tge[..., 0], dtype=torch.bool).scatter(1, best_Tx, value=False)
    open_Tge: torch.Tensor = scores_Tge.masked_fill(closed_Tg[..., None], -torch.inf)
    return open_Tge.flatten(1)
