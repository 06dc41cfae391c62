"""Every registered loss as one function over a packed batch whose tokens belong to different losses.

Legend: T = tokens, n = tiles, K = targets per token, I = loss inputs by name, C = loss settings, one row per (loss,
key), S = sums over sequences, one row per (loss, name).
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
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
    sums_ST: Jax = None  # float32; None: the table's losses need none

    def tokens_of_tiles(self) -> Jax:
        """Return how many tokens each tile has. All of them have a loss."""
        return (self.kind_T >= 0).reshape(-1, TILE).sum(axis=1, dtype=jnp.int32)


class LossTables:
    """The losses that need no sums over their sequence, and those that do.

    A pass has losses of one table, because with the others the head runs twice. So the first ones' programs, and their
    bits, do not depend on which others there are.
    """

    def __init__(self, losses: Mapping[str, LossSpec]) -> None:
        self.names = frozenset(losses)
        self._summed = frozenset(name for name, spec in losses.items() if spec.sums)
        self._tables = [
            LossTable({name: losses[name] for name in names}) for names in (self.names - self._summed, self._summed)
        ]

    def needs_sums(self, loss: str) -> bool:
        return loss in self._summed

    def of(self, *, summed: bool) -> "LossTable":
        """Return the table of the losses that need sums, or of the others."""
        return self._tables[summed]


class LossTable:
    """Fixes the order of losses, inputs and settings, so that they all fit into three arrays."""

    def __init__(self, losses: Mapping[str, LossSpec]) -> None:
        self._specs = [losses[name] for name in sorted(losses)]
        self.kinds = {spec.name: kind for kind, spec in enumerate(self._specs)}
        self.inputs = sorted({name for spec in self._specs for name in spec.inputs})
        self.settings = [(spec.name, key) for spec in self._specs for key in spec.settings]
        self._sums = [(spec.name, name) for spec in self._specs for name in spec.sums]

    def spec(self, loss: str) -> LossSpec:
        return self._specs[self.kinds[loss]]

    def per_token(self, logp_TK: Jax, batch: LossBatch) -> tuple[Jax, Jax]:
        """Return loss and its derivative by the logprob, both [T, K]. Computes all losses and selects one per token."""
        loss = gradient = jnp.zeros_like(logp_TK)
        for kind, spec in enumerate(self._specs):
            inputs = {name: batch.inputs_ITK[self.inputs.index(name)] for name in spec.inputs}
            inputs |= {name: batch.sums_ST[self._sums.index((spec.name, name))][:, None] for name in spec.sums}
            config = {key: batch.config_CT[self.settings.index((spec.name, key))][:, None] for key in spec.settings}
            this_loss, this_gradient = spec.per_token(jnp, logp_TK, inputs, config)
            chosen = (batch.kind_T == kind)[:, None]
            loss = jnp.where(chosen, this_loss, loss)
            gradient = jnp.where(chosen, this_gradient, gradient)
        return loss, gradient

    def with_sums(self, logp_TK: Jax, batch: LossBatch, starts_n: Jax) -> LossBatch:
        """Add the sums over sequences. `starts_n`: whether a tile is its sequence's first. There is one target a token.

        They are added in an order that only the sequence's length determines: within a tile by halves, then tile by
        tile.
        """
        sums: list[Jax] = []
        for kind, spec in enumerate(self._specs):
            inputs = {name: batch.inputs_ITK[self.inputs.index(name), :, 0] for name in spec.inputs}
            config = {key: batch.config_CT[self.settings.index((spec.name, key))] for key in spec.settings}
            assert spec.summands is not None, "this table's losses need sums"
            parts = spec.summands(jnp, logp_TK[:, 0], inputs, config)
            sums += [_of_tiles(jnp.where(batch.kind_T == kind, part, 0.0)) for part in parts]
        return batch._replace(sums_ST=jnp.repeat(_of_sequences(jnp.stack(sums, axis=1), starts_n).T, TILE, axis=1))


def _of_tiles(part_T: Jax) -> Jax:
    parts = part_T.reshape(-1, TILE)
    while parts.shape[1] > 1:
        half = parts.shape[1] // 2
        parts = parts[:, :half] + parts[:, half:]
    return parts[:, 0]


def _of_sequences(part_nS: Jax, starts_n: Jax) -> Jax:
    """Give every tile the sum of its sequence's tiles."""

    def up_to(total_S: Jax, tile: tuple[Jax, Jax]) -> tuple[Jax, Jax]:
        part_S, starts = tile
        total_S = jnp.where(starts, part_S, total_S + part_S)
        return total_S, total_S

    def last_of(total_S: Jax, tile: tuple[Jax, Jax]) -> tuple[Jax, Jax]:
        so_far_S, ends = tile
        total_S = jnp.where(ends, so_far_S, total_S)
        return total_S, total_S

    _, so_far_nS = jax.lax.scan(up_to, jnp.zeros_like(part_nS[0]), (part_nS, starts_n))
    ends_n = jnp.concatenate([starts_n[1:], jnp.ones_like(starts_n[:1])])
    _, total_nS = jax.lax.scan(last_of, jnp.zeros_like(part_nS[0]), (so_far_nS, ends_n), reverse=True)
    return total_nS
