"""What reading prompts and drawing tokens should cost on one chip: FLOPs of matrix products, and collectives.

All slots are taken to be full: their sequences are as long as the context. Legend as in formula.py, and R = rows of one
pass over the layers on one shard (its slots, or the tokens of its prompt tiles), W = keys of a sequence, in pages.

FLOPs of a pass:

    base        2RM. Of latents, queries and sums are multiplied with the matrix that made keys and values in training
    attention   2RW (width of queries + width of sums) / t. A window limits W, in whole pages. Queries of latents are as
                wide as what is kept of a token, and their sums as a latent
    delta rule  of prompts, as in training, and so is Mamba-2; single tokens take no products of matrices
    experts     of prompts as in training, each tile having an adapter of its own. When tokens are drawn, each expert
                that is needed computes all rows, and an even router needs as many as there are choices
    head        2R * hidden * vocabulary / t, if tokens are drawn
    adapters    2Rr(in + out) per module, r being the largest rank

Collectives of a pass, in arrays:

    all-gather over fsdp     a layer's matrices, the tokens
    all-to-all over fsdp     the tokens' rows of the embedding
    all-reduce over tensor   in a layer the results of o and of down with their adapters'; of experts in their place
                             results, and what their adapters have of these, and what a shared one gives; the embedding
    all-gather over tensor   the logits, if tokens are drawn

Decoding also: an all-gather of the head over fsdp, and of what was drawn (four arrays) over the streams, each once
in a call; and an all-reduce over the streams before each step and after the last, whether any slot goes on. If the
weights are gathered once for the call, that replaces everything else over fsdp: the stacked matrices of all layers, the
embedding and the head.

Bytes between HBM and the chip in a pass; activations stay on the chip:

    base       the matrices, and the head if tokens are drawn; of those that are gathered for each layer the share, and
               once more the large ones, which do not stay on the chip; those that are gathered once for the call are
               read in each pass, and their share read and the whole written in one
    adapters   a layer's A and B of all slots, and of the row that stays empty
    cache      the keys and values of each slot, or of each tile's sequence
    attention  where the compiler keeps nothing of that on the chip (chips.py): the tiles' adapters, keys and values
               written and read again, the sums in float32 written and read with each page, the scores six times
"""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Final

import jax.numpy as jnp

from tinsmith_jax.mesh import Axes
from tinsmith_jax.model_config import ModelConfig
from tinsmith_jax.sampling_values import PAGE, SamplingShape, pages_of
from tinsmith_jax.tiles import TILE
from tinsmith_workbench.compile_check.formula import Plan, streams_name
from tinsmith_workbench.compile_check.hlo import Trips
from tinsmith_workbench.compile_check.layers import Layers

_LARGE_BYTES: Final = 55e6
"""Found in the rows of docs/reference/tpu.jsonl: gathered matrices of more bytes do not stay on the chip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """A prefill of `tiles` tiles on each shard, or without them, a call that draws max_steps tokens for each slot."""

    config: ModelConfig
    axes: Axes
    shape: SamplingShape
    tiles: int | None = None
    attention_is_hidden: bool = False
    attends_in_hbm: bool = False  # chips.Chip

    @property
    def tokens(self) -> int:
        return self._rows * self._passes * self.axes.num_streams

    @property
    def _passes(self) -> int:
        return self.shape.max_steps if self.tiles is None else 1

    @property
    def _rows(self) -> int:
        return self.shape.slots_per_shard if self.tiles is None else self.tiles * TILE

    def trips(self) -> Trips:
        """Return the lengths of loops. Tokens are drawn without top-k, top-p and alternatives."""
        writes = self.shape.slots_per_shard if self.tiles is None else self.tiles
        seen = self._work.seen_pages(self._pages, self._tokens_of_tile) / self.config.attending_layers
        found = {"": self._passes, "write": writes, "attend": seen, "truncate": 0, "alternatives": 0}
        if self._work.recurrent_layers:
            found["states"] = writes
        return {**found, "experts": self._rounds} if self._work.routed is not None else found

    @property
    def _work(self) -> Layers:
        return Layers(self.config, self.axes)

    @property
    def _pages(self) -> int:
        return pages_of(self.shape.max_context_tokens)

    @property
    def _tokens_of_tile(self) -> int:
        return 1 if self.tiles is None else TILE

    @property
    def _rounds(self) -> int:
        """Return the blocks of rows of a prompt, or the experts that a step needs."""
        experts = self._work.routed
        assert experts is not None, "the model has experts"
        choices = self._rows * experts.top_k
        if self.tiles is None:
            return min(choices, experts.num_experts) // self.axes.tensor
        return self._work.blocks(choices, self.tiles)

    def flops(self) -> dict[str, float]:
        work, drawn, rank = self._work, self.tiles is None, self.shape.max_lora_rank
        seen = PAGE * work.seen_pages(self._pages, self._tokens_of_tile)
        experts, own = self._of_experts()
        per_row = {
            "base": 2 * sum(each.layers * each.weights for each in work.matrices),
            "attention": 2 * seen * sum(self._widths()),
            work.rule_name: 0 if drawn else work.recurrent_layers * work.rule_flops()[0],
            "experts": experts,
            "head": 2 * work.head.weights * int(drawn),
            "adapters": 2 * rank * (self._adapted() + (work.head.d_in + work.head.d_out) * int(drawn)) + own,
        }
        return {name: float(flops) * self._rows * self._passes for name, flops in per_row.items() if flops}

    def _widths(self) -> tuple[int, int]:
        """Return the numbers of a token's queries, and of its sums of values."""
        latent, heads = self.config.attention.latent, self.config.num_heads
        if latent is None:
            return (heads * self.config.head_dim // self.axes.tensor,) * 2
        return heads * latent.cached_dim, heads * latent.rank

    def _adapted(self) -> int:
        """Return the inputs and outputs of all modules: of the one that makes keys and values of latents, by head."""
        found = sum(each.layers * (each.d_in + each.d_out) for each in self._work.modules)
        if (latent := self.config.attention.latent) is None:
            return found
        usual = latent.rank + self.config.num_heads * (latent.plain_dim + latent.value_dim)
        by_head = self.config.num_heads * (latent.plain_dim + latent.value_dim + 2 * latent.rank)
        return found + self.config.num_layers * (by_head - usual)

    def _of_experts(self) -> tuple[float, float]:
        """Return the products of experts' matrices for a row, and of their adapters."""
        experts = self._work.routed
        if experts is None:
            return 0.0, 0.0
        work, rank = self._work, self.shape.max_lora_rank
        rows = self._rounds * (self._rows if self.tiles is None else TILE) / self._rows
        times = self.config.expert_layers * work.expert_matrices
        adapters = 2 * rank * (rows * experts.intermediate_size + self.config.expert_input)
        return times * rows * work.expert_product, times * adapters

    def model_flops(self) -> float:
        return sum(self.flops().values())

    def collectives(self) -> Plan:
        axes, drawn, work = self.axes, self.tiles is None, self._work
        plan: Plan = Counter()
        if axes.fsdp > 1 and drawn and self.shape.gathers_once:
            plan["all-gather", "fsdp"] = 2 + work.gathered_names
        elif axes.fsdp > 1:
            plan["all-gather", "fsdp"] = self._passes * (work.gathered + 1) + drawn
            plan["all-to-all", "fsdp"] = self._passes
        if axes.tensor > 1:
            plan["all-reduce", "tensor"] = self._passes * (self._sums() + 1)
            plan["all-gather", "tensor"] = self._passes * drawn
        if axes.num_streams > 1 and drawn:
            plan["all-gather", streams_name(axes)] += 4
            plan["all-reduce", streams_name(axes)] += self._passes + 1
        return +plan

    def _sums(self) -> int:
        experts = self._work.routed
        of_experts = 0 if experts is None else self.config.expert_layers * (1 + bool(experts.shared_size))
        return self._work.divided_mixers + self._work.mlps + of_experts

    def hbm_bytes(self) -> dict[str, float]:
        work, layers, cache = self._work, self.config.attending_layers, self._cache_bytes()
        moved = {
            "base": sum(each.layers * self._matrix_bytes((each.d_in, each.d_out)) for each in work.matrices),
            "experts": self._expert_bytes(),
            "head": self._outer_bytes((work.head.d_in, work.head.d_out)) if self.tiles is None else 0,
            "adapters": (self.shape.slots_per_shard + 1) * self._adapter_bytes(),
            "cache": layers * self._sequences * cache,
            "states": 2 * self._sequences * 4 * self.config.state_size,
            "attention": self._spilled_bytes(cache) if self.attends_in_hbm else 0,
        }
        return {name: float(self._passes * num_bytes) for name, num_bytes in moved.items()}

    def _expert_bytes(self) -> float:
        """Return what is read of the experts: one's matrices in each round."""
        experts = self._work.routed
        if experts is None:
            return 0.0
        each = self._work.expert_matrices * self.config.expert_input * experts.intermediate_size
        return float(self._size * self.config.expert_layers * self._rounds * each)

    @property
    def _sequences(self) -> int:
        return self.shape.slots_per_shard if self.tiles is None else self.tiles

    @property
    def _size(self) -> int:
        return int(jnp.dtype(self.shape.dtype).itemsize)

    def _matrix_bytes(self, matrix: tuple[int, int]) -> float:
        if self.tiles is None and self.shape.gathers_once:
            return self._outer_bytes(matrix)
        whole = self._size * math.prod(matrix)
        is_moved_again = self.axes.fsdp > 1 and whole > _LARGE_BYTES
        return whole / self.axes.fsdp + (whole if is_moved_again else 0)

    def _outer_bytes(self, matrix: tuple[int, int]) -> float:
        """Return what is read in each pass of a matrix that is gathered once for the call."""
        whole = self._size * math.prod(matrix)
        return whole if self.axes.fsdp == 1 else whole * (1 + (1 + 1 / self.axes.fsdp) / self._passes)

    def _adapter_bytes(self) -> int:
        """Return the bytes of one adapter in all layers."""
        work, found = self._work, sum(each.layers * (each.d_in + each.d_out) for each in self._work.modules)
        if work.routed is not None:
            inner = work.routed.num_experts // self.axes.tensor * work.routed.intermediate_size
            found += work.expert_matrices * self.config.expert_layers * (self.config.expert_input + inner)
        return self._size * self.shape.max_lora_rank * found

    def _cache_bytes(self) -> int:
        """Return the bytes of what a sequence keeps in a layer that attends."""
        parts = 1 if self.config.attention.latent is not None else self.axes.tensor
        return self._size * self._pages * PAGE * self.config.cached_size // parts

    def _spilled_bytes(self, cache: int) -> float:
        layers, seen = self.config.attending_layers, self._work.seen_pages(self._pages, self._tokens_of_tile)
        sums = 4 * self._rows * seen * self._widths()[1]
        scores = 4 * self._rows * seen * PAGE * self.config.num_heads // self.axes.tensor
        return 2 * self._sequences * (layers * cache + self._adapter_bytes()) + 2 * sums + 6 * scores
