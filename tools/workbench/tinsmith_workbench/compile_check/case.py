"""The programs to compile: a model on a mesh of a slice, as the backend would run it there."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from tinsmith import BUILTIN_LOSSES
from tinsmith_jax import adapters, runtime
from tinsmith_jax.admission import budget_of, computing_of
from tinsmith_jax.buckets import Bucket
from tinsmith_jax.compilation import Program
from tinsmith_jax.config import JaxConfig
from tinsmith_jax.loss_table import LossTables
from tinsmith_jax.mesh import MeshLayout, make_layout, resident_specs
from tinsmith_jax.model_config import ModelConfig
from tinsmith_jax.rank_classes import rank_classes
from tinsmith_jax.runtime import Limits
from tinsmith_jax.sampling_device import sampling_shape
from tinsmith_jax.sampling_programs import SamplingPrograms
from tinsmith_jax.sampling_values import SamplingShape
from tinsmith_jax.tiles import MAX_ADAPTERS
from tinsmith_jax.train_step import TrainPrograms
from tinsmith_jax.weights import Base, base_shapes
from tinsmith_workbench.compile_check.chips import Chip, read_slice
from tinsmith_workbench.compile_check.formula import Cost, Pass, Step
from tinsmith_workbench.compile_check.options import Options
from tinsmith_workbench.compile_check.sampling_formula import Sampling

# Any below: jax devices, and pytrees of shapes.


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    config: ModelConfig
    limits: Limits
    layout: MeshLayout
    bucket: Bucket
    shape: SamplingShape
    tenants: int
    chip: Chip

    @property
    def train(self) -> TrainPrograms:
        return TrainPrograms(
            config=self.config,
            limits=self.limits,
            losses=LossTables({spec.name: spec for spec in BUILTIN_LOSSES}),
            base_shapes=self._base,
            layout=self.layout,
        )

    @property
    def sample(self) -> SamplingPrograms:
        return SamplingPrograms(config=self.config, shape=self.shape, base_shapes=self._base, layout=self.layout)

    @property
    def _base(self) -> Base:
        return base_shapes(self.config, self.limits.dtype, self.layout)

    def program(self, kind: str) -> Program:
        match kind:
            case "gradients":
                return self.train.gradients(self.bucket)
            case "score":
                return self.train.score(self.bucket)
            case "step":
                return self.train.step(self.bucket.padded_rank)
            case "prefill":
                return self.sample.named("prefill", self.shape.prefill_tiles[-1])
            case _:
                return self.sample.named("decode")

    def cost(self, kind: str) -> Cost:
        """Return what the program should cost."""
        config, axes = self.config, self.layout.axes
        match kind:
            case "gradients" | "score":
                return Pass(
                    config=config, axes=axes, limits=self.limits, bucket=self.bucket, gradients=kind == "gradients"
                )
            case "step":
                rank = self.bucket.padded_rank
                weights, state = self._weights_bytes(rank), self._state_bytes(rank)
                return Step(config=config, axes=axes, padded_rank=rank, weights_bytes=weights, state_bytes=state)
            case _:
                tiles = self.shape.prefill_tiles[-1] if kind == "prefill" else None
                in_hbm = self.chip.attends_in_hbm
                return Sampling(config=config, axes=axes, shape=self.shape, tiles=tiles, attends_in_hbm=in_hbm)

    # Bytes on one chip

    def base_bytes(self) -> int:
        """Return what the weights take. A tied head is the embedding, though programs take it as a second argument."""
        own = {name: part for name, part in self._base.items() if not (name == "head" and self.config.tied)}
        return _bytes_on_a_chip(own)

    def tenant_bytes(self) -> int:
        """Return the bytes of a tenant: weights, two moments and, while they are pending, gradients."""
        rank = self.bucket.padded_rank
        return self._weights_bytes(rank) + 3 * self._state_bytes(rank)

    def zeros_bytes(self) -> int:
        """Return the bytes of the zeros that all tenants share: an adapter for each class of ranks, and its state."""
        ranks = rank_classes(self.limits.max_lora_rank)
        of_state = sum(map(self._state_bytes, ranks)) if self.layout.axes.fsdp > 1 else 0
        return sum(map(self._weights_bytes, ranks)) + of_state

    def sampling_bytes(self) -> int:
        """Return the bytes of the cache, of recurrent states, and of the slots' adapters."""
        if not self.shape.num_slots:
            return 0
        return _bytes_on_a_chip((self.cache, self._resident))

    @property
    def cache(self) -> Any:
        """The shapes of keys, values and recurrent states, with their places."""
        return jax.tree.map(_placed, self.sample.cache, self.layout.placed_tree(self.sample.cache_specs))

    @property
    def _resident(self) -> Any:
        modules, experts = adapters.layer_modules(self.config), self.config.experts is not None
        return jax.tree.map(
            _placed, self.sample.resident, self.layout.placed_tree(resident_specs(modules, experts=experts))
        )

    def held_arguments(self, kind: str) -> int:
        """Return those bytes of a program's arguments that are held anyway."""
        rank, number = self.bucket.padded_rank, self.bucket.num_adapters
        weights, state = self._weights_bytes(rank), self._state_bytes(rank)
        match kind:
            case "gradients":
                return _bytes_on_a_chip(self._base) + number * (weights + state)
            case "score":
                return _bytes_on_a_chip(self._base) + number * weights
            case "step":
                return weights + 3 * state
            case "prefill":
                unused = (self._base["head"], self._resident["head"])
                return _bytes_on_a_chip(self._base) + self.sampling_bytes() - _bytes_on_a_chip(unused)
            case _:
                return _bytes_on_a_chip(self._base) + self.sampling_bytes()

    def _weights_bytes(self, rank: int) -> int:
        return self._adapter_bytes(rank, self.train.adapter_specs)

    def _state_bytes(self, rank: int) -> int:
        return self._adapter_bytes(rank, self.train.state_specs(rank))

    def _adapter_bytes(self, rank: int, specs: Any) -> int:
        return _bytes_on_a_chip(
            jax.tree.map(_placed, adapters.shapes(self.config, rank), self.layout.placed_tree(specs))
        )


def make_case(options: Options, config: ModelConfig, devices: Sequence[Any], platform: str = "tpu") -> Case:
    """Raise ConfigError for too few devices, or for a model that cannot be so divided."""
    settings = JaxConfig(
        dtype=options.dtype,
        mesh=options.mesh,
        max_lora_rank=options.rank,
        max_context_tokens=options.context,
        max_batch_tokens=options.tokens,
        decode_slots=max(options.slots, 1),
        recompute=options.recompute,
        kernels=options.kernels,
        gather_once=options.gather_once,
    )
    limits = runtime.decide(settings, config, platform)
    bucket = Bucket(
        num_tokens=limits.max_batch_tokens,
        num_adapters=1 if options.tenants == 1 else MAX_ADAPTERS,
        num_targets=1,
        padded_rank=options.rank,
    )
    layout = make_layout(options.mesh, config, exact=limits.exact, devices=devices)
    shape = sampling_shape(settings, limits, config, num_shards=layout.axes.num_streams)
    computing, chip = computing_of(settings, on_cpu=False), read_slice(options.topology).chip
    once = budget_of(settings, config, computing, chip.hbm_bytes).gathers_once
    shape = replace(shape, slots_per_shard=options.slots, whole_per_shard=options.slots, gathers_once=once)
    return Case(
        config=config, limits=limits, layout=layout, bucket=bucket, shape=shape, tenants=options.tenants, chip=chip
    )


def _placed(shape: Any, place: Any) -> Any:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place)


def _bytes_on_a_chip(shapes: Any) -> int:
    def of(leaf: Any) -> int:
        return int(np.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize)

    return sum(map(of, jax.tree.leaves(shapes)))
