"""The methods that the engine calls on the ranks. No torch."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence

from tinsmith import LoraConfig
from tinsmith_megatron.messages import Loaded, Setup
from tinsmith_workers import Answer, Segment, TrainingProgram, WorkersProgram


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
