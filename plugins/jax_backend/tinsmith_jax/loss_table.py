"""Every registered loss as one function over a packed batch whose tokens belong to different losses.

Legend: T = tokens, K = targets per token, I = loss inputs by name, C = loss settings, one row per (loss, key).
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp

from tinsmith import LossSpec
from tinsmith_jax.jax_types import Jax
from tinsmith_jax.tiles import TILE


class LossBatch(NamedTuple):
    """The inputs of the losses. Loss and gradient are zero for padding (`kind_T` is negative)."""

    targets_TK: Jax  # int32
    kind_T: Jax  # int32, index into LossTable.names
    inputs_ITK: Jax  # float32
    config_CT: Jax  # float32

    def tokens_of_tiles(self) -> Jax:
        """Return how many tokens each tile has. All of them have a loss."""
        return (self.kind_T >= 0).reshape(-1, TILE).sum(axis=1, dtype=jnp.int32)


class LossTable:
    """Fixes the order of losses, inputs and settings, so that they all fit into three arrays."""

    def __init__(self, losses: Mapping[str, LossSpec]) -> None:
        self._specs = [losses[name] for name in sorted(losses)]
        self.kinds = {spec.name: kind for kind, spec in enumerate(self._specs)}
        self.inputs = sorted({name for spec in self._specs for name in spec.inputs})
        self.settings = [(spec.name, key) for spec in self._specs for key in sorted(spec.config)]

    def defaults(self, loss: str) -> Mapping[str, float]:
        return self._specs[self.kinds[loss]].config

    def input_names(self, loss: str) -> tuple[str, ...]:
        return self._specs[self.kinds[loss]].inputs

    def per_token(self, logp_TK: Jax, batch: LossBatch) -> tuple[Jax, Jax]:
        """Return loss and its derivative by the logprob, both [T, K]. Computes all losses and selects one per token."""
        loss = gradient = jnp.zeros_like(logp_TK)
        for kind, spec in enumerate(self._specs):
            inputs = {name: batch.inputs_ITK[self.inputs.index(name)] for name in spec.inputs}
            config = {key: batch.config_CT[self.settings.index((spec.name, key))][:, None] for key in spec.config}
            this_loss, this_gradient = spec.per_token(jnp, logp_TK, inputs, config)
            chosen = (batch.kind_T == kind)[:, None]
            loss = jnp.where(chosen, this_loss, loss)
            gradient = jnp.where(chosen, this_gradient, gradient)
        return loss, gradient
