"""Has a model of transformers compute sequences with given experts: the reference for routing replay."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from tinsmith import Array, Datum, expert_metrics

# Any: a model of transformers, and what its modules take and return.


class ForcedRouting:
    """Changes the choice of a model's routers, for the tokens of a sequence that come with experts."""

    def __init__(self, model: Any) -> None:
        self._datum: Datum | None = None
        self._chosen: list[dict[int, torch.Tensor]] = []  # of each sequence so far, by layer with experts
        routers = [each.mlp.gate for each in model.model.layers if hasattr(each.mlp, "gate")]
        self._num_experts = len(routers[0].weight) if routers else 0
        for number, router in enumerate(routers):
            router.register_forward_hook(partial(self._choose, number))

    def begin(self, datum: Datum) -> None:
        """Compute this sequence next."""
        self._datum = datum
        self._chosen.append({})

    @property
    def chosen_TLC(self) -> Array:
        """The experts that have computed the sequence."""
        return _joined(self._chosen[-1])

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of experts over all sequences so far."""
        if not any(self._chosen):
            return {}
        chosen_TLC = np.concatenate([_joined(each) for each in self._chosen])
        return expert_metrics(
            np.stack([(chosen_TLC == number).sum(axis=(0, 2)) for number in range(self._num_experts)], axis=1)
        )

    def _choose(self, layer: int, router: Any, _: Any, output: Any) -> Any:
        logits, _, chosen = output
        assert self._datum is not None
        given = self._datum.routed_experts
        if given is not None and len(given):
            chosen = torch.cat((torch.tensor(given[:, layer].astype(np.int64)), chosen[len(given) :]))
        self._chosen[-1][layer] = chosen
        by_sigmoid = hasattr(router, "e_score_correction_bias")
        weights = (logits.sigmoid() if by_sigmoid else logits.softmax(dim=-1)).gather(1, chosen)
        if getattr(router, "norm_topk_prob", True):  # Qwen3.5's always does
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, weights * getattr(router, "routed_scaling_factor", 1.0), chosen


def _joined(chosen: Mapping[int, torch.Tensor]) -> Array:
    return torch.stack([chosen[layer] for layer in sorted(chosen)], dim=1).numpy().astype(np.uint16)
