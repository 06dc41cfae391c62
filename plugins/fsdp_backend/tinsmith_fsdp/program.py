"""The interface of the ranks. No torch."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence

from tinsmith import LoraConfig
from tinsmith_fsdp.messages import Loaded, NoMemory, NotMade, Owner, Setup
from tinsmith_workers import NotFinite, Scored, Segment, TrainingProgram, WorkersProgram


class Training(TrainingProgram):
    """The methods of a rank that has loaded the model."""

    @abstractmethod
    def create_model(self, model_id: str, lora: LoraConfig) -> NotMade | None: ...

    @abstractmethod
    def create_full_model(self, model_id: str) -> Mapping[str, tuple[int, ...]] | NotMade:
        """Read the weights again, into separate shards. Adapters keep using the frozen base model.

        Return the shapes of all tensors.
        """

    @abstractmethod
    def run(
        self,
        micros: Sequence[Sequence[Segment]],
        owners: Sequence[Sequence[Owner]],
        backward: bool,  # noqa: FBT001  (over the wire)
        keeps: bool,  # noqa: FBT001  (as above)
    ) -> list[Scored | NotFinite] | NoMemory:
        """Score this rank's segments by micro-batch. `owners` lists the owners of all sequences of each micro-batch.

        keeps: do not recompute activations in this pass. If any rank runs out of memory, nothing has changed on any.
        """

    @abstractmethod
    def sleep(self) -> None: ...

    @abstractmethod
    def wake(self) -> None: ...


class Program(WorkersProgram[Setup, Loaded], Training):
    """All of it."""
