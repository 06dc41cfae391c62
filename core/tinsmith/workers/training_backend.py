"""What training backends whose work is done by workers have in common: models by id, their places, and refusals."""

import pickle
from abc import abstractmethod
from collections.abc import Mapping, Sequence

from tinsmith.backend import ModelState, SleepableTrainingBackend, Snapshot, TrainingBackend
from tinsmith.divergence import step_result
from tinsmith.errors import CapacityError, ConfigError, NotFoundError, UserError
from tinsmith.losses import LossSpec
from tinsmith.operations import (
    CreateModel,
    Failed,
    Forward,
    ForwardBackward,
    ForwardBackwardOutput,
    LoraConfig,
    OptimStep,
    OptimStepOutput,
)
from tinsmith.workers.adapter_models import AdapterModelState
from tinsmith.workers.full_models import FullModelState
from tinsmith.workers.group import WorkerGroup
from tinsmith.workers.program import ModelStep, SleepableProgram, TrainingProgram, WorkerDevice


def agreed_device(found: Sequence[WorkerDevice], wanted: str | None, variable: str) -> WorkerDevice:
    """Return the device of the first worker, which has one as every other's.

    Args:
        found: the device of each worker, by rank.
        wanted: the type that the configuration asks for, if it does.
        variable: of the environment, by which workers that something else starts are told.

    Raises ConfigError if a worker computes on another.
    """
    for rank, device in enumerate(found):
        if device.type != (wanted or found[0].type):
            asked = f"`device` is {wanted!r}" if wanted else f"rank 0 computes on {found[0].name}"
            msg = (
                f"rank {rank} computes on {device.name} ({device.type}), but {asked}: give each worker such a one, and "
                f"start them with {variable}={wanted or found[0].type}"
            )
            raise ConfigError(msg)
    return found[0]


class WorkersBackend(TrainingBackend):
    """Keeps the models that the workers train. A subclass makes them, and runs passes.

    Called from one thread. Any exception other than UserError leaves it unusable.
    """

    def __init__(
        self,
        ranks: WorkerGroup[TrainingProgram],
        losses: Mapping[str, LossSpec],
        *,
        max_models: int,
        max_full_models: int,
        max_lora_rank: int,
    ) -> None:
        self.ranks = ranks
        self._losses = dict(losses)
        self._limits = max_models, max_full_models, max_lora_rank
        self._trained: dict[str, AdapterModelState | FullModelState] = {}
        self._asleep = False

    @abstractmethod
    def check_memory(self, lora: LoraConfig) -> None:
        """Raise OutOfMemoryError if such a model does not fit beside those that train."""

    @abstractmethod
    def make_adapter(self, op: CreateModel) -> AdapterModelState:
        """Have the workers make a LoRA model."""

    @abstractmethod
    def make_full(self, op: CreateModel) -> FullModelState:
        """Have the workers make a model whose own weights are trained."""

    @abstractmethod
    def run_adapters(self, ops: Sequence[ForwardBackward], *, backward: bool) -> list[ForwardBackwardOutput]:
        """Run the operations of LoRA models together. There may be none."""

    @abstractmethod
    def run_full(self, op: ForwardBackward, *, backward: bool) -> ForwardBackwardOutput:
        """Run one operation by itself: the model has its own weights, so there is nothing to share with others."""

    @property
    def _models(self) -> dict[str, AdapterModelState | FullModelState]:
        """All that is asked of the backend asks for its models first."""
        if self._asleep:
            msg = "the backend sleeps: wake it first"
            raise RuntimeError(msg)
        return self._trained

    def close(self) -> None:
        self.ranks.close()

    def sendable_losses(self) -> Mapping[str, LossSpec]:
        """Return the losses. Raise ConfigError if one cannot be sent to the workers."""
        try:
            pickle.dumps(self._losses)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            msg = f"a registered loss cannot be sent to the ranks: {error}; define per_token at the top of its module"
            raise ConfigError(msg) from error
        return self._losses

    # life of a model

    def create_model(self, op: CreateModel) -> None:
        max_models, max_full_models, max_lora_rank = self._limits
        if len(self._models) >= max_models:
            msg = f"all {max_models} models are in use: end a session, or raise the backend's max_models"
            raise CapacityError(msg)
        if op.lora.rank <= max_lora_rank:  # else it is refused for its rank
            self.check_memory(op.lora)
        if op.lora.rank == 0:
            self._check_full_models(max_full_models)
            self._models[op.model_id] = self.make_full(op)
        else:
            _check_rank(op.lora.rank, max_lora_rank)
            self._models[op.model_id] = self.make_adapter(op)

    def _check_full_models(self, limit: int) -> None:
        if sum(isinstance(model, FullModelState) for model in self._models.values()) >= limit:
            msg = (
                "no room for one more model of LoRA rank 0 (full fine-tuning): the backend's max_full_models is "
                f"{limit}; end the session that has one, raise the setting, or train a LoRA adapter"
            )
            raise CapacityError(msg)

    def unload_model(self, model_id: str) -> None:
        if self._models.pop(model_id, None) is not None:
            self.ranks.call(TrainingProgram.unload_model, model_id)

    def capture_state(self, model_id: str) -> ModelState:
        return self._model(model_id).capture()

    def restore_state(self, model_id: str, state: ModelState) -> None:
        self._model(model_id).restore(state)

    def publish(self, model_id: str, snapshot_id: str) -> Snapshot:
        return self._model(model_id).publish(snapshot_id)

    def _model(self, model_id: str) -> AdapterModelState | FullModelState:
        if model_id not in self._models:
            raise NotFoundError(_unknown(model_id).message)
        return self._models[model_id]

    # training

    def forward(self, ops: Sequence[Forward]) -> list[ForwardBackwardOutput | Failed]:
        return self._run(ops, backward=False)

    def forward_backward(self, ops: Sequence[ForwardBackward]) -> list[ForwardBackwardOutput | Failed]:
        return self._run(ops, backward=True)

    def optim_step(self, ops: Sequence[OptimStep]) -> list[OptimStepOutput | Failed]:
        steps = [ModelStep(model_id=op.model_id, adam=op.adam) for op in ops if op.model_id in self._models]
        norms = iter(self.ranks.call(TrainingProgram.optim_step, steps)[0] if steps else ())
        return [
            step_result(next(norms), op.adam) if op.model_id in self._models else _unknown(op.model_id) for op in ops
        ]

    def drop_gradient(self, model_id: str) -> None:
        self._model(model_id)
        self.ranks.call(TrainingProgram.drop_gradient, model_id)

    def _run(self, ops: Sequence[ForwardBackward], *, backward: bool) -> list[ForwardBackwardOutput | Failed]:
        refused = {index: failure for index, op in enumerate(ops) if (failure := self._refusal(op)) is not None}
        good = [op for index, op in enumerate(ops) if index not in refused]
        whole = [isinstance(self._models[op.model_id], FullModelState) for op in good]
        adapted = iter(
            self.run_adapters([op for op, full in zip(good, whole, strict=True) if not full], backward=backward)
        )
        outputs = iter(
            [
                self.run_full(op, backward=backward) if full else next(adapted)
                for op, full in zip(good, whole, strict=True)
            ]
        )
        return [refused[index] if index in refused else next(outputs) for index in range(len(ops))]

    def _refusal(self, op: ForwardBackward) -> Failed | None:
        """Refuse an unknown model or loss. Core has already checked everything else against the capabilities."""
        if op.model_id not in self._models:
            return _unknown(op.model_id)
        if op.loss_fn not in self._losses:
            return Failed(message=f"no loss named {op.loss_fn!r}, known: {', '.join(sorted(self._losses))}")
        return None


class SleepableWorkersBackend(WorkersBackend, SleepableTrainingBackend):
    """Whose workers sleep, too."""

    ranks: WorkerGroup[SleepableProgram]

    def sleep(self) -> None:
        if not self._asleep:
            self.ranks.call(SleepableProgram.sleep)
            self._asleep = True

    def wake(self) -> None:
        if self._asleep:
            self.ranks.call(SleepableProgram.wake)
            self._asleep = False


def _check_rank(rank: int, limit: int) -> None:
    if not 1 <= rank <= limit:
        allowed = f"1 to {limit}, the backend's max_lora_rank" if limit else "none: the backend's max_lora_rank is 0"
        msg = f"LoRA rank {rank} is not served: allowed are {allowed}"
        raise UserError(msg)


def _unknown(model_id: str) -> Failed:
    return Failed(message=f"no model {model_id!r} in training: it was never created, or has been unloaded")
