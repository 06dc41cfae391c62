"""The interface that a third party implements: a training backend, a sampling backend, and their capabilities.

A backend never sees HTTP, the store or a tenant's bookkeeping: it receives operations and returns results.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from tinsmith.errors import ConfigError
from tinsmith.figures import Figures
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
from tinsmith_checkpoints.values import ModelState as ModelState
from tinsmith_checkpoints.values import host_bytes

Isolation = Literal["bitwise", "close", "none"]


class BackendConfig(BaseModel):
    """Base class of a backend's settings, against which a model's `backend:` or `sampler:` section is validated."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedExperts:
    """What `Datum.routed_experts` [n, L, C] must be for a model: its experts, as a trainer replays them."""

    num_layers: int  # L
    num_experts: int  # of each layer
    top_k: int  # C: different experts that compute a token


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What trainers and samplers both say of themselves. The defaults of all capabilities claim nothing."""

    vocab_size: int
    max_context_tokens: int  # per sequence; of a sampler: prompt plus sampled tokens, see `Sample.fits`
    device: str = ""  # the hardware, for display: "cpu", "NVIDIA H200"
    dtype: str = ""  # of base weights and activations: "float32" or "bfloat16"; empty: treated as "bfloat16"
    isolation: Isolation = "none"  # how closely a tenant's results match the results of running alone
    isolation_error: float = 0.0  # if that is not "bitwise": what company changes at most, from equal states, in a step
    # which models a trainer creates, and of which a sampler takes snapshots; core creates those that suit both
    max_lora_rank: int = 0  # of an adapter; 0 = no LoRA
    lora_targets: frozenset[Literal["attn", "mlp", "unembed"]] = frozenset()  # what an adapter may change
    full_fine_tuning: bool = False  # LoRA rank 0: all weights are trained


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerCapabilities(Capabilities):
    """The abilities and limits of a training backend.

    Read by the capabilities endpoint, request checking, the scheduler (limits) and the contract suites (skips).
    """

    max_batch_tokens: int  # per call of forward or forward_backward; the scheduler's budget
    max_models: int = 1  # in training at the same time
    max_full_models: int | None = None  # of them for full fine-tuning; None: as many as `max_models`
    losses: frozenset[str] = frozenset()
    replayed_experts: ReplayedExperts | None = None  # None: does not train with `Datum.routed_experts`
    max_targets_per_token: int = 1  # K of [T, K] targets; core lets no sample ask for more alternatives
    deterministic: bool = False  # the same operations give the same bits, even after a restart

    @property
    def trains(self) -> bool:
        """Whether there is any model that it can train."""
        return self.max_lora_rank > 0 or self.full_fine_tuning


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerCapabilities(Capabilities):
    """The abilities and limits of a sampling backend. Read as a trainer's are."""

    prompt_logprobs: bool = False
    target_prompt_logprobs: bool = False
    min_temperature: float = 1e-6  # above 0, which is greedy
    max_temperature: float = 1e6
    max_topk_logprobs: int = 0  # of topk_prompt_logprobs and topk_sample_logprobs
    max_prompt_alt_tokens: int = 0  # of prompt_alt_tokens_k
    stop_strings: bool = False
    returns_routed_experts: bool = False  # with sampled sequences, if `BackendContext.routing_replay` asks for them
    max_sequences: int = 256  # drawn at a time; the engine holds back the rest, so that tenants take turns
    max_snapshots: int | None = None  # loaded at a time, without the one being loaded; None: as many as core likes
    inflight: Literal["between_requests", "between_tokens"] = "between_requests"  # new weights of inflight sessions


class Snapshot(ABC):
    """Weights frozen for sampling. Later training does not change them.

    A backend that also samples may return a subclass that keeps device arrays. All other samplers read
    `adapter_weights`.
    """

    def __init__(self, snapshot_id: str, lora: LoraConfig) -> None:
        self.snapshot_id = snapshot_id
        self.lora = lora

    @property
    def num_bytes(self) -> int:
        """Least memory that the weights take where they stay; 0 if unknown."""
        return 0

    @abstractmethod
    def adapter_weights(self) -> Mapping[str, Array]:
        """Return the weights on the host, under the names of ModelState.weights. May copy from the device."""

    def keep_in(self, weights: Mapping[str, Array]) -> None:
        """Called by a sampler that keeps a copy of the adapter's weights in memory.

        A snapshot that holds its own may refer to that copy instead, so that they take memory only once.
        """


class HostSnapshot(Snapshot):
    """A snapshot whose weights are host arrays, for example read from a checkpoint."""

    def __init__(self, snapshot_id: str, lora: LoraConfig, weights: Mapping[str, Array]) -> None:
        super().__init__(snapshot_id, lora)
        self._weights = weights

    @property
    def num_bytes(self) -> int:
        return host_bytes(self._weights)

    def keep_in(self, weights: Mapping[str, Array]) -> None:
        self._weights = weights

    def adapter_weights(self) -> Mapping[str, Array]:
        return self._weights


Progress = Callable[[str, float | None], None]
"""Called with the stage ("loading weights") and the fraction done, 0 to 1, or None if unknown."""


def _no_progress(stage: str, fraction: float | None) -> None:
    del stage, fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What core assigns to a trainer or sampler, on this machine."""

    devices: tuple[str, ...] = ()  # ids for CUDA_VISIBLE_DEVICES; empty: none assigned
    memory_bytes: int | None = None  # of each device, all that the backend may take; None: not known
    device_bytes: int | None = None  # of each device, all that it has; None: not known
    samples: bool = True  # False: a trainer is not asked to sample, as the model has a separate sampler, or none

    @property
    def share(self) -> float | None:
        """The part of each device's memory that the backend may take, or None if that is not known."""
        if self.memory_bytes is None or not self.device_bytes:
            return None
        return min(1.0, self.memory_bytes / self.device_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The memory that a trainer or sampler would take on each of its devices. See `BackendSpec.demand`."""

    num_devices: int | None = None  # of this machine; None: any number; 0: none, as its devices are elsewhere
    on_host: bool = False  # it computes on this machine's CPU: what it takes is of the machine's memory
    least_bytes: int = 0  # with less it cannot serve one model, or one sequence
    asleep_bytes: int | None = None  # what it keeps while it sleeps; None: it cannot sleep
    fixed: Mapping[str, int] = field(default_factory=dict)  # bytes by purpose, independent of the number of models
    per_model: Mapping[str, int] = field(default_factory=dict)  # what each model, or resident snapshot, adds to them
    max_models: int | None = None  # models, or snapshots, that fit and that the settings allow; None: not known
    batch_tokens: int = 0  # of one micro-batch on one device, or for a sampler of all keys and values; 0: not known
    replicas: int = 1  # each of which has so many tokens, and the same snapshots
    layout: str = ""  # for people: "8 ranks", "4 replicas of 2 GPUs"
    remarks: tuple[str, ...] = ()  # for people: what else follows from the memory, and why


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendContext:
    """What core passes to a backend's `create` in addition to the backend's config."""

    model_name: str  # as clients name it
    model_path: Path | None  # a Hugging Face directory; None if the backend brings its own model
    cache_dir: Path  # private to this backend and model, kept across restarts (mode 0700)
    losses: Mapping[str, LossSpec]  # every registered loss
    routing_replay: bool = False  # sampled sequences come with their experts, and training uses them
    placement: Placement = Placement()  # names no devices if the backend's spec has no `demand`
    progress: Progress = _no_progress
    sleeps: bool = False  # it takes turns on the device with another backend: raise ConfigError if it cannot
    figures: Figures = field(default_factory=Figures)  # what the backend may count: see `tinsmith.figures`
    checkpoint_shard_bytes: int = 2 << 30  # of one file, if the backend itself writes a fully trained model's state

    @property
    def model_directory(self) -> Path:
        """Return `model_path`, for backends that require one. Raise ConfigError if the model has none."""
        if self.model_path is None:
            msg = f"model {self.model_name!r} has no directory: set its path to a Hugging Face model directory"
            raise ConfigError(msg)
        return self.model_path


class TrainingBackend(ABC):
    """Trains many models on one base model. Called from one thread, never concurrently.

    Core has checked each operation against the capabilities: it has a model that is on the backend, and a loss that the
    backend lists. Report any other mistake of a user as a `Failed` result for that operation, or raise `UserError` in a
    method that handles one model. Any method may raise `OutOfMemoryError` if the device lacks the memory for the call
    and nothing has changed. The engine then retries the call's operations one by one, and those that do not fit fail.
    Any other exception means that the backend's state is unknown, and the engine discards the backend.
    """

    @property
    @abstractmethod
    def trainer_capabilities(self) -> TrainerCapabilities:
        """Constant from construction on."""

    @abstractmethod
    def create_model(self, op: CreateModel) -> None:
        """Create an adapter (B zero, A drawn from `op.lora.seed`) or, at rank 0, a trainable copy of the base weights.

        The core handles `op.checkpoint`.
        """

    @abstractmethod
    def unload_model(self, model_id: str) -> None:
        """Free everything the model holds. Published snapshots stay valid."""

    @abstractmethod
    def forward(self, ops: Sequence[Forward]) -> list[ForwardBackwardOutput | Failed]:
        """Compute logprobs and losses, in the order of `ops`, which may be of different models. Changes no state.

        If the base model has experts, the metrics of each operation include `tinsmith.expert_metrics` of its tokens.
        """

    @abstractmethod
    def forward_backward(self, ops: Sequence[ForwardBackward]) -> list[ForwardBackwardOutput | Failed]:
        """Do as `forward`, and add to each model's pending gradient. A model's operations are applied in order.

        A `Failed` operation adds nothing. If a pending gradient is not finite then, the metrics of its model's
        operations have `tinsmith.NOT_FINITE` 1.0. Core does the same for losses.
        """

    @abstractmethod
    def optim_step(self, ops: Sequence[OptimStep]) -> list[OptimStepOutput | Failed]:
        """Step each named model (at most once per call) and clear its pending gradient. Leave others unchanged.

        A step that is not finite (`tinsmith.step_result`) fails: it changes neither weights nor moments nor the number
        of steps, and clears the pending gradient. All workers of a backend must decide alike.
        """

    def drop_gradient(self, model_id: str) -> None:
        """Clear the model's pending gradient, and change nothing else. Override it if there is a cheaper way."""
        self.restore_state(model_id, replace(self.capture_state(model_id), gradients={}))

    @abstractmethod
    def capture_state(self, model_id: str) -> ModelState:
        """Copy the model's training state to the host; later training must not change the copy."""

    @abstractmethod
    def restore_state(self, model_id: str, state: ModelState) -> None:
        """Replace the training state of an existing model whose LoRA config equals `state.lora`, except for the seed.

        Empty `adam_m` and `adam_v` with step 0 mean a fresh optimizer; empty `gradients` mean none are pending.
        """

    @abstractmethod
    def publish(self, model_id: str, snapshot_id: str) -> Snapshot:
        """Return a snapshot of the model's current weights."""

    def sleep_trainer(self) -> None:
        """Optional, with `wake_trainer`: lend the devices to a sampler. Move what they hold to the host. Idempotent.

        While it sleeps, core calls only these two and `close`; all other methods raise RuntimeError. What it returned
        before can still be read: captured states that are being written, and published snapshots. If either method
        raises, the backend's state is unknown, and the engine discards it.
        """
        raise NotImplementedError

    def wake_trainer(self) -> None:
        """Take the devices' memory again. Every bit of every model is as before `sleep_trainer`. Idempotent."""
        raise NotImplementedError

    def close(self) -> None:
        """Free the device; called once, last."""


OnTokens = Callable[[int, int, Sequence[int]], None]
"""Called from the event loop with a sequence's number, how many of its tokens precede these, and these tokens."""


class SamplingBackend(ABC):
    """Samples from the base model and from snapshots. Called from one event loop, with many samples in flight.

    It does its own batching: new requests join the running batch at the next step, and finished ones leave at once.
    """

    @property
    @abstractmethod
    def sampler_capabilities(self) -> SamplerCapabilities:
        """Constant from construction on."""

    @property
    def trouble(self) -> str | None:
        """Why nothing can be sampled for now, in words that every tenant may read; None if it can.

        `/readyz` tells it. Training goes on meanwhile, and samples wait.
        """
        return None

    @abstractmethod
    async def load_snapshot(self, snapshot: Snapshot) -> None:
        """Make the snapshot available to `sample`. Idempotent by `snapshot_id`."""

    @abstractmethod
    async def drop_snapshot(self, snapshot_id: str) -> None:
        """Free the snapshot once its running samples have ended. Ignore unknown ids."""

    @abstractmethod
    async def sample(self, op: Sample) -> SampleOutput | Failed:
        """Draw the sequences. If the task is cancelled, free its slots at the next step.

        The result depends only on the operation and the snapshot, not on other requests or later training, and where
        the sampler offers `move_samples` on the tokens before which it was called.
        """

    async def sample_streaming(self, op: Sample, on_tokens: OnTokens) -> SampleOutput | Failed:
        """Optional: do as `sample`, and tell the tokens while they are drawn. Called if `op.streamed`.

        It need not tell any, and may tell some twice: the client gets the rest with the result.
        """
        del on_tokens
        return await self.sample(op)

    async def move_samples(self, snapshot_id: str, newer_id: str) -> None:
        """Optional: draw the further tokens of one snapshot's samples from another. Both are loaded.

        Called if `sampler_capabilities.inflight` is "between_tokens". Every sample whose `Sample.snapshot_id` is
        `snapshot_id` goes on with the weights of `newer_id` from its next step, at the latest once its prompt is read,
        and so do later ones; a later call moves them again. What has been computed of a sequence stays: its keys and
        values are of the weights that made them, and no other request may find those of drawn tokens. The result of a
        sample that was moved says in `SampledSequence.weights` which snapshot drew each token. A prompt is scored by
        one snapshot's weights. Nothing else may change, for samples of other snapshots in particular.
        """
        raise NotImplementedError

    async def sleep_sampler(self) -> None:
        """Optional, with `wake_sampler`: lend the devices to a trainer. Free their memory. Idempotent.

        What it caches of prompts may be lost. Called when no other call is awaited. The slots of a sample that was
        cancelled may still be busy: wait for the end of the step. While it sleeps, core calls only these two and
        `close`; all other methods raise RuntimeError. If either method raises, the engine ends.
        """
        raise NotImplementedError

    async def wake_sampler(self) -> None:
        """Take the memory again. The same snapshots are loaded, and give the same samples. Idempotent."""
        raise NotImplementedError

    def close(self) -> None:
        """Free the device; called once, last. Not called if the object is also the training backend."""


def overrides(backend: object, optional: Callable[..., object]) -> bool:
    """Return whether the class of `backend` overrides an optional method, given as its base class has it."""
    return getattr(type(backend), optional.__name__) is not optional


C = TypeVar("C", bound=BackendConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device that a backend would use, as reported by `tinsmith doctor`."""

    name: str
    memory_bytes: int | None = None  # None: shares the machine's memory


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSpec(Generic[C]):
    """A plugin's offer of a training backend. `create` imports the framework inside the function."""

    name: str
    config: type[C]
    create: Callable[[C, BackendContext], TrainingBackend]
    description: str = ""
    needs_model_path: bool = True  # False: brings its own model and needs no Hugging Face directory
    samples: bool = True  # False: only trains, needs a separate sampler, and is never the default
    diagnose: Callable[[C, Path | None], Sequence[Device]] | None = None
    """Called by `tinsmith doctor` in a separate process: return the devices that the backend would use.

    Load the framework, but no weights. Raise ConfigError if the model in the directory is not supported.
    """
    check: Callable[[C, Path | None], Iterable[str]] | None = None
    """Say why the backend cannot start on this machine, as far as that can be told at once: a reason for each obstacle.

    Called before each start, with the model's directory if it is known. Import no framework.
    """
    demand: Callable[[C, Mapping[str, Any] | None, Placement], Demand] | None = None  # Any: JSON
    """Say what the backend would take with that placement, given the model's parsed config.json.

    Without a configuration (the model is not on this machine yet), only `num_devices` is read. An empty placement asks
    for `num_devices`, one without `memory_bytes` for `least_bytes`. Import no framework, touch no device. Raise
    ConfigError if the settings do not fit the model or the devices. A backend that offers this gets its part of the
    machine in `BackendContext.placement`, and its section takes the keys `devices` and `memory`.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSpec(Generic[C]):
    """A plugin's offer of a sampling backend."""

    name: str
    config: type[C]
    create: Callable[[C, BackendContext], SamplingBackend]
    description: str = ""
    diagnose: Callable[[C, Path | None], Sequence[Device]] | None = None
    check: Callable[[C, Path | None], Iterable[str]] | None = None
    demand: Callable[[C, Mapping[str, Any] | None, Placement], Demand] | None = None  # Any: JSON
    """These three are as for a BackendSpec."""


AnyBackendSpec = BackendSpec[Any]  # Any: specs of different configs live in one registry
AnySamplerSpec = SamplerSpec[Any]
