"""The values between the sampler, its device and compiled programs. No jax.

Suffixes: B = rows of decoding, N = tiles, T = tokens of a tile, L = layers, P = pages, C = positions of a page,
G = pages of a sequence, J = heads of keys and values, D = head dim, X = decode steps or table entries, K = alternatives
per token.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tinsmith import Array, FloatArray, IntArray, TokenArray
from tinsmith_checkpoints.huggingface import DeltaRule, Mamba
from tinsmith_jax.jax_types import Jax
from tinsmith_jax.kernels.choice import Kernels
from tinsmith_jax.model_config import ModelConfig
from tinsmith_jax.tiles import TILE

PAGE: Final = TILE
"""Positions of a page of the cache: a full tile of a prompt fills one."""
STOP_TABLE: Final = 8
"""Stop tokens per slot that the device checks. The host checks all of them; the table only avoids wasted steps."""
BASE_MODEL: Final = -1
"""In the place of an adapter's row."""
NO_STATE: Final = -1
"""In the place of a row of recurrent states: a sequence begins."""

WordArray = npt.NDArray[np.uint32]
ExpertsOfPages = Mapping[tuple[int, int], Array]
"""The experts [TILE, L, C] that computed what some pages hold, by shard and page."""


def pages_of(num_tokens: int) -> int:
    return -(-num_tokens // PAGE)


def cache_shapes(config: ModelConfig, num_pages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return [L, P, J, D, C] of keys and [L, P, J, C, D] of values.

    Of attention by latents, keys are the latents with the rotated parts, as of one head, and values take no room: they
    are the latents.
    """
    latent, layers = config.attention.latent, config.attending_layers
    if latent is not None:
        return (layers, num_pages, 1, latent.cached_dim, PAGE), (layers, num_pages, 1, PAGE, 0)
    pages = (layers, num_pages, config.num_kv_heads)
    return (*pages, config.head_dim, PAGE), (*pages, PAGE, config.head_dim)


def page_bytes(config: ModelConfig) -> int:
    """Return what a page takes in float32."""
    return sum(4 * math.prod(shape) for shape in cache_shapes(config, 1))


def state_shapes(rule: DeltaRule | Mamba, num_layers: int, num_rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return [M, S, heads, dk, dv] of recurrent states, and [M, S, w - 1, channels] of a convolution's last inputs.

    M = layers with the rule, S = rows.
    """
    rows = (num_layers, num_rows)
    return (*rows, rule.value_heads, rule.key_dim, rule.value_dim), (*rows, rule.width - 1, rule.mixed_size)


def experts_of_token(config: ModelConfig) -> tuple[int, int]:
    """Return L and C: how many experts compute a token in how many layers."""
    assert config.experts is not None, "only models with experts return them"
    return config.expert_layers, config.experts.top_k


def expert_dtype(config: ModelConfig) -> Jax:
    """Return the smallest dtype that holds an expert's number."""
    assert config.experts is not None, "only models with experts return them"
    return np.min_scalar_type(config.experts.num_experts - 1)


MAX_PROMPT_DRAWS: Final = 64
"""Tokens that may be drawn in place of one of the prompt."""
NOT_DRAWN: Final = -1.0
"""In place of a temperature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDraws:
    """Tokens to draw for the rows of a tile: a random number in [0, 1) for each."""

    uniform_TD: FloatArray  # float32, at most MAX_PROMPT_DRAWS wide
    temperature: float  # 0 = greedy


class PromptFound(NamedTuple):
    """What a tile of a prompt yields, for each of its rows. What was not asked for is zeros."""

    logprobs: FloatArray  # of the targets [T, K]
    top_ids: IntArray
    top_logprobs: FloatArray
    drawn: IntArray  # [T, MAX_PROMPT_DRAWS]
    drawn_logprobs: FloatArray


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
    kept_pages: int | None = None  # of each shard, that keep their content when unused; None: all
    gathers_once: bool = False  # all weights for a decoding dispatch, instead of a layer's for each layer and step
    returns_experts: bool = False  # that compute each token
    recurrent: bool = False  # some layers have a state of each sequence: who goes on from pages needs theirs

    @property
    def num_slots(self) -> int:
        """The slots of a shard follow each other."""
        return self.num_shards * self.slots_per_shard

    @property
    def pages_per_sequence(self) -> int:
        return pages_of(self.max_context_tokens)

    @property
    def pages_per_shard(self) -> int:
        """Page 0 has no owner."""
        return 1 + self.whole_per_shard * self.pages_at_most(self.max_context_tokens)

    def pages_at_most(self, num_tokens: int) -> int:
        """Return the most pages that a sequence needs: its own, and one of its prompt to copy from."""
        return pages_of(num_tokens) + 1

    @property
    def states_per_shard(self) -> int:
        """Rows of recurrent states: one that nobody reads, one for each prompt, two for each slot, and kept ones."""
        return self.first_kept_state + self.slots_per_shard

    @property
    def first_kept_state(self) -> int:
        """The first row whose state is kept, at the end of a page, for prompts that begin alike."""
        return 1 + 3 * self.slots_per_shard

    def states_of(self, slot: int) -> tuple[int, int]:
        """Return a slot's two rows on its shard, which its dispatches write in turn: one that failed has lost nothing.

        The prompts' rows come before them.
        """
        first = 1 + self.slots_per_shard + 2 * (slot % self.slots_per_shard)
        return first, first + 1

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
        """True if pages, and rows of adapters, take memory only when they are written. Of one shard."""
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
    states: tuple[int, int] = (0, 0)  # rows of recurrent states, to read and to write; NO_STATE at the beginning


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
    states: TokenArray  # [B, 2]: rows of recurrent states, to read first and to write; NO_STATE before the first token
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
            states=np.zeros((num_slots, 2), np.int32),
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


# Of compiled programs: jax or NumPy arrays, and pytrees of them -------------------------------------------------------


class Weights(NamedTuple):
    """The weights of programs."""

    base: Jax  # weights.py describes it
    resident: Jax  # the rows of adapters; adapters.py describes one


class Cache(NamedTuple):
    """Keys (rotated) and values. Page 0 stands for pages that are not there: what is written to it is never read."""

    k_LPJDC: Jax
    v_LPJCD: Jax
    states: "States | None" = None  # of models with a recurrence

    @property
    def pages(self) -> tuple[Jax, Jax]:
        return self.k_LPJDC, self.v_LPJCD


class States(NamedTuple):
    """Where sequences are in the layers with a recurrence; see `state_shapes`. Row 0 is never read."""

    rule: Jax  # float32
    tail: Jax  # the last inputs of the convolution


class TokenTiles(NamedTuple):
    """Runs of consecutive tokens, each of one sequence. The last tiles may be padding."""

    tokens_NT: Jax  # -1 past the end of a prompt
    start_N: Jax  # position of a tile's first token, in padding -1
    table_NG: Jax  # the pages of its sequence, in order; a tile of a prompt fills one
    adapter_N: Jax  # row of its adapter, or BASE_MODEL
    state_N2: Jax  # rows of recurrent states, to read and to write; later tiles read what earlier ones have written


class SlotState(NamedTuple):
    """The state of each row. All arrays are [B] except the tables. Rows in use come first."""

    token_B: Jax  # the latest token, not yet in the cache
    position_B: Jax  # its position
    left_B: Jax  # tokens still to draw; 0 = idle
    stop_BX: Jax  # STOP_TABLE stop tokens, padded with -1
    table_BG: Jax  # the pages of its sequence
    adapter_B: Jax  # row of its adapter, or BASE_MODEL
    state_B2: Jax  # rows of recurrent states, to read and to write


class RowParams(NamedTuple):
    """The sampling parameters of each row. All arrays are [B] except `seed_words_B2`, the seed's two 32-bit halves."""

    seed_words_B2: Jax  # uint32, high word first
    sample_index_B: Jax  # uint32: the sample's index among the request's num_samples
    temperature_B: Jax  # 0 = greedy
    top_k_B: Jax  # int32; values below 1 = off
    top_p_B: Jax  # 1 = off


class Switches(NamedTuple):
    """Run-time switches for the needs of a dispatch's slots. They do not trigger a compilation."""

    num_steps: Jax
    any_truncated: Jax
    any_top: Jax


class Dispatch(NamedTuple):
    """The inputs of a decoding dispatch."""

    state: SlotState
    params: RowParams
    switches: Switches


class Steps(NamedTuple):
    """The tokens drawn by a dispatch of at most X steps. Steps past `num_steps` are meaningless."""

    num_steps: Jax
    tokens_XB: Jax  # -1 where the slot was idle
    logprobs_XB: Jax
    top_ids_XBK: Jax
    top_logprobs_XBK: Jax
    experts_XBLC: Jax | None  # that computed the token before the drawn one; None if nobody asks


# The seam between the sampler and its device --------------------------------------------------------------------------


class SamplerDevice(Protocol):
    """The device interface of the sampler, in this process or in workers: sampling_device.py documents it."""

    shape: SamplingShape

    def reset(self) -> None: ...

    def is_intact(self) -> bool: ...

    def put_adapter(self, adapter: Jax) -> Jax: ...

    def write_adapter(self, row: int, adapter: Jax, scale: float) -> None: ...

    def prefill(self, tiles: Sequence[PromptTile]) -> ExpertsOfPages | None: ...

    def score(
        self, tile: PromptTile, targets_TK: IntArray, *, want_top: bool, draws: PromptDraws | None
    ) -> PromptFound: ...

    def copy_pages(self, copies: Sequence[PageCopy]) -> None: ...

    def decode(self, slots: SlotInput, num_steps: int) -> Drawn: ...

    def give_back(self, pages: Sequence[int], rows: Sequence[int]) -> None: ...
