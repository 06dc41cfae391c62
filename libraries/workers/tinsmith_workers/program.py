"""The interface of workers that train, and its values. A worker's program implements it.

The engine names methods as Python does: `group.call(TrainingProgram.unload_model, model_id)`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from tinsmith.backend import Placement
from tinsmith.losses import LossSpec
from tinsmith.operations import AdamParams, FloatArray
from tinsmith_checkpoints.huggingface.state_files import Targets
from tinsmith_workers.sequences import Answer, Segment
from tinsmith_workers.state_writer import Written

Config = TypeVar("Config")
Architecture = TypeVar("Architecture")
Setup_contra = TypeVar("Setup_contra", contravariant=True)
Loaded_co = TypeVar("Loaded_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDevice:
    """The device of a worker, as its framework names it."""

    type: str
    name: str
    memory_bytes: int | None = None  # None: a CPU, which shares the machine's memory

    def usable_bytes(self, placement: Placement) -> int | None:
        """Return the memory that a worker may use: as placed by the server, or all but what the driver needs."""
        if placement.memory_bytes is not None or self.memory_bytes is None:
            return placement.memory_bytes
        return self.memory_bytes * 92 // 100  # the driver, and gaps, take the rest

    def allocator_share(self, placement: Placement, runtime_bytes: int) -> float | None:
        """Return the share of its memory that the framework may allocate; None: all of it."""
        if placement.memory_bytes is None or self.memory_bytes is None:
            return None
        return min(1.0, (placement.memory_bytes - runtime_bytes) / self.memory_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup(Generic[Config, Architecture]):
    """Everything that a worker needs to load the model and to train it, with all defaults resolved."""

    config: Config
    architecture: Architecture
    model_path: str
    losses: Mapping[str, LossSpec]
    dtype: str
    strict: bool  # compute each sequence by itself
    checkpointing: bool  # recompute activations
    memory_share: float | None = None  # of the device's memory, all that the allocator may take; None: all


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStep:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FullState:
    """The training state of a fully trained model, without its tensors."""

    step: int
    moments: bool
    pending: bool  # whether a gradient is pending


class LoadingProgram(ABC, Generic[Setup_contra, Loaded_co]):
    """How a worker starts. It can do nothing else before it has loaded the model."""

    @abstractmethod
    def device(self) -> WorkerDevice: ...

    @abstractmethod
    def load(self, setup: Setup_contra) -> Loaded_co:
        """Join the others, and load this worker's part of the model."""


class StateProgram(ABC):
    """The methods that `StateFiles` calls."""

    @abstractmethod
    def sees(self, file: Path) -> bool:
        """Return whether the file exists."""

    @abstractmethod
    def capture(self, capture_id: str, owner: str, targets: Targets, ended: Sequence[str]) -> None:
        """Make a `StateWriter` drop ended captures, and begin a new one."""

    @abstractmethod
    def captured(self, capture_id: str) -> Written:
        """Return what the writer says of a capture."""


class TrainingProgram(StateProgram):
    """The methods of workers that have loaded the model, for every strategy."""

    @abstractmethod
    def unload_model(self, model_id: str) -> None:
        """Free this worker's part of the model, which may be missing if creating the model failed."""

    @abstractmethod
    def optim_step(self, steps: Sequence[ModelStep]) -> list[float]:
        """Step the models in order, unless `refuses_step`. Return the norms of their gradients before clipping."""

    @abstractmethod
    def drop_gradient(self, model_id: str) -> None: ...

    @abstractmethod
    def capture_adapter(self, model_id: str) -> AdapterState | None:
        """Return a LoRA model's state, if this worker is the first of those that hold its part."""

    @abstractmethod
    def adapter_weights(self, model_id: str) -> FloatArray | None:
        """Return its weights alone, on the same condition."""

    @abstractmethod
    def restore_adapter(self, model_id: str, state: AdapterState) -> None: ...

    @abstractmethod
    def full_state(self, model_id: str) -> FullState: ...

    @abstractmethod
    def restore_full(self, model_id: str, state: FullState, stored: Targets) -> None:
        """Read this worker's part of a fully trained model's state."""

    @abstractmethod
    def capture_bytes(self) -> tuple[int, int]:
        """Return the most that has been in the buffer of captures, and what training has copied into it so far."""

    @abstractmethod
    def run_full(
        self,
        model_id: str,
        micros: Sequence[Sequence[Segment]],
        backward: bool,  # noqa: FBT001  (over the wire)
    ) -> Sequence[Answer]:
        """Score this worker's segments of one operation of a fully trained model."""


class WorkersProgram(LoadingProgram[Setup_contra, Loaded_co], TrainingProgram):
    """All that `WorkersBackend` asks for."""
