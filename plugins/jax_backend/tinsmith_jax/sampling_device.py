"""The sampler's device state: the pages of the key-value cache, and the rows of adapters.

Takes and returns NumPy arrays. One thread calls it, and every dispatch holds the lock of the device.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import jax
import numpy as np

from tinsmith import IntArray
from tinsmith.machine import FairLock
from tinsmith_jax import adapters
from tinsmith_jax.admission import Budget
from tinsmith_jax.compilation import Program, Programs
from tinsmith_jax.config import JaxConfig
from tinsmith_jax.jax_types import Jax
from tinsmith_jax.kernels import paged
from tinsmith_jax.memory import out_of_memory_named
from tinsmith_jax.mesh import MeshLayout, put
from tinsmith_jax.model_config import ModelConfig
from tinsmith_jax.runtime import Limits
from tinsmith_jax.sampling_programs import TARGET_COLUMNS, Kind, SamplingPrograms, dispatch_of, no_tiles
from tinsmith_jax.sampling_values import (
    MAX_PROMPT_DRAWS,
    NOT_DRAWN,
    Drawn,
    ExpertsOfPages,
    PageCopy,
    PromptDraws,
    PromptFound,
    PromptTile,
    SamplingShape,
    SlotInput,
    TokenTiles,
    Weights,
    page_bytes,
    pages_of,
)
from tinsmith_jax.tiles import TILE
from tinsmith_jax.weights import Base

_KEPT_BYTES: Final = 1 << 29  # that pages may take for prefixes which nobody uses, or as much as the longest sequence


class SamplingDevice:
    """Owns the cache and the resident adapters. Its arrays are donated, so nothing else may hold them."""

    def __init__(
        self, base: Base, sampling_programs: SamplingPrograms, *, programs: Programs, device_lock: FairLock
    ) -> None:
        self.shape = sampling_programs.shape
        self._base, self._sampling = base, sampling_programs
        self._programs, self._device_lock = programs, device_lock
        self.config = sampling_programs.config
        self.reset()

    def reset(self) -> None:
        """Start again with nothing read, because a failure may have lost the donated arrays."""
        self.cache, self.resident = self._sampling.empty()
        self._hidden: dict[tuple[int, int], jax.Array] = {}  # of the tiles read last, by shard and page

    def is_intact(self) -> bool:
        """Return whether a call that failed has left the cache and the adapters as they were before it."""
        return not any(array.is_deleted() for array in jax.tree.leaves((self.cache, self.resident)))

    def put_adapter(self, adapter: adapters.Adapter) -> adapters.Adapter:
        """Put one of `adapters.from_canonical` onto the device, or divided onto the mesh. Raise OutOfMemoryError."""
        specs = self._sampling.adapter_specs
        with out_of_memory_named("the adapter of a snapshot", "lower the model's resident_snapshots"):
            return jax.block_until_ready(put(adapters.transposed(adapter), self._sampling.layout, specs))

    def write_adapter(self, row: int, adapter: adapters.Adapter, scale: float) -> None:
        """Write an adapter of any rank class to a row, counted over all shards."""
        write = self._program("write_adapter", adapter["head"][0].shape[-1])
        with self._device_lock:
            self.resident = jax.block_until_ready(write(self.resident, adapter, np.int32(row), np.float32(scale)))

    def prefill(self, tiles: Sequence[PromptTile]) -> ExpertsOfPages | None:
        """Read tiles into the cache, at most shape.prefill_tiles[-1] of each shard. They can be scored afterwards.

        Every shard gets as many tiles. Those that it does not need are padding, which is computed and written nowhere.
        Return the experts of each tile if the sampler is to return them. Past a tile's tokens they mean nothing.
        """
        shape = self.shape
        of_shards: list[list[PromptTile]] = [[] for _ in range(shape.num_shards)]
        for tile in tiles:
            of_shards[tile.shard].append(tile)
        num_tiles = next(size for size in shape.prefill_tiles if size >= max(map(len, of_shards)))
        program = self._program("prefill", num_tiles)
        packed = _pack(of_shards, num_tiles, shape)
        with self._device_lock:
            read = program(self._weights, self.cache, packed)
            self.cache, hidden, experts = jax.block_until_ready(read)
        self._hidden = {
            (tile.shard, tile.pages[-1]): hidden[number] for shard in of_shards for number, tile in enumerate(shard)
        }
        if experts is None:
            return None
        experts_SNTLC = np.asarray(experts).reshape(shape.num_shards, num_tiles, TILE, *experts.shape[1:])
        return {
            (tile.shard, tile.pages[-1]): experts_SNTLC[tile.shard, number]
            for shard in of_shards
            for number, tile in enumerate(shard)
        }

    def score(
        self, tile: PromptTile, targets_TK: IntArray, *, want_top: bool, draws: PromptDraws | None
    ) -> PromptFound:
        """Score one of the tiles read last against targets (-1 = skip), and draw tokens for its rows."""
        hidden_TH = self._hidden[tile.shard, tile.pages[-1]]
        owner = np.array([tile.shard, tile.adapter], np.int32)
        program = self._program("score")
        uniform, temperature = np.zeros((TILE, MAX_PROMPT_DRAWS), np.float32), NOT_DRAWN
        if draws is not None:
            rows, columns = draws.uniform_TD.shape
            uniform[:rows, :columns], temperature = draws.uniform_TD, draws.temperature
        parts, others = [], None
        for first in range(0, targets_TK.shape[1], TARGET_COLUMNS):
            part = targets_TK[:, first : first + TARGET_COLUMNS]
            padded = np.full((TILE, TARGET_COLUMNS), -1, np.int32)
            padded[: len(part), : part.shape[1]] = part
            with self._device_lock:
                asked = (padded, uniform, np.float32(temperature), np.bool_(want_top))
                scored = jax.block_until_ready(program(self._weights, hidden_TH, owner, *asked))
            parts.append(np.asarray(scored[0])[: len(part), : part.shape[1]])
            others = scored[1:] if others is None else others
        assert others is not None, "there is at least one column: the next token"
        return PromptFound(np.concatenate(parts, axis=1), *map(np.asarray, others))

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages, at most as many as slots of each shard."""
        size = self.shape.slots_per_shard
        source, target = np.zeros((2, self.shape.num_slots), np.int32)
        used = [0] * self.shape.num_shards
        for copy in copies:
            number = copy.shard * size + used[copy.shard]
            source[number], target[number] = copy.source, copy.target
            used[copy.shard] += 1
        program = self._program("copy")
        with self._device_lock:
            self.cache = jax.block_until_ready(program(self.cache, source, target))

    def decode(self, slots: SlotInput, num_steps: int) -> Drawn:
        """Draw up to `num_steps` tokens for each row that has some left."""
        dispatch = dispatch_of(slots, min(num_steps, self.shape.max_steps))
        program = self._program("decode")
        with self._device_lock:
            drawn = program(self._weights, self.cache, dispatch)
            self.cache, steps = jax.block_until_ready(drawn)
            made = int(steps.num_steps)
        return Drawn(
            tokens_XB=np.asarray(steps.tokens_XB)[:made],
            logprobs_XB=np.asarray(steps.logprobs_XB)[:made],
            top_ids_XBK=np.asarray(steps.top_ids_XBK)[:made] if slots.any_top else None,
            top_logprobs_XBK=np.asarray(steps.top_logprobs_XBK)[:made] if slots.any_top else None,
            experts_XBLC=None if steps.experts_XBLC is None else np.asarray(steps.experts_XBLC)[:made],
        )

    def give_back(self, pages: Sequence[int], rows: Sequence[int]) -> None:
        """Return to the system what pages and rows of adapters take that nobody uses. They then hold anything.

        Only where they take memory again once something is put there; see SamplingShape.grows.
        """
        with self._device_lock:
            self._sampling.how.give_back(self.cache, self.resident, pages, rows)

    def all_programs(self) -> list[Program]:
        return self._sampling.all()

    @property
    def _weights(self) -> Weights:
        return Weights(self._base, self.resident)

    def _program(self, kind: Kind, size: int = 0) -> Jax:
        return self._programs.get(self._sampling.named(kind, size))


def sampling_device(
    budget: Budget,
    limits: Limits,
    model: ModelConfig,
    base: Base,
    layout: MeshLayout | None,
    *,
    programs: Programs,
    device_lock: FairLock,
    routing_replay: bool = False,
) -> SamplingDevice:
    """Prepare the sampler's slots. With `routing_replay`, samples come with their experts if the model has any."""
    num_shards = 1 if layout is None else layout.axes.num_streams
    shape = replace(
        sampling_shape(budget.config, limits, model, num_shards=num_shards),
        slots_per_shard=budget.drawn,
        whole_per_shard=budget.slots,
        native=limits.native,
        rounds=limits.native and limits.dtype == "bfloat16",
        kept_pages=_kept_pages(limits, model) if limits.native else None,
        returns_experts=routing_replay and model.experts is not None,
        recurrent=model.recurrence is not None,
        gathers_once=budget.gathers_once,
    )
    sampling_programs = SamplingPrograms(config=model, shape=shape, base_shapes=base, layout=layout)
    return SamplingDevice(base, sampling_programs, programs=programs, device_lock=device_lock)


def _kept_pages(limits: Limits, model: ModelConfig) -> int:
    return max(pages_of(limits.max_context_tokens), _KEPT_BYTES // page_bytes(model))


def sampling_shape(config: JaxConfig, limits: Limits, model: ModelConfig, *, num_shards: int) -> SamplingShape:
    """Resolve the settings that are left open.

    On a CPU, a prompt's bits do not depend on how many tiles are read at a time: products of 64 rows and of more are
    alike, and all else is done tile by tile. Not so with experts, whose rows are sorted, nor with recurrences,
    for which XLA compiles the programs of one tile and of two differently: there, one size serves all.
    """
    on_cpu = limits.platform == "cpu"
    plain = model.attention.latent is None and model.head_dim in paged.HEAD_SIZES
    triton = limits.kernels.attention == "flash" and plain
    on_cpu_tiles = (1, 2) if model.experts is None and model.recurrence is None else (2,)
    return SamplingShape(
        num_shards=num_shards,
        slots_per_shard=config.decode_slots,
        whole_per_shard=config.decode_slots,
        one_by_one=on_cpu,
        max_context_tokens=limits.max_context_tokens,
        max_lora_rank=config.max_lora_rank,
        max_steps=config.decode_steps or (4 if on_cpu else 8),
        max_top=min(config.max_topk_logprobs, model.vocab_size),
        prefill_tiles=on_cpu_tiles if on_cpu else ((2, 8, 32) if triton else (2, 4, 8)),
        dtype=limits.value_dtype,
        triton=triton,
    )


def _pack(of_shards: Sequence[Sequence[PromptTile]], num_tiles: int, shape: SamplingShape) -> TokenTiles:
    """Lay out the shards' tiles one after the other, each followed by its padding."""
    packed = no_tiles(shape, num_tiles)
    for shard, tiles in enumerate(of_shards):
        for n, tile in enumerate(tiles, shard * num_tiles):
            packed.tokens_NT[n, : len(tile.tokens)] = tile.tokens
            packed.start_N[n] = tile.start
            packed.table_NG[n, : len(tile.pages)] = tile.pages
            packed.adapter_N[n] = tile.adapter
            packed.state_N2[n] = tile.states
    return packed
