"""The engine's side of the megatron backend: checks operations, deals them out to the ranks, collects the results."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from tinsmith import (
    BackendContext,
    CreateModel,
    ForwardBackward,
    ForwardBackwardOutput,
    ReplayedExperts,
    TrainerCapabilities,
)
from tinsmith_checkpoints.huggingface import DecoderShape
from tinsmith_megatron.admission import STRICT_SEQUENCES, Budget, budget_of
from tinsmith_megatron.architecture import read_architecture
from tinsmith_megatron.config import MegatronConfig
from tinsmith_megatron.parallel import check_model, check_ranks, expert_layers, part_of, smallest_group
from tinsmith_megatron.program import Loaded, Program, Setup
from tinsmith_workers import (
    AdapterModelState,
    Answer,
    FullModelState,
    MakeLauncher,
    MicroBatch,
    Segment,
    WorkerDevice,
    WorkerGroup,
    WorkersBackend,
    combined_outputs,
    one_by_one,
    segments,
    start_ranks,
)

PROGRAM = "tinsmith_megatron.rank:Rank"  # of the workers


class MegatronBackend(WorkersBackend[MegatronConfig, Setup, Loaded]):
    """Does not import torch."""

    ranks: WorkerGroup[Program]
    _budget: Budget

    def __init__(
        self, config: MegatronConfig, context: BackendContext, launch_with: MakeLauncher | None = None
    ) -> None:
        self.architecture = read_architecture(context.model_directory)
        check_model(config, self.architecture.shape)
        environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}  # Megatron orders its kernels by it
        if config.device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        least = smallest_group(config)
        ranks = start_ranks(PROGRAM, config, context, launch_with, least=least, environment=environment)
        super().__init__(ranks, config, context)
        self._parts = [part_of(each.coordinates, config, self.architecture.shape) for each in self.loaded]

    def prepare(self, device: WorkerDevice, context: BackendContext) -> tuple[Budget, Setup]:
        check_ranks(self.config, len(self.ranks))
        memory, on_cpu = device.usable_bytes(context.placement), device.type == "cpu"
        budget = budget_of(self.config, self.architecture.shape, len(self.ranks), memory, on_cpu=on_cpu)
        budget.require_enough()
        return budget, Setup(
            config=self.config,
            architecture=self.architecture,
            model_path=str(context.model_directory),
            losses=self.sendable_losses(),
            dtype=budget.dtype,
            strict=budget.strict,
            checkpointing=budget.layout.recompute,
            memory_share=device.allocator_share(context.placement, budget.runtime),
        )

    def describe(self, device: WorkerDevice) -> TrainerCapabilities:
        return replace(super().describe(device), replayed_experts=_replayed_experts(self.architecture.shape))

    @property
    def max_full_models(self) -> int:
        """0 for hybrids and with latents."""
        plain = self.architecture.hybrid is None and self.architecture.latent is None
        return self.config.max_full_models if plain else 0

    # life of a model

    def make_adapter(self, op: CreateModel) -> AdapterModelState:
        self.ranks.call(Program.create_model, op.model_id, op.lora)
        return AdapterModelState(op.model_id, op.lora, self.ranks, self.architecture.shape, self._parts)

    def make_full(self, op: CreateModel) -> FullModelState:
        made = self.ranks.call(Program.create_full_model, op.model_id)
        shapes = {name: shape for own in made for name, shape in own.items()}
        return FullModelState(op.model_id, op.lora, self.ranks, shapes, self.state_files)

    # training

    def run_adapters(self, ops: Sequence[ForwardBackward], *, backward: bool) -> list[ForwardBackwardOutput]:
        micros = self.micro_batches(list(segments(ops, self.losses)))
        counted = self.setup.strict and self._budget.memory is not None
        size = STRICT_SEQUENCES if counted else max(1, len(micros))
        scored = (self._run_micros(micros[n : n + size], backward=backward) for n in range(0, len(micros), size))
        return combined_outputs(ops, chain.from_iterable(scored))

    def _run_micros(self, micros: Sequence[MicroBatch], *, backward: bool) -> list[list[Answer]]:
        models = [[segment.model_id for share in micro for segment in share] for micro in micros]
        return self.ranks.call_each(Program.run, [(share, models, backward) for share in self.shares(micros)])

    def micro_batches(self, work: Sequence[Segment]) -> list[MicroBatch]:
        """Where experts are divided, ranks compute each other's rows: then one sequence runs at a time."""
        if self.setup.strict and self.config.expert_parallel > 1:
            return list(one_by_one(work, 1))
        return super().micro_batches(work)

    def shares(self, micros: Sequence[MicroBatch]) -> list[list[list[Segment]]]:
        """A rank gets the replayed experts of its layers."""
        shape = self.architecture.shape
        ranks = [
            (each.coordinates.dp_rank, expert_layers(shape, part.layers))
            for each, part in zip(self.loaded, self._parts, strict=True)
        ]
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
    num_layers = len(expert_layers(shape, range(shape.num_layers)))
    return ReplayedExperts(num_layers=num_layers, num_experts=experts.num_experts, top_k=experts.top_k)
