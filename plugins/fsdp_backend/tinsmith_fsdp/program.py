"""The interface of the ranks, and what they and the engine send each other. No torch."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tinsmith import LoraConfig
from tinsmith_checkpoints.huggingface import DecoderShape
from tinsmith_fsdp.config import FsdpConfig
from tinsmith_workers import NotFinite, Scored, Segment, TrainingProgram, TrainingSetup, WorkersProgram


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
