"""The engine's side of the megatron backend: checks operations, deals them out to the ranks, collects the results."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from tinsmith import (
    BackendContext,
    Capabilities,
    CreateModel,
    ForwardBackward,
    ForwardBackwardOutput,
    LoraConfig,
    Placement,
    ReplayedExperts,
)
from tinsmith.huggingface import DecoderShape
from tinsmith.workers import (
    AdapterModelState,
    Answer,
    FullModelState,
    MakeLauncher,
    MicroBatch,
    Segment,
    StateFiles,
    WorkerDevice,
    WorkerGroup,
    WorkersBackend,
    agreed_device,
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
from tinsmith_megatron.messages import Setup
from tinsmith_megatron.parallel import check_model, check_ranks, part_of, smallest_group
from tinsmith_megatron.program import Program

PROGRAM = "tinsmith_megatron.rank:Rank"  # of the workers
_MAX_TARGETS = 128  # per token; [T, K] arrays of a micro-batch must fit
FAST_ISOLATION_ERROR = 1e-4
"""A bound on what company changes in one step, which the contracts check on CPU in float32. Not measured on GPUs.

Rounding differences grow with the steps: twenty of them on a tiny model with experts end up to 5e-3 apart."""


class MegatronBackend(WorkersBackend):
    """Does not import torch."""

    ranks: WorkerGroup[Program]

    def __init__(
        self, config: MegatronConfig, context: BackendContext, launch_with: MakeLauncher | None = None
    ) -> None:
        self.architecture = read_architecture(context.model_directory)
        check_model(config, self.architecture.shape)
        self._config = config
        super().__init__(
            _start(config, context, launch_with),
            context.losses,
            max_models=config.max_models,
            max_full_models=config.max_full_models,
            max_lora_rank=config.max_lora_rank,
        )
        try:
            self._state_files = StateFiles(
                self.ranks, context.cache_dir / "state", shard_bytes=context.checkpoint_shard_bytes
            )
            check_ranks(config, len(self.ranks))
            device = agreed_device(self.ranks.call(Program.device), config.device, DEVICE)
            self._budget = self._admitted(device, context.placement)
            self._setup = self._decide(device, context)
            self.loaded = self.ranks.call(Program.load, self._setup)
            self._parts = [part_of(each.place, config, self.architecture.shape) for each in self.loaded]
            self._dp_size = 1 + max(each.place.dp_rank for each in self.loaded)
            self._capabilities = self._describe(device)
        except BaseException:
            self.ranks.close()
            raise

    def _admitted(self, device: WorkerDevice, placement: Placement) -> Budget:
        """Divide a rank's memory. Raise ConfigError if it is not enough for one model."""
        shape, on_cpu = self.architecture.shape, device.type == "cpu"
        memory = device.usable_bytes(placement)
        budget = budget_of(self._config, shape, len(self.ranks), memory, on_cpu=on_cpu)
        budget.require_enough()
        return budget

    def _decide(self, device: WorkerDevice, context: BackendContext) -> Setup:
        """Resolve the settings that are left open."""
        budget = self._budget
        return Setup(
            config=self._config,
            architecture=self.architecture,
            model_path=str(context.model_directory),
            losses=self.sendable_losses(),
            dtype=budget.dtype,
            strict=budget.strict,
            checkpointing=budget.layout.recompute,
            memory_share=device.allocator_share(context.placement, budget.runtime),
        )

    def _describe(self, device: WorkerDevice) -> Capabilities:
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
            replayed_experts=_replayed_experts(shape),
            max_targets_per_token=_MAX_TARGETS,
            deterministic=on_cpu,
            isolation="bitwise" if exact else "close",
            isolation_error=0.0 if exact or not on_cpu else FAST_ISOLATION_ERROR,
        )

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    # life of a model

    def check_memory(self, lora: LoraConfig) -> None:
        self._budget.check(lora, [model.lora.rank for model in self._models.values()])

    def make_adapter(self, op: CreateModel) -> AdapterModelState:
        self.ranks.call(Program.create_model, op.model_id, op.lora)
        return AdapterModelState(op.model_id, op.lora, self.ranks, self.architecture.shape, self._parts)

    def make_full(self, op: CreateModel) -> FullModelState:
        self._state_files.check()
        made = self.ranks.call(Program.create_full_model, op.model_id)
        shapes = {name: shape for own in made for name, shape in own.items()}
        return FullModelState(op.model_id, op.lora, self.ranks, shapes, self._state_files)

    # training

    def run_adapters(self, ops: Sequence[ForwardBackward], *, backward: bool) -> list[ForwardBackwardOutput]:
        micros = self._micro_batches(ops)
        counted = self._setup.strict and self._budget.memory is not None
        size = STRICT_SEQUENCES if counted else max(1, len(micros))
        scored = (self._run_micros(micros[n : n + size], backward=backward) for n in range(0, len(micros), size))
        return combined_outputs(ops, chain.from_iterable(scored))

    def _run_micros(self, micros: Sequence[MicroBatch], *, backward: bool) -> list[list[Answer]]:
        models = [[segment.model_id for share in micro for segment in share] for micro in micros]
        return self.ranks.call_each(Program.run, [(share, models, backward) for share in self._shares(micros)])

    def run_full(self, op: ForwardBackward, *, backward: bool) -> ForwardBackwardOutput:
        shares = [(op.model_id, share, backward) for share in self._shares(self._micro_batches([op]))]
        (output,) = combined_outputs([op], self.ranks.call_each(Program.run_full, shares))
        return output

    def _micro_batches(self, ops: Sequence[ForwardBackward]) -> list[MicroBatch]:
        work = list(segments(ops, self._losses))
        if not self._setup.strict:
            return list(deal(work, self._dp_size, self._budget.micro_tokens))
        # Where experts are divided, ranks compute each other's rows: then one sequence runs at a time.
        return list(one_by_one(work, 1 if self._config.expert_parallel > 1 else self._dp_size))

    def _shares(self, micros: Sequence[MicroBatch]) -> list[list[list[Segment]]]:
        """Give each rank its part of every micro-batch, and of replayed experts those of its layers."""
        ranks = [(each.place.dp_rank, part.layers) for each, part in zip(self.loaded, self._parts, strict=True)]
        return [
            [[_on_layers(segment, layers) for segment in micro[rank]] if rank < len(micro) else [] for micro in micros]
            for rank, layers in ranks
        ]


def _on_layers(segment: Segment, layers: range) -> Segment:
    if segment.experts_TLC is None:
        return segment
    return replace(segment, experts_TLC=segment.experts_TLC[:, layers.start : layers.stop])


def _replayed_experts(shape: DecoderShape) -> ReplayedExperts | None:
    experts = shape.experts
    if experts is None:
        return None
    return ReplayedExperts(num_layers=shape.num_layers, num_experts=experts.num_experts, top_k=experts.top_k)


def _start(config: MegatronConfig, context: BackendContext, launch_with: MakeLauncher | None) -> WorkerGroup[Program]:
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
        PROGRAM,
        config,
        context.progress,
        environment=environment,
        gpus=None if config.device is None else config.device == "cuda",
        default_per_node=gpus or smallest_group(config),
        launch_with=launch_with,
    )
