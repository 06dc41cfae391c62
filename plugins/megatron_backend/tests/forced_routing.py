"""Has a model of transformers compute sequences with given experts: the reference for routing replay."""

from functools import partial
from typing import Any

import numpy as np
import torch

from tinsmith import Array, Datum

# Any: a model of transformers, and what its modules take and return.


class ForcedRouting:
    """Changes the choice of a model's routers, for the tokens of a sequence that come with experts."""

    def __init__(self, model: Any) -> None:
        self._datum: Datum | None = None
        self._chosen: dict[int, torch.Tensor] = {}
        for layer, each in enumerate(model.model.layers):
            if hasattr(each.mlp, "gate"):
                each.mlp.gate.register_forward_hook(partial(self._choose, layer))

    def begin(self, datum: Datum) -> None:
        """Compute this sequence next."""
        self._datum = datum
        self._chosen.clear()

    @property
    def chosen_TLC(self) -> Array:
        """The experts that have computed the sequence."""
        chosen = [self._chosen[layer] for layer in sorted(self._chosen)]
        return torch.stack(chosen, dim=1).numpy().astype(np.uint16)

    def _choose(self, layer: int, router: Any, _: Any, output: Any) -> Any:
        logits, _, chosen = output
        assert self._datum is not None
        given = self._datum.routed_experts
        if given is not None and len(given):
            chosen = torch.cat((torch.tensor(given[:, layer].astype(np.int64)), chosen[len(given) :]))
        self._chosen[layer] = chosen
        weights = torch.softmax(logits, dim=-1).gather(1, chosen)
        if router.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, weights, chosen
