"""What reading prompts and drawing tokens should cost on one chip: FLOPs of matrix products, and collectives.

All slots are taken to be full: their sequences are as long as the context. Legend as in formula.py, and R = rows of one
pass over the layers on one shard (its slots, or the tokens of its prompt tiles), W = keys of a sequence, in pages.

FLOPs of a pass:

    base       2RM
    attention  4RW * query width / t
    head       2R * hidden * vocabulary / t, if tokens are drawn
    adapters   2Rr(in + out) per module, r being the largest rank

Collectives of a pass, in arrays:

    all-gather over fsdp     a layer's four matrices, the tokens
    all-to-all over fsdp     the tokens' rows of the embedding
    all-reduce over tensor   in a layer the results of o and of down with their adapters'; the embedding
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

from tinsmith_checkpoints.huggingface import HEAD
from tinsmith_jax.adapters import HF_MODULES
from tinsmith_jax.mesh import Axes
from tinsmith_jax.model_config import ModelConfig
from tinsmith_jax.sampling_values import PAGE, SamplingShape, pages_of
from tinsmith_jax.tiles import TILE
from tinsmith_workbench.compile_check.formula import Plan, share_of_module, shares_of_matrices, streams_name
from tinsmith_workbench.compile_check.hlo import Trips

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
        return {"": self._passes, "write": writes, "attend": self._pages, "truncate": 0, "alternatives": 0}

    @property
    def _pages(self) -> int:
        return pages_of(self.shape.max_context_tokens)

    def flops(self) -> dict[str, float]:
        layers, drawn = self.config.num_layers, self.tiles is None
        modules = [share_of_module(self.config, self.axes, name) for name in HF_MODULES]
        head = share_of_module(self.config, self.axes, HEAD)
        width = self.config.q_size // self.axes.tensor
        per_row = {
            "base": 2 * layers * sum(d_in * d_out for d_in, d_out in modules),
            "attention": 4 * layers * self._pages * PAGE * width,
            "head": 2 * head[0] * head[1] * int(drawn),
            "adapters": 2 * self.shape.max_lora_rank * (layers * sum(map(sum, modules)) + sum(head) * int(drawn)),
        }
        return {name: float(flops) * self._rows * self._passes for name, flops in per_row.items()}

    def model_flops(self) -> float:
        return sum(self.flops().values())

    def collectives(self) -> Plan:
        layers, axes, drawn = self.config.num_layers, self.axes, self.tiles is None
        plan: Plan = Counter()
        if axes.fsdp > 1 and drawn and self.shape.gathers_once:
            plan["all-gather", "fsdp"] = 6
        elif axes.fsdp > 1:
            plan["all-gather", "fsdp"] = self._passes * (4 * layers + 1) + drawn
            plan["all-to-all", "fsdp"] = self._passes
        if axes.tensor > 1:
            plan["all-reduce", "tensor"] = self._passes * (2 * layers + 1)
            plan["all-gather", "tensor"] = self._passes * drawn
        if axes.num_streams > 1 and drawn:
            plan["all-gather", streams_name(axes)] += 4
            plan["all-reduce", streams_name(axes)] += self._passes + 1
        return +plan

    def hbm_bytes(self) -> dict[str, float]:
        layers, cache = self.config.num_layers, self._cache_bytes()
        moved = {
            "base": layers * sum(map(self._matrix_bytes, shares_of_matrices(self.config, self.axes))),
            "head": self._outer_bytes(share_of_module(self.config, self.axes, HEAD)) if self.tiles is None else 0,
            "adapters": layers * (self.shape.slots_per_shard + 1) * self._adapter_bytes(),
            "cache": layers * self._sequences * cache,
            "attention": layers * self._spilled_bytes(cache) if self.attends_in_hbm else 0,
        }
        return {name: float(self._passes * num_bytes) for name, num_bytes in moved.items()}

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
        """Return the bytes of one adapter in a layer."""
        modules = [share_of_module(self.config, self.axes, name) for name in HF_MODULES]
        return self._size * self.shape.max_lora_rank * sum(map(sum, modules))

    def _cache_bytes(self) -> int:
        """Return the bytes of a sequence's keys and values in a layer."""
        return self._size * 2 * self._pages * PAGE * self.config.kv_size // self.axes.tensor

    def _spilled_bytes(self, cache: int) -> float:
        sums = 4 * self._rows * self._pages * self.config.q_size // self.axes.tensor
        scores = 4 * self._rows * self._pages * PAGE * self.config.num_heads // self.axes.tensor
        return 2 * self._sequences * (cache + self._adapter_bytes()) + 2 * sums + 6 * scores
