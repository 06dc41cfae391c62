"""Compiles programs of training and sampling from shapes alone, and says what they take of their device."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax_harness import LOSSES

from tinsmith_checkpoints.huggingface import Json
from tinsmith_jax import runtime
from tinsmith_jax.buckets import Bucket
from tinsmith_jax.config import JaxConfig, MeshConfig
from tinsmith_jax.costs import Computing, Costs
from tinsmith_jax.families import config_of
from tinsmith_jax.loss_table import LossTables
from tinsmith_jax.mesh import make_layout
from tinsmith_jax.sampling_device import sampling_shape
from tinsmith_jax.sampling_programs import SamplingPrograms
from tinsmith_jax.tiles import MAX_ADAPTERS
from tinsmith_jax.train_step import TrainPrograms
from tinsmith_jax.weights import base_shapes

SMALL: Mapping[str, Json] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}


class Taken(NamedTuple):
    """Bytes of a program: what it takes while it runs, besides what lies there anyway, and what is counted of that."""

    found: int
    counted: int
    held: int


class Programs:
    """XLA's programs for a CPU, of a model that differs from SMALL in some sizes."""

    def __init__(self, *, tokens: int, context: int, rank: int, slots: int, recompute: bool, **sizes: Any) -> None:
        self._config = config_of({**SMALL, **sizes}, Path("config.json"))
        settings = JaxConfig(
            dtype="float32", max_lora_rank=rank, max_context_tokens=context, max_batch_tokens=tokens,
            decode_slots=slots, recompute=recompute, kernels="reference",
        )  # fmt: skip
        self._limits = runtime.decide(settings, self._config, "cpu")
        layout = make_layout(MeshConfig(), self._config, exact=True, devices=jax.devices()[:1])
        self._base: Any = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), base_shapes(self._config, "float32", layout)
        )
        self._shape = sampling_shape(settings, self._limits, self._config, num_shards=1)
        self.costs = Costs(
            shape=self._config,
            computing=Computing(on_cpu=True, dtype="float32", recompute=recompute),
            max_lora_rank=rank,
        )

    def gradients(self) -> Taken:
        limits, costs, rank = self._limits, self.costs, self.costs.max_lora_rank
        programs = TrainPrograms(config=self._config, limits=limits, losses=LossTables(LOSSES), base_shapes=self._base)
        bucket = Bucket(num_tokens=limits.max_batch_tokens, num_adapters=MAX_ADAPTERS, num_targets=1, padded_rank=rank)
        held = costs.base + MAX_ADAPTERS * (costs.weights(rank) + costs.state(rank))
        counted = costs.micro_batch(limits.max_batch_tokens, MAX_ADAPTERS)
        program: Any = programs.gradients(bucket).compile()  # of a partial of jax.stages.Compiled
        return Taken(_bytes(program.func, held), counted, held)

    def sampling(self, kind: Any) -> Taken:
        shape, costs = self._shape, self.costs
        programs = SamplingPrograms(config=self._config, shape=shape, base_shapes=self._base)
        size = shape.prefill_tiles[-1] if kind == "prefill" else 0
        held = costs.base + costs.rows(shape.slots_per_shard)
        held += costs.pages(shape.slots_per_shard, shape.max_context_tokens)
        counted = costs.sampling(shape.slots_per_shard, gathers_once=False)
        return Taken(_bytes(programs.named(kind, size).compile(), held), counted, held)


def _bytes(program: Any, held: int) -> int:
    """A program that reads prompts does not have the head among its arguments."""
    plan = program.memory_analysis()
    inputs = max(0, plan.argument_size_in_bytes - held)
    return int(inputs + plan.temp_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes)
