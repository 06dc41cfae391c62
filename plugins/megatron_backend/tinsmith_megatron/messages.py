"""What the engine and the ranks send each other. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from tinsmith import AdamParams, FloatArray, LossSpec
from tinsmith_megatron.architecture import Architecture
from tinsmith_megatron.config import MegatronConfig
from tinsmith_megatron.parallel import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDevice:
    """The device of a rank, as torch names it."""

    type: str
    name: str
    memory_bytes: int | None = None  # None: a CPU, which shares the machine's memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Everything a rank needs to start, with all defaults resolved."""

    config: MegatronConfig
    architecture: Architecture
    model_path: str
    losses: Mapping[str, LossSpec]
    dtype: str
    strict: bool  # compute each sequence by itself
    checkpointing: bool  # recompute activations
    memory_share: float | None = None  # of the device's memory, all that the allocator may take; None: all


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a rank holds after loading the model."""

    place: Place
    parameter_bytes: int
    read_bytes: int  # from weight files


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One model's optimizer step."""

    model_id: str
    adam: AdamParams


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterState:
    """One part of a model's training state as flat vectors. None: never set, so zero."""

    weights: FloatArray
    adam_m: FloatArray | None
    adam_v: FloatArray | None
    gradients: FloatArray | None
    step: int
