"""The engine's side of the megatron backend: checks operations, deals them out to the ranks, collects the results."""

import pickle
from collections.abc import Sequence
from itertools import chain

from tinsmith import (
    Array,
    BackendContext,
    Capabilities,
    CapacityError,
    ConfigError,
    CreateModel,
    Failed,
    FloatArray,
    Forward,
    ForwardBackward,
    ForwardBackwardOutput,
    HostSnapshot,
    ModelState,
    NotFoundError,
    OptimStep,
    OptimStepOutput,
    Placement,
    Snapshot,
    TrainingBackend,
    UserError,
)
from tinsmith.workers import (
    FullModelState,
    MakeLauncher,
    MicroBatch,
    Scored,
    Segment,
    StateFiles,
    WorkerGroup,
    combined_outputs,
    count_gpus,
    deal,
    one_by_one,
    segments,
)
from tinsmith_megatron.admission import STRICT_SEQUENCES, Budget, budget_of
from tinsmith_megatron.architecture import read_architecture
from tinsmith_megatron.config import MegatronConfig
from tinsmith_megatron.environment import DEVICE
from tinsmith_megatron.layout import WholeLayout
from tinsmith_megatron.messages import AdapterState, Loaded, RankDevice, Setup, Step
from tinsmith_megatron.parallel import check_model, check_ranks, holders, part_of, smallest_group

_MAX_TARGETS = 128  # per token; [T, K] arrays of a micro-batch must fit
FAST_ISOLATION_ERROR = 1e-4
"""A bound on what company changes in one step, which the contracts check on CPU in float32. Not measured on GPUs.

Rounding differences grow with the steps: twenty of them on a tiny model with experts end up to 5e-3 apart."""


class MegatronBackend(TrainingBackend):
    """Does not import torch. Called from one thread. Any exception other than UserError leaves it unusable."""

    def __init__(
        self, config: MegatronConfig, context: BackendContext, launch_with: MakeLauncher | None = None
    ) -> None:
        self.architecture = read_architecture(context.model_directory)
        check_model(config, self.architecture.shape)
        self._config = config
        self._losses = dict(context.losses)
        self._models: dict[str, WholeLayout | FullModelState] = {}
        self.ranks = _start(config, context, launch_with)
        try:
            self._state_files = StateFiles(
                self.ranks, context.cache_dir / "state", shard_bytes=context.checkpoint_shard_bytes
            )
            check_ranks(config, len(self.ranks))
            device: RankDevice = self.ranks.call("device")[0]
            self._budget = self._admitted(device, context.placement)
            self._setup = self._decide(device, context)
            self.loaded = self._load()
            self._parts = [part_of(each.place, config, self.architecture.shape) for each in self.loaded]
            self._holders = dict(holders(self._parts))
            self._dp_size = 1 + max(each.place.dp_rank for each in self.loaded)
            self._capabilities = self._describe(device)
        except BaseException:
            self.ranks.close()
            raise

    def _admitted(self, device: RankDevice, placement: Placement) -> Budget:
        """Divide a rank's memory. Raise ConfigError if it is not enough for one model."""
        memory = placement.memory_bytes
        if memory is None and device.memory_bytes is not None:
            memory = device.memory_bytes * 92 // 100  # the driver, and gaps, take the rest
        shape, on_cpu = self.architecture.shape, device.type == "cpu"
        budget = budget_of(self._config, shape, len(self.ranks), memory, on_cpu=on_cpu)
        budget.require_enough()
        return budget

    def _decide(self, device: RankDevice, context: BackendContext) -> Setup:
        """Resolve the settings that are left open."""
        budget, share = self._budget, None
        if context.placement.memory_bytes is not None and device.memory_bytes is not None:
            share = min(1.0, (context.placement.memory_bytes - budget.runtime) / device.memory_bytes)
        return Setup(
            config=self._config,
            architecture=self.architecture,
            model_path=str(context.model_directory),
            losses=self._losses,
            dtype=budget.dtype,
            strict=budget.strict,
            checkpointing=budget.layout.recompute,
            memory_share=share,
        )

    def _load(self) -> list[Loaded]:
        """Have every rank load its part of the model. Raise ConfigError if the model's files are at fault."""
        try:
            pickle.dumps(self._setup.losses)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            msg = f"a registered loss cannot be sent to the ranks: {error}; define per_token at the top of its module"
            raise ConfigError(msg) from error
        return self.ranks.call("load", self._setup)

    def _describe(self, device: RankDevice) -> Capabilities:
        shape, on_cpu = self.architecture.shape, device.type == "cpu"
        exact = on_cpu and self._setup.strict and self._setup.dtype == "float32"
        return Capabilities(
            device=f"{len(self.ranks)} x {device.name}",
            dtype=self._setup.dtype,
            vocab_size=shape.vocab_size,
            max_context_tokens=self._budget.context_tokens,
            max_batch_tokens=self._budget.micro_tokens * self._dp_size,
            max_models=self._budget.max_models,
            max_full_models=self._config.max_full_models,
            full_fine_tuning=self._config.max_full_models > 0,
            losses=frozenset(self._losses),
            max_lora_rank=self._config.max_lora_rank,
            lora_targets=frozenset({"attn", "mlp", "unembed"}),
            max_targets_per_token=_MAX_TARGETS,
            deterministic=on_cpu,
            isolation="bitwise" if exact else "close",
            isolation_error=0.0 if exact or not on_cpu else FAST_ISOLATION_ERROR,
        )

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def close(self) -> None:
        self.ranks.close()

    # life of a model

    def create_model(self, op: CreateModel) -> None:
        if len(self._models) >= self._config.max_models:
            msg = f"all {self._config.max_models} models are in use: end a session, or raise the backend's max_models"
            raise CapacityError(msg)
        if op.lora.rank <= self._config.max_lora_rank:  # else it is refused for its rank
            self._budget.check(op.lora, [model.lora.rank for model in self._models.values()])
        if op.lora.rank == 0:
            self._create_full(op)
            return
        if not 1 <= op.lora.rank <= self._config.max_lora_rank:
            limit = self._config.max_lora_rank
            allowed = (
                f"1 to {limit}, the backend's max_lora_rank" if limit else "none: the backend's max_lora_rank is 0"
            )
            msg = f"LoRA rank {op.lora.rank} is not served: allowed are {allowed}"
            raise UserError(msg)
        self._models[op.model_id] = WholeLayout(op.lora, self.architecture.shape, list(self._holders.values()))
        self.ranks.call("create_model", op.model_id, op.lora)

    def _create_full(self, op: CreateModel) -> None:
        limit = self._config.max_full_models
        if sum(isinstance(model, FullModelState) for model in self._models.values()) >= limit:
            msg = (
                "no room for one more model of LoRA rank 0 (full fine-tuning): the backend's max_full_models is "
                f"{limit}; end the session that has one, raise the setting, or train a LoRA adapter"
            )
            raise CapacityError(msg)
        self._state_files.check()
        made: list[dict[str, tuple[int, ...]]] = self.ranks.call("create_full_model", op.model_id)
        shapes = {name: shape for own in made for name, shape in own.items()}
        self._models[op.model_id] = FullModelState(op.model_id, op.lora, self.ranks, shapes, self._state_files)

    def unload_model(self, model_id: str) -> None:
        if self._models.pop(model_id, None) is not None:
            self.ranks.call("unload_model", model_id)

    def capture_state(self, model_id: str) -> ModelState:
        layout = self._model(model_id)
        if isinstance(layout, FullModelState):
            return layout.capture()
        answers: list[AdapterState] = self.ranks.call("capture_adapter", model_id)
        states = [answers[rank] for rank in self._holders]

        def named(flats: Sequence[FloatArray | None]) -> dict[str, Array]:
            present = [flat for flat in flats if flat is not None]
            return layout.to_canonical(present) if present else {}

        return ModelState(
            lora=layout.lora,
            weights=named([state.weights for state in states]),
            adam_m=named([state.adam_m for state in states]),
            adam_v=named([state.adam_v for state in states]),
            gradients=named([state.gradients for state in states]),
            step=states[0].step,
        )

    def restore_state(self, model_id: str, state: ModelState) -> None:
        layout = self._model(model_id)
        if isinstance(layout, FullModelState):
            layout.restore(state)
            return
        kinds = [
            layout.from_canonical(kind) if kind else [None] * len(layout.parts)
            for kind in (state.weights, state.adam_m, state.adam_v, state.gradients)
        ]
        by_part = {
            part: AdapterState(weights=weights, adam_m=m, adam_v=v, gradients=gradients, step=state.step)
            for part, weights, m, v, gradients in zip(self._holders.values(), *kinds, strict=True)
        }
        self.ranks.call_each("restore_adapter", [(model_id, by_part[part]) for part in self._parts])

    def publish(self, model_id: str, snapshot_id: str) -> Snapshot:
        layout = self._model(model_id)
        if isinstance(layout, FullModelState):
            return layout.publish(snapshot_id)
        answers = self.ranks.call("adapter_weights", model_id)
        weights = layout.to_canonical([answers[rank] for rank in self._holders])
        return HostSnapshot(snapshot_id, layout.lora, weights)

    def _model(self, model_id: str) -> WholeLayout | FullModelState:
        if model_id not in self._models:
            raise NotFoundError(_unknown(model_id).message)
        return self._models[model_id]

    # training

    def forward(self, ops: Sequence[Forward]) -> list[ForwardBackwardOutput | Failed]:
        return self._run(ops, backward=False)

    def forward_backward(self, ops: Sequence[ForwardBackward]) -> list[ForwardBackwardOutput | Failed]:
        return self._run(ops, backward=True)

    def optim_step(self, ops: Sequence[OptimStep]) -> list[OptimStepOutput | Failed]:
        steps = [Step(model_id=op.model_id, adam=op.adam) for op in ops if op.model_id in self._models]
        norms = iter(self.ranks.call("optim_step", steps)[0] if steps else ())
        return [
            OptimStepOutput(metrics={"grad_norm": next(norms)})
            if op.model_id in self._models
            else _unknown(op.model_id)
            for op in ops
        ]

    def _run(self, ops: Sequence[ForwardBackward], *, backward: bool) -> list[ForwardBackwardOutput | Failed]:
        refused = {index: failure for index, op in enumerate(ops) if (failure := self._refusal(op)) is not None}
        good = [op for index, op in enumerate(ops) if index not in refused]
        whole = [isinstance(self._models[op.model_id], FullModelState) for op in good]
        adapted = iter(
            self._run_adapters([op for op, full in zip(good, whole, strict=True) if not full], backward=backward)
        )
        outputs = iter(
            [
                self._run_full(op, backward=backward) if full else next(adapted)
                for op, full in zip(good, whole, strict=True)
            ]
        )
        return [refused[index] if index in refused else next(outputs) for index in range(len(ops))]

    def _run_adapters(self, ops: Sequence[ForwardBackward], *, backward: bool) -> list[ForwardBackwardOutput]:
        """Run the operations of LoRA models together."""
        micros = self._micro_batches(ops)
        counted = self._setup.strict and self._budget.memory is not None
        size = STRICT_SEQUENCES if counted else max(1, len(micros))
        scored = (self._run_micros(micros[n : n + size], backward=backward) for n in range(0, len(micros), size))
        return combined_outputs(ops, chain.from_iterable(scored))

    def _run_micros(self, micros: Sequence[MicroBatch], *, backward: bool) -> list[list[Scored]]:
        models = [[segment.model_id for share in micro for segment in share] for micro in micros]
        return self.ranks.call_each("run", [(share, models, backward) for share in self._shares(micros)])

    def _run_full(self, op: ForwardBackward, *, backward: bool) -> ForwardBackwardOutput:
        """Run one operation by itself: the model has its own weights, so there is nothing to share with others."""
        shares = [(op.model_id, share, backward) for share in self._shares(self._micro_batches([op]))]
        (output,) = combined_outputs([op], self.ranks.call_each("run_full", shares))
        return output

    def _micro_batches(self, ops: Sequence[ForwardBackward]) -> list[MicroBatch]:
        work = list(segments(ops, self._losses))
        if not self._setup.strict:
            return list(deal(work, self._dp_size, self._budget.micro_tokens))
        # Where experts are divided, ranks compute each other's rows: then one sequence runs at a time.
        return list(one_by_one(work, 1 if self._config.expert_parallel > 1 else self._dp_size))

    def _shares(self, micros: Sequence[MicroBatch]) -> list[list[list[Segment]]]:
        """Give each rank its part of every micro-batch."""
        ranks = (each.place.dp_rank for each in self.loaded)
        return [[micro[rank] if rank < len(micro) else [] for micro in micros] for rank in ranks]

    def _refusal(self, op: ForwardBackward) -> Failed | None:
        """Refuse an unknown model or loss. Core has already checked everything else against the capabilities."""
        if op.model_id not in self._models:
            return _unknown(op.model_id)
        if op.loss_fn not in self._losses:
            return Failed(message=f"no loss named {op.loss_fn!r}, known: {', '.join(sorted(self._losses))}")
        return None


def _start(config: MegatronConfig, context: BackendContext, launch_with: MakeLauncher | None) -> WorkerGroup:
    devices = context.placement.devices
    gpus = 0 if config.device == "cpu" else len(devices) or count_gpus()
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}  # Megatron orders its kernels by it
    if devices:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    if config.device is not None:
        environment[DEVICE] = config.device
    if config.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return WorkerGroup(
        "tinsmith_megatron.rank:Rank",
        config,
        context.progress,
        environment=environment,
        gpus=None if config.device is None else config.device == "cuda",
        default_per_node=gpus or smallest_group(config),
        launch_with=launch_with,
    )


def _unknown(model_id: str) -> Failed:
    return Failed(message=f"no model {model_id!r} in training: it was never created, or has been unloaded")
