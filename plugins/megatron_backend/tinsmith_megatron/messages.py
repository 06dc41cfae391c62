"""What the engine and the ranks send each other. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from tinsmith import LossSpec
from tinsmith_megatron.architecture import Architecture
from tinsmith_megatron.config import MegatronConfig
from tinsmith_megatron.parallel import Place


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
