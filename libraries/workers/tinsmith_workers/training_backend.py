"""The base of training backends with workers: their start, models by id, their places, and refusals."""

import pickle
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

from tinsmith.backend import (
    BackendContext,
    ModelState,
    Snapshot,
    TrainerCapabilities,
    TrainingBackend,
)
from tinsmith.divergence import step_result
from tinsmith.errors import CapacityError, ConfigError, UserError
from tinsmith.losses import LossSpec
from tinsmith.machine import count_gpus
from tinsmith.operations import (
    CreateModel,
    Failed,
    Forward,
    ForwardBackward,
    ForwardBackwardOutput,
    OptimStep,
    OptimStepOutput,
)
from tinsmith_workers.budget import Budget
from tinsmith_workers.config import TrainingWorkersConfig
from tinsmith_workers.group import WorkerGroup
from tinsmith_workers.launching import DEVICE, MakeLauncher
from tinsmith_workers.model_states import AdapterModelState, FullModelState
from tinsmith_workers.program import (
    LoadingProgram,
    ModelStep,
    TrainingProgram,
    TrainingSetup,
    WorkerDevice,
    WorkersProgram,
)
from tinsmith_workers.sequences import MicroBatch, Segment, combined_outputs, deal, one_by_one, segments
from tinsmith_workers.state_files import StateFiles

Config = TypeVar("Config", bound=TrainingWorkersConfig)
Setup = TypeVar("Setup", bound=TrainingSetup[Any, Any])
Loaded = TypeVar("Loaded")

_MAX_TARGETS: Final = 128  # per token; [T, K] arrays of a micro-batch must fit
FAST_ISOLATION_ERROR: Final = 1e-4
"""The largest difference that other tenants make in one step, tested on CPU in float32, not measured on GPUs.

Rounding differences grow with the steps: twenty of them on a tiny model with experts end up to 5e-3 apart."""


class WorkersBackend(TrainingBackend, Generic[Config, Setup, Loaded]):
    """Lets workers load a base model, and keeps the models that they train. A subclass makes these, and runs passes.

    `ranks` are the workers, `config` the settings as given, `losses` the registered losses by name.

    Called from one thread. Any exception other than UserError leaves it unusable.
    """

    def __init__(
        self, ranks: WorkerGroup[WorkersProgram[Setup, Loaded]], config: Config, context: BackendContext
    ) -> None:
        """End the workers if they cannot load the model."""
        self.ranks = ranks
        self.config = config
        self.losses = dict(context.losses)
        self._trained: dict[str, AdapterModelState | FullModelState] = {}
        self._asleep = False  # a subclass whose workers can sleep says so here
        try:
            self.state_files = StateFiles(
                ranks, context.cache_dir / "state", shard_bytes=context.checkpoint_shard_bytes
            )
            device = agreed_device(ranks.call(LoadingProgram.device), config.device)
            self._budget, self.setup = self.prepare(device, context)
            self.loaded = ranks.call(LoadingProgram.load, self.setup)
            self.rank_tokens = self._budget.micro_tokens
            self._capabilities = self.describe(device)
        except BaseException:
            ranks.close()
            raise

    @abstractmethod
    def prepare(self, device: WorkerDevice, context: BackendContext) -> tuple[Budget, Setup]:
        """Resolve the settings that are left open. Raise ConfigError if not even one model fits."""

    @property
    def max_full_models(self) -> int:
        return self.config.max_full_models

    def describe(self, device: WorkerDevice) -> TrainerCapabilities:
        on_cpu, setup, budget = device.type == "cpu", self.setup, self._budget
        exact = on_cpu and setup.strict and setup.dtype == "float32"
        return TrainerCapabilities(
            device=f"{len(self.ranks)} x {device.name}",
            dtype=setup.dtype,
            vocab_size=budget.shape.vocab_size,
            max_context_tokens=budget.context_tokens,
            max_batch_tokens=budget.micro_tokens * budget.data_parallel,
            max_models=budget.max_models,
            max_full_models=self.max_full_models,
            full_fine_tuning=self.max_full_models > 0,
            losses=frozenset(self.losses),
            max_lora_rank=self.config.max_lora_rank,
            lora_targets=frozenset({"attn", "mlp", "unembed"}),
            max_targets_per_token=_MAX_TARGETS,
            deterministic=on_cpu,
            isolation="bitwise" if exact else "close",
            isolation_error=0.0 if exact or not on_cpu else FAST_ISOLATION_ERROR,
        )

    @property
    def trainer_capabilities(self) -> TrainerCapabilities:
        return self._capabilities

    @abstractmethod
    def make_adapter(self, op: CreateModel) -> AdapterModelState:
        """Create a LoRA model on the workers."""

    def make_full(self, op: CreateModel) -> FullModelState:
        """Create a model on the workers whose own weights are trained. Needed if `max_full_models` may be above 0."""
        raise NotImplementedError(op)

    @abstractmethod
    def run_adapters(self, ops: Sequence[ForwardBackward], *, backward: bool) -> list[ForwardBackwardOutput]:
        """Run the operations of LoRA models together. There may be none."""

    def shares(self, micros: Sequence[MicroBatch]) -> list[list[list[Segment]]]:
        """Return each worker's part of every micro-batch: here, each is a data-parallel rank."""
        return [[micro[rank] for micro in micros] for rank in range(len(self.ranks))]

    @property
    def models(self) -> dict[str, AdapterModelState | FullModelState]:
        """The models in training. Every call of the backend reads this first, so none gets past a sleeping backend."""
        if self._asleep:
            msg = "the backend sleeps: wake it first"
            raise RuntimeError(msg)
        return self._trained

    def close(self) -> None:
        self.ranks.close()

    def sendable_losses(self) -> Mapping[str, LossSpec]:
        """Return the losses. Raise ConfigError if one cannot be sent to the workers."""
        try:
            pickle.dumps(self.losses)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            msg = f"a registered loss cannot be sent to the ranks: {error}; define per_token at the top of its module"
            raise ConfigError(msg) from error
        return self.losses

    # life of a model

    def create_model(self, op: CreateModel) -> None:
        max_lora_rank = self.config.max_lora_rank
        if len(self.models) >= self.config.max_models:
            msg = f"all {self.config.max_models} models are in use: end a session, or raise the backend's max_models"
            raise CapacityError(msg)
        if op.lora.rank <= max_lora_rank:  # else it is refused for its rank
            self._budget.check(op.lora.rank, [model.lora.rank for model in self.models.values()])
        if op.lora.rank == 0:
            self._check_full_models(self.max_full_models)
            self.state_files.check()
            self.models[op.model_id] = self.make_full(op)
        else:
            _check_rank(op.lora.rank, max_lora_rank)
            self.models[op.model_id] = self.make_adapter(op)

    def _check_full_models(self, limit: int) -> None:
        if sum(isinstance(model, FullModelState) for model in self.models.values()) >= limit:
            msg = (
                "no room for one more model of LoRA rank 0 (full fine-tuning): the backend's max_full_models is "
                f"{limit}; end the session that has one, raise the setting, or train a LoRA adapter"
            )
            raise CapacityError(msg)

    def unload_model(self, model_id: str) -> None:
        if self.models.pop(model_id, None) is not None:
            self.ranks.call(TrainingProgram.unload_model, model_id)

    def capture_state(self, model_id: str) -> ModelState:
        return self.models[model_id].capture()

    def restore_state(self, model_id: str, state: ModelState) -> None:
        self.models[model_id].restore(state)

    def publish(self, model_id: str, snapshot_id: str) -> Snapshot:
        return self.models[model_id].publish(snapshot_id)

    # training

    def forward(self, ops: Sequence[Forward]) -> list[ForwardBackwardOutput | Failed]:
        return self._run(ops, backward=False)

    def forward_backward(self, ops: Sequence[ForwardBackward]) -> list[ForwardBackwardOutput | Failed]:
        return self._run(ops, backward=True)

    def optim_step(self, ops: Sequence[OptimStep]) -> list[OptimStepOutput | Failed]:
        assert all(op.model_id in self.models for op in ops)
        steps = [ModelStep(model_id=op.model_id, adam=op.adam) for op in ops]
        norms = self.ranks.call(TrainingProgram.optim_step, steps)[0]
        return [step_result(norm, op.adam) for norm, op in zip(norms, ops, strict=True)]

    def drop_gradient(self, model_id: str) -> None:
        assert model_id in self.models
        self.ranks.call(TrainingProgram.drop_gradient, model_id)

    def _run(self, ops: Sequence[ForwardBackward], *, backward: bool) -> list[ForwardBackwardOutput | Failed]:
        whole = [isinstance(self.models[op.model_id], FullModelState) for op in ops]
        adapted = iter(
            self.run_adapters([op for op, full in zip(ops, whole, strict=True) if not full], backward=backward)
        )
        return [
            self._run_full(op, backward=backward) if full else next(adapted)
            for op, full in zip(ops, whole, strict=True)
        ]

    def _run_full(self, op: ForwardBackward, *, backward: bool) -> ForwardBackwardOutput:
        """Run one operation by itself: the model has its own weights, so there is nothing to share with others."""
        shares = self.shares(self.micro_batches(list(segments([op], self.losses))))
        answers = self.ranks.call_each(TrainingProgram.run_full, [(op.model_id, share, backward) for share in shares])
        (output,) = combined_outputs([op], answers)
        return output

    def micro_batches(self, work: Sequence[Segment]) -> list[MicroBatch]:
        """Deal sequences out. With strict isolation, each has a micro-batch of its own."""
        if self.setup.strict:
            return list(one_by_one(work, self._budget.data_parallel))
        return list(deal(work, self._budget.data_parallel, self.rank_tokens))


def _check_rank(rank: int, limit: int) -> None:
    if not 1 <= rank <= limit:
        allowed = f"1 to {limit}, the backend's max_lora_rank" if limit else "none: the backend's max_lora_rank is 0"
        msg = f"LoRA rank {rank} is not served: allowed are {allowed}"
        raise UserError(msg)


# the start of the workers


def start_ranks(
    program: str,
    config: TrainingWorkersConfig,
    context: BackendContext,
    launch_with: MakeLauncher | None,
    *,
    least: int = 1,
    environment: Mapping[str, str] | None = None,
) -> WorkerGroup[Any]:
    """Start workers on the GPUs that the server has placed them on, or on all. Any: the program.

    least: how many a machine without GPUs has, if `nproc_per_node` is not set.
    """
    devices = context.placement.devices
    gpus = 0 if config.device == "cpu" else len(devices) or count_gpus()
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}
    chosen = {} if config.device is None else {DEVICE: config.device}
    return WorkerGroup(
        program,
        config,
        context.progress,
        environment={**visible, **chosen, **(environment or {})},
        gpus=None if config.device is None else config.device == "cuda",
        default_per_node=gpus or least,
        launch_with=launch_with,
        figures=context.figures,
    )


def agreed_device(found: Sequence[WorkerDevice], wanted: str | None) -> WorkerDevice:
    """Return the device of the first worker, which has one as every other's.

    Args:
        found: the device of each worker, by rank.
        wanted: the type that the configuration asks for, if it does.

    Raises ConfigError if a worker computes on another.
    """
    for rank, device in enumerate(found):
        if device.type != (wanted or found[0].type):
            asked = f"`device` is {wanted!r}" if wanted else f"rank 0 computes on {found[0].name}"
            msg = (
                f"rank {rank} computes on {device.name} ({device.type}), but {asked}: give each worker such a one, and "
                f"start them with {DEVICE}={wanted or found[0].type}"
            )
            raise ConfigError(msg)
    return found[0]
