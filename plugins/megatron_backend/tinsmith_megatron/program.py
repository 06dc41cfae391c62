"""The methods that the engine calls on the ranks, and their messages. No torch."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tinsmith import LoraConfig
from tinsmith_megatron.architecture import Architecture
from tinsmith_megatron.config import MegatronConfig
from tinsmith_megatron.parallel import Coordinates
from tinsmith_workers import Answer, Segment, TrainingProgram, TrainingSetup, WorkersProgram


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup(TrainingSetup[MegatronConfig, Architecture]):
    """A rank's settings at its start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A rank's report after loading the model."""

    coordinates: Coordinates
    parameter_bytes: int
    read_bytes: int  # from weight files


class Training(TrainingProgram):
    """A rank's methods once it has loaded the model."""

    @abstractmethod
    def create_model(self, model_id: str, lora: LoraConfig) -> None: ...

    @abstractmethod
    def create_full_model(self, model_id: str) -> Mapping[str, tuple[int, ...]]:
        """Read the weights into a stage of their own. Return the shapes of the tensors that this rank writes."""

    @abstractmethod
    def run(
        self,
        micros: Sequence[Sequence[Segment]],
        models: Sequence[Sequence[str]],
        backward: bool,  # noqa: FBT001  (over the wire)
    ) -> list[Answer]:
        """Score this rank's segments by micro-batch, and add to the pending gradients.

        models: of each micro-batch, the owners of all ranks' segments, by data-parallel rank.
        """


class Program(WorkersProgram[Setup, Loaded], Training):
    """All of it."""
