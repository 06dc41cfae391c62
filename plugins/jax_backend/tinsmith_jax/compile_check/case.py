"""What is to be compiled: a model on a mesh of a slice, and the programs that the backend would run there."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from tinsmith import BUILTIN_LOSSES
from tinsmith.huggingface import HEAD
from tinsmith_jax import adapters, runtime
from tinsmith_jax.adapters import HF_MODULES
from tinsmith_jax.buckets import ADAPTERS, STEPS, Bucket
from tinsmith_jax.compilation import Program
from tinsmith_jax.compile_check.formula import Pass
from tinsmith_jax.compile_check.options import Options
from tinsmith_jax.config import JaxConfig
from tinsmith_jax.loss_table import LossTable
from tinsmith_jax.mesh import Layout, Spec, adapter_specs, base_specs, make_layout
from tinsmith_jax.model_config import ModelConfig
from tinsmith_jax.runtime import Limits
from tinsmith_jax.train_step import TrainPrograms
from tinsmith_jax.trunk import LAYER_MODULES
from tinsmith_jax.weights import Base

# Any below: jax devices, and pytrees of shapes.


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of program. `adapters`: how many copies of each adapter in the call it takes as arguments."""

    make: Callable[["Case"], Program]
    adapters: int
    base: bool = True
    gradients: bool = False


KINDS: Final[Mapping[str, Kind]] = {
    "gradients": Kind(make=lambda case: case.train.gradients(case.bucket), adapters=2, gradients=True),
    "score": Kind(make=lambda case: case.train.score(case.bucket), adapters=1),
    "step": Kind(
        make=lambda case: case.train.step(case.rows_of_a_step, case.bucket.padded_rank), adapters=4, base=False
    ),
}
"""By name; the programs of sampling belong here, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    config: ModelConfig
    limits: Limits
    layout: Layout
    bucket: Bucket
    tenants: int

    @property
    def train(self) -> TrainPrograms:
        return TrainPrograms(
            config=self.config,
            limits=self.limits,
            losses=LossTable({spec.name: spec for spec in BUILTIN_LOSSES}),
            base_shapes=base_shapes(self.config, self.limits.dtype, self.layout),
            layout=self.layout,
        )

    @property
    def rows_of_a_step(self) -> int:
        return next(rows for rows in STEPS if rows >= self.bucket.num_adapters)

    def plan(self, kind: str) -> Pass | None:
        """Return what the program should cost, if it is a pass over streams."""
        if not KINDS[kind].base:
            return None
        return Pass(
            config=self.config,
            axes=self.layout.axes,
            limits=self.limits,
            bucket=self.bucket,
            gradients=KINDS[kind].gradients,
        )

    # Bytes on one chip

    def base_bytes(self) -> int:
        return _bytes_on_a_chip(base_shapes(self.config, self.limits.dtype, self.layout))

    def tenant_bytes(self) -> int:
        """Return the bytes of a tenant: weights, two moments and, while they are pending, gradients."""
        return 4 * self._adapter_bytes(self.bucket.padded_rank)

    def zeros_bytes(self) -> int:
        """Return the bytes of the zeros that all tenants share, an adapter for each class of ranks."""
        return sum(map(self._adapter_bytes, adapters.rank_classes(self.limits.max_lora_rank)))

    def state_bytes(self, kind: str) -> int:
        """Return those bytes of a program's arguments that are held anyway."""
        rows = self.rows_of_a_step if kind == "step" else self.bucket.num_adapters
        state = KINDS[kind].adapters * rows * self._adapter_bytes(self.bucket.padded_rank)
        return state + (self.base_bytes() if KINDS[kind].base else 0)

    def _adapter_bytes(self, rank: int) -> int:
        placed = self.layout.placed_tree(adapter_specs(LAYER_MODULES))
        shapes = jax.tree.map(_placed, adapters.shapes(self.config, rank), placed)
        return _bytes_on_a_chip(shapes)


def make_case(options: Options, config: ModelConfig, devices: Sequence[Any], platform: str = "tpu") -> Case:
    """Raise ConfigError if the devices are too few, or if the model cannot be divided in this way."""
    settings = JaxConfig(
        dtype=options.dtype,
        mesh=options.mesh,
        max_lora_rank=options.rank,
        max_context_tokens=options.context,
        max_batch_tokens=options.tokens,
        recompute=options.recompute,
        kernels=options.kernels,
    )
    limits = runtime.decide(settings, config, platform)
    bucket = Bucket(
        num_tokens=limits.max_batch_tokens,
        num_adapters=next(k for k in ADAPTERS if k >= min(options.tenants, ADAPTERS[-1])),
        num_targets=1,
        padded_rank=options.rank,
    )
    layout = make_layout(options.mesh, config, exact=limits.exact, devices=devices)
    return Case(config=config, limits=limits, layout=layout, bucket=bucket, tenants=options.tenants)


def base_shapes(config: ModelConfig, dtype: str, layout: Layout) -> Base:
    """Return what weights.load_base would load, without loading it."""
    layers, hidden, shapes = config.num_layers, config.hidden_size, config.linear_shapes()

    def matrix(*modules: str) -> tuple[int, ...]:
        pairs = [shapes[HF_MODULES[name]] for name in modules]
        return layers, pairs[0][0], sum(d_out for _, d_out in pairs)

    stacked = {
        "input_norm": (layers, hidden),
        "post_norm": (layers, hidden),
        "qkv": matrix("q", "k", "v"),
        "o": matrix("o"),
        "gate_up": matrix("gate", "up"),
        "down": matrix("down"),
    }
    if config.qk_norm:
        stacked |= {"q_norm": (layers, config.head_dim), "k_norm": (layers, config.head_dim)}
    vocabulary = shapes[HEAD][::-1]
    tree = {"embed": vocabulary, "head": vocabulary, "final_norm": (hidden,), "layers": stacked}
    return jax.tree.map(
        lambda spec, shape: _placed(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)), layout.placed(spec)),
        base_specs(list(stacked)),
        tree,
        is_leaf=lambda x: isinstance(x, Spec),
    )


def _placed(shape: Any, place: Any) -> Any:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place)


def _bytes_on_a_chip(shapes: Any) -> int:
    def of(leaf: Any) -> int:
        return int(np.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize)

    return sum(map(of, jax.tree.leaves(shapes)))
