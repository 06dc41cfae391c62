"""What the engine and the ranks send each other. No torch."""

from dataclasses import dataclass

from tinsmith_megatron.architecture import Architecture
from tinsmith_megatron.config import MegatronConfig
from tinsmith_megatron.parallel import Coordinates
from tinsmith_workers import TrainingSetup


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup(TrainingSetup[MegatronConfig, Architecture]):
    """What a rank needs to start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a rank holds after loading the model."""

    coordinates: Coordinates
    parameter_bytes: int
    read_bytes: int  # from weight files
