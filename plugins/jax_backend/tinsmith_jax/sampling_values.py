"""What the sampler asks of its device, and what comes back: NumPy arrays in plain values."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tinsmith import Array, FloatArray, IntArray, TokenArray
from tinsmith_jax.decode import STOP_TABLE, pages_of
from tinsmith_jax.kernels.choice import Kernels
from tinsmith_jax.sampling_adapters import BASE_MODEL

WordArray = npt.NDArray[np.uint32]
ExpertsOfPages = Mapping[tuple[int, int], Array]
"""The experts [TILE, L, C] that computed what some pages hold, by shard and page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingShape:
    """The sizes for which the programs are compiled."""

    num_shards: int  # of slots, pages and adapters: each reads, draws and copies for its own
    slots_per_shard: int
    whole_per_shard: int  # sequences of the maximum context, each with an adapter of its own, for which there is memory
    one_by_one: bool  # compute what is done per sequence for one after the other, as suits a CPU
    max_context_tokens: int
    max_lora_rank: int
    max_steps: int  # decoding steps per dispatch
    max_top: int  # alternatives per token
    prefill_tiles: tuple[int, ...]  # of each shard, in ascending order
    dtype: str
    native: bool = False  # by the kernels in C++, in which a row costs the same in any company
    rounds: bool = False  # these kernels multiply in bfloat16
    triton: bool = False  # by Pallas kernels for GPUs
    interpret: bool = False  # run these as plain JAX, on any device: for tests
    kept_pages: int | None = None  # of each shard, that stay for what they hold when nobody uses them; None: all
    gathers_once: bool = False  # all weights for a decoding dispatch, instead of a layer's for each layer and step
    returns_experts: bool = False  # that compute each token

    @property
    def num_slots(self) -> int:
        """The slots of a shard follow each other."""
        return self.num_shards * self.slots_per_shard

    @property
    def pages_per_sequence(self) -> int:
        return pages_of(self.max_context_tokens)

    @property
    def pages_per_shard(self) -> int:
        """Page 0 is nobody's."""
        return 1 + self.whole_per_shard * self.pages_at_most(self.max_context_tokens)

    def pages_at_most(self, num_tokens: int) -> int:
        """Return the most pages that a sequence needs: its own, and one of its prompt to copy from."""
        return pages_of(num_tokens) + 1

    @property
    def adapters_per_shard(self) -> int:
        """At the end is a row that stays empty."""
        return self.whole_per_shard + 1

    @property
    def kernels(self) -> Kernels:
        return Kernels(
            equal_blocks=self.one_by_one,
            native=self.native,
            rounds=self.rounds,
            triton=self.triton,
            interpret=self.interpret,
        )

    @property
    def grows(self) -> bool:
        """Whether pages, and rows of adapters, take memory only once something has been put there. Of one shard."""
        return self.native

    def shard_of(self, slot: int) -> int:
        return slot // self.slots_per_shard


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTile:
    """At most TILE consecutive tokens of a prompt; `start` is a multiple of TILE."""

    shard: int
    start: int
    tokens: TokenArray
    pages: tuple[int, ...]  # of the prompt on the shard; this tile fills the last one
    adapter: int = BASE_MODEL  # the adapter's row on the shard


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCopy:
    shard: int
    source: int
    target: int


@dataclass(slots=True, kw_only=True)
class SlotInput:
    """The rows of a decode dispatch. Of each shard's rows, those in use come first; idle ones have `left` 0."""

    tokens: TokenArray
    positions: TokenArray
    left: TokenArray
    stop_tokens: TokenArray  # [B, STOP_TABLE], -1 = none
    tables: TokenArray  # [B, pages_per_sequence]: pages on the row's shard
    adapters: TokenArray  # rows on the shard, or BASE_MODEL
    seed_words: WordArray  # [B, 2]
    sample_index: WordArray
    temperature: FloatArray
    top_k: TokenArray
    top_p: FloatArray
    any_top: bool

    @classmethod
    def idle(cls, shape: SamplingShape) -> "SlotInput":
        num_slots = shape.num_slots

        def zeros() -> TokenArray:
            return np.zeros(num_slots, np.int32)

        return cls(
            tokens=zeros(),
            positions=zeros(),
            left=zeros(),
            stop_tokens=np.full((num_slots, STOP_TABLE), -1, np.int32),
            tables=np.zeros((num_slots, shape.pages_per_sequence), np.int32),
            adapters=np.full(num_slots, BASE_MODEL, np.int32),
            seed_words=np.zeros((num_slots, 2), np.uint32),
            sample_index=np.zeros(num_slots, np.uint32),
            temperature=np.ones(num_slots, np.float32),
            top_k=np.full(num_slots, -1, np.int32),
            top_p=np.ones(num_slots, np.float32),
            any_top=False,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """The tokens drawn by a decode dispatch of X steps; -1 if the slot was idle.

    Experts [L, C] are those of the tokens that were given, or drawn a step before: they have computed what is drawn.
    """

    tokens_XB: TokenArray
    logprobs_XB: FloatArray
    top_ids_XBK: IntArray | None
    top_logprobs_XBK: FloatArray | None
    experts_XBLC: Array | None
