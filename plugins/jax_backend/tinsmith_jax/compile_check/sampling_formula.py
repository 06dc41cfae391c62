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
    all-reduce over tensor   in a layer the results of o and of down with those of their adapters; the embedding
    all-gather over tensor   the logits, if tokens are drawn

Decoding besides: an all-gather of the head over fsdp, and of what was drawn (four arrays) over the streams, each once
in a call; and an all-reduce over the streams before each step and after the last, whether any slot goes on. If the
weights are gathered once for the call, that replaces everything else over fsdp: the stacked matrices of all layers, the
embedding and the head.
"""

from collections import Counter
from dataclasses import dataclass

from tinsmith.huggingface import HEAD
from tinsmith_jax.adapters import HF_MODULES
from tinsmith_jax.compile_check.formula import Plan, share_of_module, streams_name
from tinsmith_jax.compile_check.hlo import Trips
from tinsmith_jax.decode import PAGE, pages_of
from tinsmith_jax.layers import TILE
from tinsmith_jax.mesh import Axes
from tinsmith_jax.model_config import ModelConfig
from tinsmith_jax.sampling_values import SamplingShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """A prefill of `tiles` tiles on each shard, or without them, a call that draws max_steps tokens for each slot."""

    config: ModelConfig
    axes: Axes
    shape: SamplingShape
    tiles: int | None = None
    attention_is_hidden: bool = False

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
