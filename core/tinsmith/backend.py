"""The interface that a third party implements: a training backend, a sampling backend, and their capabilities.

A backend never sees HTTP, the store or another tenant's bookkeeping: it gets operations and returns results.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from tinsmith.errors import ConfigError
from tinsmith.losses import LossSpec
from tinsmith.operations import (
    Array,
    CreateModel,
    Failed,
    Forward,
    ForwardBackward,
    ForwardBackwardOutput,
    LoraConfig,
    OptimStep,
    OptimStepOutput,
    Sample,
    SampleOutput,
)

Isolation = Literal["bitwise", "close", "none"]


class BackendConfig(BaseModel):
    """Base of a backend's settings: the `backend:` or `sampler:` section of a model is checked against it."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend can do. Defaults say no.

    Four readers: the capabilities endpoint, request checking, scheduler limits, contract-suite skips.
    """

    vocab_size: int
    max_context_tokens: int  # of one sequence, prompt plus sampled
    max_batch_tokens: int  # of one call of forward or forward_backward; the scheduler's budget
    max_models: int = 1  # trained at a time
    losses: frozenset[str] = frozenset()
    max_lora_rank: int = 0  # 0 = no LoRA
    lora_targets: frozenset[Literal["attn", "mlp", "unembed"]] = frozenset()
    full_fine_tuning: bool = (
        False  # rank 0: all weights of the model are trained; of a sampler: it takes such snapshots
    )
    max_targets_per_token: int = 1  # K of [T, K] targets
    modalities: frozenset[Literal["text", "image"]] = frozenset({"text"})
    device: str = ""  # what it computes on, for people: "cpu", "NVIDIA H200"
    dtype: str = ""  # of base weights and activations: "float32", "bfloat16"; unsaid, it counts as the latter
    # determinism
    deterministic: bool = False  # the same operations give the same bits after a restart
    isolation: Isolation = "none"  # a tenant's numbers alone against in company
    isolation_error: float = 0.0  # the measured difference, if isolation is not "bitwise"
    # sampling: meaningful if the object is a SamplingBackend
    sampling: bool = False
    prompt_logprobs: bool = False
    target_prompt_logprobs: bool = False
    max_topk_logprobs: int = 0  # of topk_prompt_logprobs and topk_sample_logprobs
    stop_strings: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """A model's whole training state in canonical names, as checkpoints hold it (docs/reference/checkpoints.md).

    Adapters: names are PEFT's, `base_model.model.<module path>.lora_A.weight` [rank, in] and `.lora_B.weight`
    [out, rank], with the Hugging Face module paths of the base model. Full fine-tuning (`lora.rank` 0): names and
    shapes are those of the base model's own safetensors, `<module path>.weight` [out, in]; a tied head is not there.
    Optimizer and gradient mappings have the same keys. All float32.

    Mappings may be lazy: each tensor is asked for once and not kept, so it may be read or gathered at that moment.
    """

    lora: LoraConfig
    weights: Mapping[str, Array]
    adam_m: Mapping[str, Array] = field(default_factory=dict)  # empty: no step was made
    adam_v: Mapping[str, Array] = field(default_factory=dict)
    gradients: Mapping[str, Array] = field(default_factory=dict)  # pending; empty: none
    step: int = 0  # optimizer steps made


class Snapshot(ABC):
    """Weights frozen for sampling: nothing that happens later changes them.

    A backend that is also the sampler may hand out a subclass that keeps device arrays; every other sampler reads
    `adapter_weights`.
    """

    def __init__(self, snapshot_id: str, lora: LoraConfig) -> None:
        self.snapshot_id = snapshot_id
        self.lora = lora

    @abstractmethod
    def adapter_weights(self) -> Mapping[str, Array]:
        """Return the weights on the host, in the names of ModelState.weights. May copy from the device."""


class HostSnapshot(Snapshot):
    """A snapshot whose weights are host arrays, for instance read from a checkpoint."""

    def __init__(self, snapshot_id: str, lora: LoraConfig, weights: Mapping[str, Array]) -> None:
        super().__init__(snapshot_id, lora)
        self._weights = weights

    def adapter_weights(self) -> Mapping[str, Array]:
        return self._weights


Progress = Callable[[str, float | None], None]
"""Called with the stage ("loading weights") and the fraction done, 0 to 1, or None if unknown."""


def _no_progress(stage: str, fraction: float | None) -> None:
    del stage, fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendContext:
    """What core hands to a backend's `create` besides its own config."""

    model_name: str  # as clients name it
    model_path: Path | None  # a Hugging Face directory; None if the backend brings its own model
    cache_dir: Path  # private to this backend and model, kept between starts (mode 0700)
    losses: Mapping[str, LossSpec]  # every registered loss
    samples: bool = True  # False: the model has a separate sampler, so this backend need not prepare to sample
    progress: Progress = _no_progress

    @property
    def model_directory(self) -> Path:
        """`model_path`, for a backend that cannot start without one. Raise ConfigError if the model has none."""
        if self.model_path is None:
            msg = f"model {self.model_name!r} has no directory: set its path to a Hugging Face model directory"
            raise ConfigError(msg)
        return self.model_path


class TrainingBackend(ABC):
    """Trains many models on one base. Called from one thread, never concurrently.

    A user's mistake is a value, `Failed`, for its own operation, or `UserError` raised by a method that handles one
    model. Any method may raise `OutOfMemoryError` if the device has no room for what was asked and nothing has
    changed. The engine then repeats several operations one by one, and those that do not fit fail. Any other
    exception means that the state is unknown: the engine discards the backend.
    """

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """Constant from construction on."""

    @abstractmethod
    def create_model(self, op: CreateModel) -> None:
        """Make a fresh adapter (B zero, A from `op.lora.seed`), or at rank 0 a copy of the base weights to train.

        The core handles `op.checkpoint`.
        """

    @abstractmethod
    def unload_model(self, model_id: str) -> None:
        """Free everything the model holds. Published snapshots live on."""

    @abstractmethod
    def forward(self, ops: Sequence[Forward]) -> list[ForwardBackwardOutput | Failed]:
        """Score; results in the order of `ops`, which may belong to different models. Changes nothing."""

    @abstractmethod
    def forward_backward(self, ops: Sequence[ForwardBackward]) -> list[ForwardBackwardOutput | Failed]:
        """Score and add to each model's pending gradient. A model may occur several times: in this order.

        A `Failed` operation has added nothing.
        """

    @abstractmethod
    def optim_step(self, ops: Sequence[OptimStep]) -> list[OptimStepOutput | Failed]:
        """Step each model (each at most once a call) and clear its pending gradient; the others stay untouched."""

    @abstractmethod
    def capture_state(self, model_id: str) -> ModelState:
        """Copy the model's training state to the host; later training must not change the copy."""

    @abstractmethod
    def restore_state(self, model_id: str, state: ModelState) -> None:
        """Replace the training state of an existing model whose LoRA config equals `state.lora` but for the seed.

        Empty `adam_m`, `adam_v` and step 0 mean a fresh optimizer; empty `gradients` none pending.
        """

    @abstractmethod
    def publish(self, model_id: str, snapshot_id: str) -> Snapshot:
        """Freeze the model's weights as of now."""

    def close(self) -> None:
        """Free the device; called once, last."""


class SamplingBackend(ABC):
    """Samples from the base model and from snapshots. Called from one event loop, many samples at a time.

    It does its own batching: a new request joins the running batch at the next step, and a finished one leaves at once.
    """

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """Constant from construction on."""

    @abstractmethod
    async def load_snapshot(self, snapshot: Snapshot) -> None:
        """Make the snapshot available to `sample`. Idempotent by `snapshot_id`."""

    @abstractmethod
    async def drop_snapshot(self, snapshot_id: str) -> None:
        """Forget the snapshot once its running samples have ended. Unknown ids are ignored."""

    @abstractmethod
    async def sample(self, op: Sample) -> SampleOutput | Failed:
        """Draw the sequences. Cancelling the task frees its slots at the next step.

        The result depends on the operation and the snapshot alone: not on other requests, not on later training.
        """

    def close(self) -> None:
        """Free the device; called once, last. Not called if the object is also the training backend."""


C = TypeVar("C", bound=BackendConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What a backend would compute on, for `tinsmith doctor`."""

    name: str
    memory_bytes: int | None = None  # None: it shares the machine's memory


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSpec(Generic[C]):
    """An offer to train. `create` imports the framework inside itself."""

    name: str
    config: type[C]
    create: Callable[[C, BackendContext], TrainingBackend]
    description: str = ""
    needs_model_path: bool = True  # False: it has its own model, and starts without a Hugging Face directory
    samples: bool = True  # False: it only trains, needs a separate sampler, and is never the default
    diagnose: Callable[[C, Path | None], Sequence[Device]] | None = None
    """For `tinsmith doctor`, in a process of its own: return the devices that would be used.

    Loads the framework, and no weights. Raise ConfigError if the model in the directory is not supported.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSpec(Generic[C]):
    """An offer to sample only."""

    name: str
    config: type[C]
    create: Callable[[C, BackendContext], SamplingBackend]
    description: str = ""


AnyBackendSpec = BackendSpec[Any]  # Any: specs of different configs live in one registry
AnySamplerSpec = SamplerSpec[Any]
