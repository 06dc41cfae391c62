"""Messages between the engine and the ranks. No torch."""

from dataclasses import dataclass

from tinsmith_checkpoints.huggingface import DecoderShape
from tinsmith_fsdp.config import FsdpConfig
from tinsmith_workers import TrainingSetup


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup(TrainingSetup[FsdpConfig, DecoderShape]):
    """The settings of a rank."""

    prefetch: bool  # gather the next layer before one of the forward pass is started
    compile: bool
    probes: str | None = None  # the directory that keeps what probes of classes found; None: nothing is kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A rank's memory after loading the model."""

    rank: int
    meta_only: bool  # no parameter was allocated before the model was sharded
    parameter_bytes: int  # of its own shards
    total_bytes: int  # of the whole model
    read_bytes: int  # from weight files


@dataclass(frozen=True, slots=True, kw_only=True)
class NotMade:
    """Why a rank could not create its part of a model. Nothing of the part remains; everything else is unchanged."""

    message: str
    out_of_memory: bool  # else the model's files are at fault


@dataclass(frozen=True, slots=True, kw_only=True)
class NoMemory:
    """A rank had too little memory for a pass. Nothing has changed on any."""

    message: str  # empty: it was another rank
    micro_batch: int  # that in which it was noticed


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The rank that computes a sequence of a micro-batch, and the model that the sequence trains."""

    model_id: str
    dp_rank: int
