"""The sampler's device state (cache, resident adapters) and the programs that work on it.

Takes and returns NumPy arrays. One thread calls it, and every dispatch takes a turn on the device. Shapes come from the
configuration alone, so the programs are few and all known at the start, whatever requests arrive.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from tinsmith import FloatArray, IntArray, TokenArray
from tinsmith_jax import adapters, decode
from tinsmith_jax.compilation import Program, Programs
from tinsmith_jax.config import JaxConfig
from tinsmith_jax.layers import TILE
from tinsmith_jax.model_config import ModelConfig
from tinsmith_jax.runtime import Limits
from tinsmith_jax.sampling_head import RowParams
from tinsmith_jax.turns import Turns
from tinsmith_jax.weights import Base

BoolArray = npt.NDArray[np.bool_]
WordArray = npt.NDArray[np.uint32]
# Any below: compiled programs and pytrees, which jax does not type.

_PREFILL_TILES = (2, 4, 8)
TARGET_COLUMNS = (1, 8, 64)
"""Targets per row of a scoring program; wider matrices are scored in slices."""


def prefill_sizes() -> tuple[int, ...]:
    """Return the numbers of tiles for which there is a prefill program.

    A CPU has only one, so that a prompt's bits do not depend on how many others are read with it: XLA:CPU compiles
    reductions over many tiles differently than over few. Never 1, which would turn batched products into plain ones.
    """
    return _PREFILL_TILES[:1] if jax.default_backend() == "cpu" else _PREFILL_TILES


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingShape:
    """The sizes for which the programs are compiled."""

    num_slots: int
    max_context_tokens: int
    max_lora_rank: int
    max_steps: int  # decoding steps per dispatch
    max_top: int  # alternatives per token
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTile:
    """At most TILE consecutive prompt tokens for a slot; `start` is a multiple of TILE."""

    slot: int
    start: int
    tokens: TokenArray
    adapted: bool  # use the adapter in the slot's row; else the base model


@dataclass(slots=True, kw_only=True)
class SlotInput:
    """The slots' inputs to a decode dispatch. Idle slots have `left` 0."""

    tokens: TokenArray
    positions: TokenArray
    left: TokenArray
    stop_tokens: TokenArray  # [B, STOP_TABLE], -1 = none
    adapted: BoolArray
    seed_words: WordArray  # [B, 2]
    sample_index: WordArray
    temperature: FloatArray
    top_k: TokenArray
    top_p: FloatArray
    any_top: bool

    @classmethod
    def idle(cls, num_slots: int) -> "SlotInput":
        def zeros() -> TokenArray:
            return np.zeros(num_slots, np.int32)

        return cls(
            tokens=zeros(),
            positions=zeros(),
            left=zeros(),
            stop_tokens=np.full((num_slots, decode.STOP_TABLE), -1, np.int32),
            adapted=np.zeros(num_slots, bool),
            seed_words=np.zeros((num_slots, 2), np.uint32),
            sample_index=np.zeros(num_slots, np.uint32),
            temperature=np.ones(num_slots, np.float32),
            top_k=np.full(num_slots, -1, np.int32),
            top_p=np.ones(num_slots, np.float32),
            any_top=False,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """The tokens drawn by a decode dispatch of X steps; -1 if the slot was idle."""

    tokens_XB: TokenArray
    logprobs_XB: FloatArray
    top_ids_XBK: IntArray | None
    top_logprobs_XBK: FloatArray | None


class SamplingDevice:
    """Owns the key-value cache and one adapter row per slot. Its arrays are donated, so nothing else may hold them."""

    def __init__(
        self, base: Base, config: ModelConfig, shape: SamplingShape, *, programs: Programs, turns: Turns
    ) -> None:
        self.shape = shape
        self._base, self._config = base, config
        self._programs, self._turns = programs, turns
        self.reset()

    def reset(self) -> None:
        """Start again with empty slots, because a failure may have lost the donated arrays."""
        shape = self.shape
        dtype = jnp.dtype(shape.dtype)
        self._cache = decode.empty_cache(
            self._config, num_slots=shape.num_slots, max_tokens=shape.max_context_tokens, dtype=dtype
        )
        self._resident = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self._resident_shapes(dtype))

    def put_adapter(self, adapter: adapters.Adapter) -> adapters.Adapter:
        """Copy a host adapter to the device."""
        return jax.device_put(adapter)

    def write_adapter(self, slot: int, adapter: adapters.Adapter, scale: float) -> None:
        """Write an adapter of any rank class to the slot's row."""
        write = self._program("write_adapter", adapter["head"][0].shape[-1])
        with self._turns.turn():
            self._resident = jax.block_until_ready(write(self._resident, adapter, np.int32(slot), np.float32(scale)))

    def prefill(self, tiles: Sequence[PromptTile]) -> FloatArray:
        """Read up to prefill_sizes()[-1] tiles into the cache. Returns their hidden states [N, TILE, H].

        If no program takes exactly that many, the last tile is repeated, which writes the same numbers again.
        """
        num_asked = len(tiles)
        size = next(size for size in prefill_sizes() if size >= num_asked)
        tiles = [*tiles, *[tiles[-1]] * (size - num_asked)]
        tokens_NT = np.zeros((size, TILE), np.int32)
        for row, tile in zip(tokens_NT, tiles, strict=True):
            row[: len(tile.tokens)] = tile.tokens
        packed = decode.TokenTiles(
            tokens_NT,
            np.array([tile.slot for tile in tiles], np.int32),
            np.array([tile.start for tile in tiles], np.int32),
            np.array([tile.adapted for tile in tiles], bool),
        )
        program = self._program("prefill", size)
        with self._turns.turn():
            self._cache, hidden = program(self._base, self._resident, self._cache, packed)
            return np.asarray(hidden)[:num_asked]

    def score(
        self, hidden_TH: FloatArray, tile: PromptTile, targets_TK: IntArray, *, want_top: bool
    ) -> tuple[FloatArray, IntArray, FloatArray]:
        """Score a tile's hidden states against targets (-1 = skip): logprobs [T, K], best tokens and logprobs."""
        slot, adapted = np.int32(tile.slot), np.bool_(tile.adapted)
        parts, top = [], None
        for first in range(0, targets_TK.shape[1], TARGET_COLUMNS[-1]):
            part = targets_TK[:, first : first + TARGET_COLUMNS[-1]]
            width = next(columns for columns in TARGET_COLUMNS if columns >= part.shape[1])
            padded = np.full((TILE, width), -1, np.int32)
            padded[: len(part), : part.shape[1]] = part
            program = self._program("score", width)
            with self._turns.turn():
                scored = jax.block_until_ready(
                    program(self._base, self._resident, hidden_TH, slot, adapted, padded, np.bool_(want_top))
                )
            parts.append(np.asarray(scored[0])[: len(part), : part.shape[1]])
            top = scored[1:] if top is None else top
        assert top is not None, "there is at least one column: the next token"
        return np.concatenate(parts, axis=1), np.asarray(top[0]), np.asarray(top[1])

    def copy_slot(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the keys and values of the first tokens from `source` to `target`."""
        blocks = -(-num_tokens // decode.KEY_BLOCK)
        program = self._program("copy")
        with self._turns.turn():
            copied = program(self._cache, np.int32(source), np.int32(target), np.int32(blocks))
            self._cache = jax.block_until_ready(copied)

    def decode(self, slots: SlotInput, num_steps: int) -> Drawn:
        """Draw up to `num_steps` tokens for each slot that has some left."""
        arguments = _decode_arguments(slots, min(num_steps, self.shape.max_steps))
        program = self._program("decode")
        with self._turns.turn():
            self._cache, steps = program(self._base, self._resident, self._cache, *arguments)
            made = int(steps.num_steps)
        return Drawn(
            tokens_XB=np.asarray(steps.tokens_XB)[:made],
            logprobs_XB=np.asarray(steps.logprobs_XB)[:made],
            top_ids_XBK=np.asarray(steps.top_ids_XBK)[:made] if slots.any_top else None,
            top_logprobs_XBK=np.asarray(steps.top_logprobs_XBK)[:made] if slots.any_top else None,
        )

    # Programs ---------------------------------------------------------------------------------------------------------

    def all_programs(self) -> list[Program]:
        """Every program that can be needed, likely ones first."""
        kinds: list[tuple[str, int]] = [
            ("decode", 0),
            *(("prefill", tiles) for tiles in prefill_sizes()),
            *(("write_adapter", rank) for rank in adapters.rank_classes(self.shape.max_lora_rank)),
            ("score", TARGET_COLUMNS[0]),
            ("copy", 0),
            *(("score", columns) for columns in TARGET_COLUMNS[1:]),
        ]
        return [self._named(kind, size) for kind, size in kinds]

    def _program(self, kind: str, size: int = 0) -> Any:
        return self._programs.get(self._named(kind, size))

    def _named(self, kind: str, size: int) -> Program:
        return Program(("sampling", kind, size), functools.partial(self._compile, kind, size))

    def _compile(self, kind: str, size: int) -> Any:
        """Compile from shapes alone: the arrays need not exist, and the first call finds the program ready."""
        num_slots, shape = self.shape.num_slots, self.shape
        idle = SlotInput.idle(num_slots)
        base, cache, resident = _shapes((self._base, self._cache, self._resident))
        scalar = np.int32(0)
        function: Callable[..., Any]
        match kind:
            case "decode":
                function = functools.partial(
                    decode.decode, self._config, max_steps=shape.max_steps, num_top=shape.max_top
                )
                return _build(function, base, resident, cache, *_decode_arguments(idle, shape.max_steps), donated=2)
            case "prefill":
                rows = np.zeros(size, np.int32)
                tiles = decode.TokenTiles(np.zeros((size, TILE), np.int32), rows, rows, np.zeros(size, bool))
                function = functools.partial(decode.prefill, self._config)
                return _build(function, base, resident, cache, tiles, donated=2)
            case "score":
                hidden_TH = _shape((TILE, self._config.hidden_size), shape.dtype)
                targets_TK = np.zeros((TILE, size), np.int32)
                function = functools.partial(decode.score_prompt, num_top=shape.max_top)
                return _build(function, base, resident, hidden_TH, scalar, np.False_, targets_TK, np.False_)
            case "write_adapter":
                adapter = adapters.shapes(self._config, size)
                return _build(decode.write_adapter, resident, adapter, scalar, np.float32(1), donated=0)
            case "copy":
                return _build(decode.copy_slot, cache, scalar, scalar, scalar, donated=0)
            case _:
                msg = f"no sampling program {kind!r}"
                raise AssertionError(msg)

    def _resident_shapes(self, dtype: jnp.dtype) -> adapters.Adapter:
        one = adapters.shapes(self._config, self.shape.max_lora_rank)
        num_slots = self.shape.num_slots
        return jax.tree.map(lambda leaf: _shape((*leaf.shape[:-2], num_slots, *leaf.shape[-2:]), dtype), one)


def sampling_device(
    config: JaxConfig, limits: Limits, model: ModelConfig, base: Base, *, programs: Programs, turns: Turns
) -> SamplingDevice:
    """Resolve the settings that are left open, and prepare the sampler's slots."""
    shape = SamplingShape(
        num_slots=config.decode_slots,
        max_context_tokens=limits.max_context_tokens,
        max_lora_rank=config.max_lora_rank,
        max_steps=config.decode_steps or (4 if limits.platform == "cpu" else 8),
        max_top=min(config.max_topk_logprobs, model.vocab_size),
        dtype=limits.dtype,
    )
    return SamplingDevice(base, model, shape, programs=programs, turns=turns)


def _decode_arguments(slots: SlotInput, num_steps: int) -> tuple[decode.SlotState, RowParams, decode.Switches]:
    running = slots.left > 0
    truncated = ((slots.top_k > 0) | (slots.top_p < 1)) & running
    return (
        decode.SlotState(slots.tokens, slots.positions, slots.left, slots.stop_tokens, slots.adapted),
        RowParams(slots.seed_words, slots.sample_index, slots.temperature, slots.top_k, slots.top_p),
        decode.Switches(np.int32(num_steps), np.bool_(truncated.any()), np.bool_(slots.any_top)),
    )


def _shape(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: _shape(leaf.shape, leaf.dtype), tree)


def _build(function: Callable[..., Any], *arguments: Any, donated: int | None = None) -> Any:
    return jax.jit(function, donate_argnums=() if donated is None else donated).lower(*arguments).compile()
