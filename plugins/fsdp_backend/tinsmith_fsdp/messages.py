"""What the engine and the ranks say to each other. Pickled over a socket that only they can open. No torch.

Array suffixes: T = tokens of one sequence, K = targets per token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tinsmith import AdamParams, Array, FloatArray, LoraConfig, LossSpec
from tinsmith.huggingface import DecoderShape
from tinsmith_fsdp.config import FsdpConfig

Kind = Literal["weights", "adam_m", "adam_v", "gradients"]
"""The tensors of a model's training state, as ModelState names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first word of a rank."""

    rank: int
    world_size: int
    pid: int
    device_type: str
    device_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Everything that a rank builds itself from; defaults are decided."""

    config: FsdpConfig
    architecture: DecoderShape
    model_path: str
    losses: Mapping[str, LossSpec]
    dtype: str
    strict: bool  # each sequence by itself
    checkpointing: bool
    compile: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a rank holds once the model is there."""

    rank: int
    meta_only: bool  # no parameter had memory before the model was divided
    parameter_bytes: int  # of its own shards
    total_bytes: int  # of the whole model
    read_bytes: int  # from weight files


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which part of a tensor of the model lies on a rank."""

    name: str  # canonical
    shape: tuple[int, ...]  # of the whole
    rows: tuple[int, int]
    columns: tuple[int, int] | None  # None: all


@dataclass(frozen=True, slots=True, kw_only=True)
class FullyLoaded:
    """What a rank holds of a copy of the model whose own weights are trained."""

    loaded: Loaded
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NotMade:
    """Why a rank could not make its part of a model. Nothing of it is left there, and everything else is as it was."""

    message: str
    out_of_memory: bool  # else the model's files are at fault


@dataclass(frozen=True, slots=True, kw_only=True)
class FullState:
    """What there is of a fully trained model besides its weights."""

    step: int
    moments: bool
    pending: bool  # a gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some rows of what a rank holds of one tensor."""

    kind: Kind
    name: str
    start: int  # row
    columns: tuple[int, int] | None
    values: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One sequence of one micro-batch, and where its results belong."""

    model_id: str
    index: int  # among the sequences of the call
    position: int  # among those of the micro-batch, over all ranks: the order in which gradients are added
    tokens_T: Array
    targets_TK: Array
    loss_fn: str
    loss_inputs: Mapping[str, Array]  # [T, K] each
    loss_config: Mapping[str, float]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens_T)


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who computes a sequence of a micro-batch, and whose it is."""

    model_id: str
    dp_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A segment's results."""

    index: int
    logp_TK: FloatArray
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One model's optimizer step."""

    model_id: str
    adam: AdamParams


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterState:
    """A LoRA model's training state as flat vectors; None: zeros that were never touched."""

    lora: LoraConfig
    weights: FloatArray
    adam_m: FloatArray | None
    adam_v: FloatArray | None
    gradients: FloatArray | None
    step: int


@dataclass(frozen=True, slots=True)
class Call:
    """A method of the rank's trainer, by name. Any: its arguments."""

    method: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """What the method returned. Any: depends on it."""

    value: Any


@dataclass(frozen=True, slots=True)
class Part:
    """One item of an answer that comes in pieces."""

    value: Any


@dataclass(frozen=True, slots=True)
class ProgressMade:
    stage: str
    fraction: float | None


@dataclass(frozen=True, slots=True)
class RankFailed:
    """The last word of a rank. `config` marks an error of the configuration rather than of the program."""

    message: str
    config: bool = False
