"""What the sampler asks of its device, and what comes back: NumPy arrays in plain values."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tinsmith import FloatArray, IntArray, TokenArray
from tinsmith_jax.decode import STOP_TABLE

BoolArray = npt.NDArray[np.bool_]
WordArray = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingShape:
    """The sizes for which the programs are compiled."""

    num_shards: int  # of the slots: each reads, draws and copies for its own
    slots_per_shard: int
    max_context_tokens: int
    max_lora_rank: int
    max_steps: int  # decoding steps per dispatch
    max_top: int  # alternatives per token
    prefill_tiles: tuple[int, ...]  # of each shard, in ascending order
    dtype: str

    @property
    def num_slots(self) -> int:
        """The slots of a shard follow each other."""
        return self.num_shards * self.slots_per_shard

    def shard_of(self, slot: int) -> int:
        return slot // self.slots_per_shard


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
            stop_tokens=np.full((num_slots, STOP_TABLE), -1, np.int32),
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
