"""The compiled programs of sampling. Shapes come from the configuration alone, so the programs are few and all known.

Small arrays come from the host and go back whole: on a mesh, every process has the same, and reads all results.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from tinsmith_jax import adapters, decode, native
from tinsmith_jax.compilation import Program, compile_program
from tinsmith_jax.jax_types import Jax
from tinsmith_jax.mesh import (
    ONE,
    PAGES,
    ROWS,
    WHOLE_PAGES,
    Axes,
    MeshLayout,
    Spec,
    adapter_specs,
    base_specs,
    resident_specs,
)
from tinsmith_jax.model_config import ModelConfig
from tinsmith_jax.rank_classes import rank_classes
from tinsmith_jax.rules import rule_of
from tinsmith_jax.sampling_values import (
    BASE_MODEL,
    MAX_PROMPT_DRAWS,
    NOT_DRAWN,
    Cache,
    Dispatch,
    RowParams,
    SamplingShape,
    SlotInput,
    SlotState,
    States,
    Switches,
    TokenTiles,
    Weights,
    cache_shapes,
    state_shapes,
)
from tinsmith_jax.tiles import TILE

Kind = Literal["decode", "prefill", "write_adapter", "score", "copy"]

TARGET_COLUMNS = 64
"""Targets per row of the scoring program; wider matrices are scored in slices. Logits cost far more than columns."""
_HERE = Spec()  # the same on every shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A program before it is compiled: a function, its arguments' shapes, and how a mesh divides these and the results.

    The arrays need not exist, and the first call finds the program ready.
    """

    function: Callable[..., Jax]
    arguments: tuple[Jax, ...]
    into: tuple[Jax, ...]
    out: Jax
    donated: int | None = None  # of the arguments: the result takes its place

    def compile(self, layout: MeshLayout | None, *, on_cpu: bool) -> Jax:
        given_away = () if self.donated is None else (self.donated,)
        if layout is None:
            jitted = jax.jit(self.function, donate_argnums=given_away)
        else:
            divided = jax.shard_map(
                self.function, mesh=layout.devices, in_specs=self.into, out_specs=self.out, check_vma=False
            )
            jitted = jax.jit(divided, in_shardings=layout.placed_tree(self.into), donate_argnums=given_away)
        shapes = jax.tree.map(lambda leaf: _shape(leaf.shape, leaf.dtype), self.arguments)
        return compile_program(jitted, shapes, on_cpu=on_cpu)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPrograms:
    """Plans the programs of one model from shapes alone; compilation.Programs compiles them."""

    config: ModelConfig
    shape: SamplingShape
    base_shapes: Jax  # pytree of arrays or their shapes and dtypes
    layout: MeshLayout | None = None

    @property
    def how(self) -> decode.Arithmetic:
        if self.shape.native:
            return native.sampling_arithmetic(self.config, self.shape)
        return decode.InJax(config=self.config, shape=self.shape, axes=self.axes)

    @property
    def axes(self) -> Axes:
        axes = ONE if self.layout is None else self.layout.axes
        return replace(axes, kernels=self.shape.kernels)

    def all(self) -> list[Program]:
        """Every program that can be needed, likely ones first."""
        kinds: list[tuple[Kind, int]] = [
            ("decode", 0),
            *(("prefill", tiles) for tiles in self.shape.prefill_tiles),
            *(("write_adapter", rank) for rank in rank_classes(self.shape.max_lora_rank)),
            ("score", 0),
            ("copy", 0),
        ]
        return [self.named(kind, size) for kind, size in kinds]

    def named(self, kind: Kind, size: int = 0) -> Program:
        """Return a program; `size` is a number of tiles or a padded rank, if there is a choice."""

        def compiled() -> Jax:
            return self._plan(kind, size).compile(self.layout, on_cpu=self.shape.one_by_one)

        return Program(("sampling", kind, size), compiled)

    def empty(self) -> tuple[Cache, adapters.Adapter]:
        """Make the cache and the rows of the adapters."""
        specs = self.cache_specs, self._resident_specs
        shardings = None if self.layout is None else self.layout.placed_tree(specs)
        return self.how.empty((self.cache, self.resident), shardings)

    def _plan(self, kind: Kind, size: int) -> Plan:
        match kind:
            case "decode":
                return self._decode()
            case "prefill":
                return self._prefill(size)
            case "write_adapter":
                return self._write_adapter(size)
            case "score":
                return self._score()
            case "copy":
                return self._copy()

    def _decode(self) -> Plan:
        dispatch = dispatch_of(SlotInput.idle(self.shape), self.shape.max_steps)
        return Plan(
            function=partial(decode.decode, self.how),
            arguments=(self._weights, self.cache, dispatch),
            into=(self._weights_specs, self.cache_specs, Dispatch._make((ROWS, ROWS, _HERE))),
            out=(self.cache_specs, _HERE),
            donated=1,
        )

    def _prefill(self, num_tiles: int) -> Plan:
        """On a mesh, `num_tiles`, pages and rows count one shard's."""
        return Plan(
            function=partial(decode.prefill, self.how),
            arguments=(self._weights, self.cache, no_tiles(self.shape, num_tiles)),
            into=(self._weights_specs, self.cache_specs, ROWS),
            out=(self.cache_specs, ROWS, _HERE),
            donated=1,
        )

    def _score(self) -> Plan:
        hidden_TH = _shape((self.shape.num_shards * TILE, self.config.hidden_size), self.shape.dtype)
        owner, targets = np.zeros(2, np.int32), np.zeros((TILE, TARGET_COLUMNS), np.int32)
        uniform, temperature = np.zeros((TILE, MAX_PROMPT_DRAWS), np.float32), np.float32(NOT_DRAWN)
        return Plan(
            function=partial(decode.score_prompt, self.how),
            arguments=(self._weights, hidden_TH, owner, targets, uniform, temperature, np.False_),
            into=(self._weights_specs, ROWS, *(_HERE,) * 5),
            out=_HERE,
        )

    def _write_adapter(self, rank: int) -> Plan:
        resident = self._resident_specs
        return Plan(
            function=self.how.write_adapter,
            arguments=(self.resident, adapters.shapes(self.config, rank), np.int32(0), np.float32(1)),
            into=(resident, self.adapter_specs, _HERE, _HERE),
            out=resident,
            donated=0,
        )

    def _copy(self) -> Plan:
        pages = np.zeros(self.shape.num_slots, np.int32)
        return Plan(
            function=decode.copy_pages,
            arguments=(self.cache, pages, pages),
            into=(self.cache_specs, ROWS, ROWS),
            out=self.cache_specs,
            donated=0,
        )

    @property
    def _weights(self) -> Weights:
        return Weights(self.base_shapes, self.resident)

    @property
    def _weights_specs(self) -> Weights:
        return Weights(base_specs(list(self.base_shapes["layers"])), self._resident_specs)

    @property
    def _resident_specs(self) -> Jax:
        return self.how.resident_specs(
            resident_specs(adapters.layer_modules(self.config), experts=self.config.experts is not None)
        )

    @property
    def adapter_specs(self) -> Jax:
        """Return how an adapter is divided that is to be put into a slot."""
        return adapter_specs(adapters.layer_modules(self.config), experts=self.config.experts is not None)

    @property
    def cache(self) -> Cache:
        """Return the shapes of keys and values, and of recurrent states."""
        shape, sizes = self.shape, self.config.recurrence
        pages = cache_shapes(self.config, shape.num_shards * shape.pages_per_shard)
        states = None
        if sizes is not None:
            number = len(self.config.layers_with(rule_of(self.config).IN))
            rule, tail = state_shapes(sizes, number, shape.num_shards * shape.states_per_shard)
            states = States(_shape(rule, "float32"), _shape(tail, shape.dtype))
        k_LPJDC, v_LPJCD = (_shape(each, shape.dtype) for each in pages)
        return Cache(k_LPJDC, v_LPJCD, states)

    @property
    def cache_specs(self) -> Cache:
        """Return how they are divided. Values of latents are empty, and programs return what is empty undivided."""
        states = None if self.config.recurrence is None else States(WHOLE_PAGES, WHOLE_PAGES)
        if self.config.attention.latent is not None:
            return Cache(WHOLE_PAGES, Spec(), states)
        return Cache(PAGES, PAGES, states)

    @property
    def resident(self) -> adapters.Adapter:
        """Return the shapes of the rows of adapters."""
        one = adapters.shapes(self.config, self.shape.max_lora_rank)
        rows, dtype = self.shape.num_shards * self.shape.adapters_per_shard, self.shape.dtype
        return self.how.resident(
            jax.tree.map(lambda leaf: _shape((*leaf.shape[:-2], rows, *leaf.shape[-2:]), dtype), one)
        )


def dispatch_of(slots: SlotInput, num_steps: int) -> Dispatch:
    running = slots.left > 0
    truncated = ((slots.top_k > 0) | (slots.top_p < 1)) & running
    return Dispatch(
        SlotState(
            slots.tokens,
            slots.positions,
            slots.left,
            slots.stop_tokens,
            slots.tables,
            slots.adapters,
            slots.states,
        ),
        RowParams(slots.seed_words, slots.sample_index, slots.temperature, slots.top_k, slots.top_p),
        Switches(np.int32(num_steps), np.bool_(truncated.any()), np.bool_(slots.any_top)),
    )


def no_tiles(shape: SamplingShape, num_tiles: int) -> TokenTiles:
    """Return arrays for `num_tiles` tiles of each shard, all padding."""
    count = shape.num_shards * num_tiles
    return TokenTiles(
        np.full((count, TILE), -1, np.int32),
        np.full(count, -1, np.int32),
        np.zeros((count, shape.pages_per_sequence), np.int32),
        np.full(count, BASE_MODEL, np.int32),
        np.zeros((count, 2), np.int32),
    )


def _shape(shape: tuple[int, ...], dtype: Jax) -> Jax:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
