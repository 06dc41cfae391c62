"""Capacity: tokens of a micro-batch, models in training, and whether one more model fits. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from tinsmith_checkpoints.huggingface import DecoderShape, adapter_weights, weight_counts
from tinsmith_fsdp.config import FsdpConfig
from tinsmith_fsdp.costs import ADAPTER_BYTES, FULL_BYTES, PASS_BYTES, Costs, Ranks, costs_of
from tinsmith_workers import Budget as WorkersBudget

_SHORT: Final = 1024  # tokens that a sequence may have, however little memory there is
_STEP: Final = 128  # to which a token budget is rounded down
_GAPS: Final = 10  # a tenth of the memory left stays free of kept activations
WORTH_KEEPING: Final = 4096
"""From this many tokens on, keeping activations is faster than recomputing those of a larger micro-batch.

On an H200, 16,384 tokens of one tenant and the layers of Qwen3-8B took 1.63 s if recomputed in one micro-batch, 1.29 s
if kept in micro-batches of at most 4,096 tokens, and 1.22 s in those of 6,144; with 16 tenants, 1.77, 1.42 and 1.42 s.
Smaller ones were not tried.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget(WorkersBudget):
    """The use of a rank's memory."""

    REMEDY = "use more ranks"
    config: FsdpConfig
    ranks: Ranks
    costs: Costs
    keeping: Costs  # if activations are kept

    @property
    def adapter(self) -> int:
        """The memory of a model of the largest rank."""
        return self.bytes_of(self.config.max_lora_rank)

    def bytes_of(self, rank: int) -> int:
        """Return what a model takes of this rank from its creation to its end; an adapter on everything, at most."""
        if rank == 0:
            weights = weight_counts(self.shape).total
            return weights * FULL_BYTES // (self.ranks.shards * self.ranks.tp) + self.costs.trained
        return adapter_weights(self.shape, rank) * (ADAPTER_BYTES + PASS_BYTES + self.costs.copies)

    @property
    def micro_batch(self) -> int:
        """Its peak. Gradients are added up when the rest of it is free again."""
        weights = adapter_weights(self.shape, self.config.max_lora_rank)
        passing = self.costs.micro_batch(self.micro_tokens) + self.costs.own_gradients * weights
        return max(passing, self.costs.exchanged * weights)

    @property
    def fixed(self) -> int:
        return self.costs.fixed + self.micro_batch

    @property
    def max_models(self) -> int:
        if self.memory is None:
            return self.config.max_models
        stepping = adapter_weights(self.shape, self.config.max_lora_rank) * (ADAPTER_BYTES + self.costs.stepping)
        fitting = min((self.memory - self.fixed) // self.adapter, (self.memory - self.costs.fixed) // stepping)
        return min(self.config.max_models, max(0, fitting))

    @property
    def gathers(self) -> bool:
        """True if each micro-batch gathers the layers again."""
        return self.ranks.shards > 1

    @property
    def worth_keeping(self) -> int:
        """Tokens of a micro-batch from which on it pays to have more of them, and to keep their activations."""
        return min(WORTH_KEEPING, self.micro_tokens)

    def kept_tokens(self, held: int) -> int:
        """Return how many tokens' activations may be kept beside models that take `held` bytes.

        0 if they are always recomputed, or always kept. Models are admitted as if all were recomputed, so that as many
        train as without this; whatever they leave may speed up a pass.
        """
        if not self.ranks.may_keep or self.memory is None:
            return 0
        own = self.keeping.own_gradients * adapter_weights(self.shape, self.config.max_lora_rank)
        left = self.memory - self.keeping.fixed - held - own
        left -= left // _GAPS
        in_layer = left // (self.keeping.saved + self.keeping.layer)
        at_head = (left - self.keeping.head) // (self.keeping.saved + self.keeping.top)
        tokens = min(in_layer, at_head, self.micro_tokens)
        return max(0, tokens // _STEP * _STEP)

    def needed(self, ranks: Sequence[int]) -> int:
        return self.fixed + sum(map(self.bytes_of, ranks))

    @property
    def least(self) -> int:
        return least_bytes(self.config, self.shape, self.ranks)


def budget_of(config: FsdpConfig, shape: DecoderShape, ranks: Ranks, memory: int | None) -> Budget:
    """Choose the token budget: as set, else the default, or a third of the memory left beside the weights."""
    costs = costs_of(config, shape, ranks)
    resolved = config.resolved(on_cpu=ranks.on_cpu)
    wanted = max(resolved.batch_tokens, config.max_context_tokens or 0)
    least = least_tokens(config, shape)
    tokens = wanted
    if memory is not None and config.max_batch_tokens is None:
        spare = (memory - costs.fixed - costs.head) // 3 // costs.per_token
        tokens = min(wanted, max(least, spare // _STEP * _STEP))
    context = config.max_context_tokens or min(shape.max_position, resolved.longest, max(tokens, least))
    return Budget(
        config=config,
        shape=shape,
        ranks=ranks,
        costs=costs,
        data_parallel=ranks.dp,
        memory=memory,
        context_tokens=context,
        micro_tokens=max(context, tokens),
        keeping=costs_of(config, shape, replace(ranks, checkpointing=False)),
    )


def least_tokens(config: FsdpConfig, shape: DecoderShape) -> int:
    """Return the size of the smallest micro-batch that the settings allow: one of the longest sequence."""
    return max(config.max_context_tokens or min(shape.max_position, _SHORT), config.max_batch_tokens or 0)


def least_bytes(config: FsdpConfig, shape: DecoderShape, ranks: Ranks) -> int:
    """Return the memory with which a rank can train one model."""
    budget = budget_of(config, shape, ranks, 0)
    return budget.fixed + budget.adapter
