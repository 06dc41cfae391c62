"""What the engine asks of the ranks. No torch."""

from abc import abstractmethod
from collections.abc import Sequence

from tinsmith import LoraConfig
from tinsmith.workers import LoadingProgram, NotFinite, Scored, Segment, SleepableProgram
from tinsmith_fsdp.messages import FullyLoaded, Loaded, NoMemory, NotMade, Owner, Setup


class Training(SleepableProgram):
    """What a rank does once it has loaded the model."""

    @abstractmethod
    def create_model(self, model_id: str, lora: LoraConfig) -> NotMade | None: ...

    @abstractmethod
    def create_full_model(self, model_id: str) -> FullyLoaded | NotMade:
        """Read the weights again, into separate shards. Adapters keep using the frozen base model."""

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
    def run_full(
        self,
        model_id: str,
        micros: Sequence[Sequence[Segment]],
        backward: bool,  # noqa: FBT001  (over the wire)
    ) -> list[Scored | NotFinite]:
        """Score this rank's segments of one operation of a fully trained model."""


class Program(LoadingProgram[Setup, Loaded], Training):
    """All of it."""
