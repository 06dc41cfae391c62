"""Messages between the engine and the ranks. No torch."""

from dataclasses import dataclass

from tinsmith_megatron.architecture import Architecture
from tinsmith_megatron.config import MegatronConfig
from tinsmith_megatron.parallel import Coordinates
from tinsmith_workers import TrainingSetup


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup(TrainingSetup[MegatronConfig, Architecture]):
    """A rank's settings at its start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A rank's report after loading the model."""

    coordinates: Coordinates
    parameter_bytes: int
    read_bytes: int  # from weight files
