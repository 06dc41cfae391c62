"""The compiled programs of sampling. Shapes come from the configuration alone, so the programs are few and all known.

Small arrays come from the host and go back whole: on a mesh, every process has the same, and reads all results.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tinsmith_jax import adapters, decode
from tinsmith_jax.compilation import Program, compile_program
from tinsmith_jax.kernels import native
from tinsmith_jax.layers import TILE
from tinsmith_jax.mesh import CACHE, ONE, ROWS, Axes, Layout, Spec, adapter_specs, base_specs, resident_specs
from tinsmith_jax.model_config import ModelConfig
from tinsmith_jax.rank_classes import rank_classes
from tinsmith_jax.sampling_adapters import BASE_MODEL
from tinsmith_jax.sampling_head import RowParams
from tinsmith_jax.sampling_values import SamplingShape, SlotInput
from tinsmith_jax.trunk import LAYER_MODULES

# Any below: compiled programs, and pytrees of arrays, shapes and specs.
Kind = Literal["decode", "prefill", "write_adapter", "score", "copy"]

TARGET_COLUMNS = 64
"""Targets per row of the scoring program; wider matrices are scored in slices. Logits cost far more than columns."""
_HERE = Spec()  # the same on every shard


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPrograms:
    """Builds the programs of one model from shapes alone; compilation.Programs compiles them."""

    config: ModelConfig
    shape: SamplingShape
    base_shapes: Any  # pytree of what has a shape and a dtype
    layout: Layout | None = None

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
        match kind:
            case "decode":
                compiled: Callable[[], Any] = self._decode
            case "prefill":
                compiled = functools.partial(self._prefill, size)
            case "write_adapter":
                compiled = functools.partial(self._write_adapter, size)
            case "score":
                compiled = self._score
            case "copy":
                compiled = self._copy
        return Program(("sampling", kind, size), compiled)

    def empty(self) -> tuple[decode.Cache, adapters.Adapter]:
        """Make the cache and the rows of the adapters, in one program: one for each shape is slow to compile.

        For the kernels in C++, nothing is written: pages and rows take memory when something is put there.
        """
        shapes = self.cache, self.resident
        if self.shape.native:
            leaves, tree = jax.tree.flatten(shapes)
            untouched: tuple[decode.Cache, adapters.Adapter] = jax.tree.unflatten(
                tree, jax.jit(jax.ffi.ffi_call(native.UNTOUCHED, leaves))()
            )
            return untouched
        specs: tuple[Any, Any] = jax.tree.map(lambda _: CACHE, self.cache), self._resident_specs

        places = None if self.layout is None else self.layout.placed_tree(specs)
        zeros = jax.jit(
            lambda: jax.tree.map(lambda part: jnp.zeros(part.shape, part.dtype), shapes), out_shardings=places
        )
        made: tuple[decode.Cache, adapters.Adapter] = zeros()
        return made

    def _decode(self) -> Any:
        shape = self.shape
        function = functools.partial(
            decode.decode,
            self.config,
            max_steps=shape.max_steps,
            num_top=shape.max_top,
            gathers_once=shape.gathers_once,
            returns_experts=shape.returns_experts,
            axes=self.axes,
        )
        arguments = decode_arguments(SlotInput.idle(shape), shape.max_steps)
        into = (*self._held_specs, ROWS, ROWS, _HERE)
        return self._build(function, (*self._held, *arguments), into, (CACHE, _HERE), donated=2)

    def _prefill(self, num_tiles: int) -> Any:
        """On a mesh, `num_tiles` is that of a shard, and so are the numbers of pages and rows."""
        tiles = no_tiles(self.shape, num_tiles)
        function = functools.partial(
            decode.prefill, self.config, returns_experts=self.shape.returns_experts, axes=self.axes
        )
        return self._build(function, (*self._held, tiles), (*self._held_specs, ROWS), (CACHE, ROWS, _HERE), donated=2)

    def _score(self) -> Any:
        hidden_TH = _shape((self.shape.num_shards * TILE, self.config.hidden_size), self.shape.dtype)
        place, want_top = np.zeros(2, np.int32), np.False_
        function = functools.partial(decode.score_prompt, num_top=self.shape.max_top, axes=self.axes)
        arguments = (hidden_TH, place, np.zeros((TILE, TARGET_COLUMNS), np.int32), want_top)
        base, resident, _ = self._held
        base_spec, resident_spec, _ = self._held_specs
        into = (base_spec, resident_spec, ROWS, _HERE, _HERE, _HERE)
        return self._build(function, (base, resident, *arguments), into, _HERE)

    def _write_adapter(self, rank: int) -> Any:
        function = functools.partial(decode.write_adapter, axes=self.axes)
        arguments = (self.resident, adapters.shapes(self.config, rank), np.int32(0), np.float32(1))
        resident = self._resident_specs
        into = (resident, self.adapter_specs, _HERE, _HERE)
        return self._build(function, arguments, into, resident, donated=0)

    def _copy(self) -> Any:
        pages = np.zeros(self.shape.num_slots, np.int32)
        return self._build(decode.copy_pages, (self.cache, pages, pages), (CACHE, ROWS, ROWS), CACHE, donated=0)

    @property
    def _held(self) -> tuple[Any, Any, Any]:
        return self.base_shapes, self.resident, self.cache

    @property
    def _held_specs(self) -> tuple[Any, Any, Any]:
        return base_specs(list(self.base_shapes["layers"])), self._resident_specs, CACHE

    @property
    def _resident_specs(self) -> Any:
        specs = resident_specs(LAYER_MODULES, experts=self.config.experts is not None)
        return {**specs, "rank": Spec(), "scale": Spec()} if self.shape.native else specs

    @property
    def adapter_specs(self) -> Any:
        """Return how an adapter is divided that is to be put into a slot."""
        return adapter_specs(LAYER_MODULES, experts=self.config.experts is not None)

    @property
    def cache(self) -> decode.Cache:
        """Return the shapes of keys and values."""
        shapes = decode.cache_shapes(self.config, self.shape.num_shards * self.shape.pages_per_shard)
        return decode.Cache(*(_shape(shape, self.shape.dtype) for shape in shapes))

    @property
    def resident(self) -> adapters.Adapter:
        """Return the shapes of the rows of adapters. The kernels in C++ also need the rank class and scale of each."""
        one = adapters.shapes(self.config, self.shape.max_lora_rank)
        rows, dtype = self.shape.num_shards * self.shape.adapters_per_shard, self.shape.dtype
        pairs = jax.tree.map(lambda leaf: _shape((*leaf.shape[:-2], rows, *leaf.shape[-2:]), dtype), one)
        if not self.shape.native:
            return pairs
        return {**pairs, "rank": _shape((rows,), jnp.int32), "scale": _shape((rows,), jnp.float32)}

    def _build(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], into: Any, out: Any, donated: int | None = None
    ) -> Any:
        """Compile from shapes: the arrays need not exist, and the first call finds the program ready."""
        given_away = () if donated is None else (donated,)
        if self.layout is None:
            jitted = jax.jit(function, donate_argnums=given_away)
        else:
            divided = jax.shard_map(function, mesh=self.layout.devices, in_specs=into, out_specs=out, check_vma=False)
            jitted = jax.jit(divided, in_shardings=self.layout.placed_tree(into), donate_argnums=given_away)
        return compile_program(jitted, _shapes(arguments), on_cpu=self.shape.one_by_one)


def decode_arguments(slots: SlotInput, num_steps: int) -> tuple[decode.SlotState, RowParams, decode.Switches]:
    running = slots.left > 0
    truncated = ((slots.top_k > 0) | (slots.top_p < 1)) & running
    return (
        decode.SlotState(slots.tokens, slots.positions, slots.left, slots.stop_tokens, slots.tables, slots.adapters),
        RowParams(slots.seed_words, slots.sample_index, slots.temperature, slots.top_k, slots.top_p),
        decode.Switches(np.int32(num_steps), np.bool_(truncated.any()), np.bool_(slots.any_top)),
    )


def no_tiles(shape: SamplingShape, num_tiles: int) -> decode.TokenTiles:
    """Return arrays for `num_tiles` tiles of each shard, all padding."""
    count = shape.num_shards * num_tiles
    return decode.TokenTiles(
        np.full((count, TILE), -1, np.int32),
        np.full(count, -1, np.int32),
        np.zeros((count, shape.pages_per_sequence), np.int32),
        np.full(count, BASE_MODEL, np.int32),
    )


def _shape(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: _shape(leaf.shape, leaf.dtype), tree)
