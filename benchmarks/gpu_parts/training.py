"""The fsdp backend on one GPU: a multi-LoRA linear layer, and whole steps of one and of sixteen tenants.

The weights are random, and made on the device. One process, one rank. Sequences have 100 to 2000 tokens, packed.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from gpu_parts.common import (
    Notes,
    Options,
    Report,
    forget_peak,
    linear_parameters,
    matmul_limit,
    measured_again,
    operations,
    peak_gib,
    seconds,
)
from gpu_parts.kernels import by_kind
from tinsmith.losses import BUILTIN_LOSSES
from tinsmith.operations import AdamParams, LoraConfig
from tinsmith_checkpoints.huggingface import DecoderShape, adapter_weights
from tinsmith_fsdp.adapter_pack import AdapterPack
from tinsmith_fsdp.admission import Budget, budget_of
from tinsmith_fsdp.architecture import read_architecture
from tinsmith_fsdp.backend import most_tokens, owners
from tinsmith_fsdp.base_model import BaseModel
from tinsmith_fsdp.config import FsdpConfig
from tinsmith_fsdp.costs import ADAPTER_BYTES, PASS_BYTES
from tinsmith_fsdp.demand import resolved_ranks
from tinsmith_fsdp.lora import MultiLoraLinear
from tinsmith_fsdp.mesh import Mesh, join_mesh
from tinsmith_fsdp.program import Setup
from tinsmith_fsdp.trainer import Trainer
from tinsmith_workers import AdapterLayout, MicroBatch, ModelStep, Segment, alone, deal, segments

LOSSES = {spec.name: spec for spec in BUILTIN_LOSSES}
TENANTS = (1, 16)
USABLE = 0.92  # of the card's memory, as in tinsmith.placement
PACKINGS = 10  # after the warm-up; none may compile anything


def run(options: Options) -> Report:
    note, limit = Notes(), matmul_limit(options)
    note("limits", matmul_tflops=limit / 1e12)
    with tempfile.TemporaryDirectory() as directory, alone() as worker:
        mesh = join_mesh(worker, options.device, FsdpConfig())
        shape = options.write_model(Path(directory))
        trainer = made_trainer(Path(directory), mesh, options)
        measured = Measured(trainer, mesh, options, budget(options, shape), 4 * linear_parameters(shape) / limit)
        models: list[str] = []
        for tenants in TENANTS:
            models = measured.models(tenants, instead_of=models)
            note(f"tenants: {tenants}", **measured.step(models))
            note(f"tenants: {tenants}, recomputed", **measured.step(models, recomputed=True))
            note(f"kernels, tenants: {tenants}", **measured.kernels(models))
        note("varying packings", **measured.packings(models))
        dist.destroy_process_group()
    note("linear", **linear(options))
    return measured_again(note.report, limit, matmul_limit(options))


def linear(options: Options) -> Report:
    """Measure what adapters add to a linear layer, forward and backward."""
    tenants, hidden = TENANTS[-1], 128 if options.toy else 4096
    shape = DecoderShape(
        class_name="Qwen3ForCausalLM", vocab_size=512, hidden_size=hidden, intermediate_size=3 * hidden, num_layers=1,
        num_heads=hidden // 32, num_kv_heads=hidden // 32, head_dim=32, max_position=2048, tied=False,
    )  # fmt: skip
    layer = MultiLoraLinear(torch.nn.Linear(hidden, 3 * hidden, bias=False), "model.layers.0.mlp.up_proj")
    layer = layer.to(options.device, options.dtype).requires_grad_(requires_grad=False)
    lora = LoraConfig(rank=options.rank, seed=0, train_attn=False, train_unembed=False)
    layout = AdapterLayout(lora, shape)
    each = options.tokens // tenants
    adapters = [(layout, torch.zeros(layout.size, device=options.device)) for _ in range(tenants)]
    pack = AdapterPack(adapters, options.dtype, backward=True)
    x = torch.randn(1, each * tenants, hidden, device=options.device, dtype=options.dtype, requires_grad=True)

    def work() -> None:
        y = layer(x)
        y.backward(torch.ones_like(y))

    layer.factors = pack.factors([each * number for number in range(1, tenants + 1)])[layer.module]
    adapted = seconds(work, options.device, options.repeats)
    layer.factors = None
    plain = seconds(work, options.device, options.repeats)
    return {"base_s": plain, "with_adapters_s": adapted, "adapters_add": adapted / plain - 1}


def made_trainer(directory: Path, mesh: Mesh, options: Options) -> Trainer:
    setup = Setup(
        config=FsdpConfig(reshard_after_forward=False),
        architecture=read_architecture(directory),
        model_path=str(directory),
        losses=LOSSES,
        dtype=str(options.dtype).removeprefix("torch."),
        strict=False,
        checkpointing=not options.toy,
        prefetch=False,  # a single rank gathers nothing
        compile=not options.toy,
    )
    base = BaseModel(setup, mesh)
    for part in base.parts:
        part.local.normal_(0, 0.02) if len(part.shape) > 1 else part.local.fill_(1.0)
    return Trainer(base, mesh, setup)


def budget(options: Options, shape: DecoderShape) -> Budget:
    """Plan with the card's memory, as the server does."""
    config = FsdpConfig(max_lora_rank=options.rank)
    ranks = resolved_ranks(config, 1, on_cpu=options.toy)
    memory = None if options.toy else int(USABLE * torch.cuda.get_device_properties(options.device).total_memory)
    return budget_of(config, shape, ranks, memory)


@dataclass(frozen=True, slots=True)
class Measured:
    trainer: Trainer
    mesh: Mesh
    options: Options
    budget: Budget
    least_s_per_token: float  # forward and the input's gradient; a frozen base has none of its own

    def models(self, tenants: int, *, instead_of: Sequence[str] = ()) -> list[str]:
        for model_id in instead_of:
            self.trainer.unload_model(model_id)
        models = [f"{tenants}-{index}" for index in range(tenants)]
        for index, model_id in enumerate(models):
            self.trainer.create_model(model_id, LoraConfig(rank=self.options.rank, seed=index))
        return models

    def step(self, models: Sequence[str], *, recomputed: bool = False) -> Report:
        """Measure forward_backward and optim_step of all models together, as planned for them, or recomputed."""
        device, repeats = self.mesh.device, 1 if recomputed else self.options.repeats
        work = self._work(models, seed=0)
        tokens = sum(segment.num_tokens for segment in work)
        micros, keeps = self._dealt(work, len(models), recomputed=recomputed)
        largest = most_tokens(micros)
        adam = [ModelStep(model_id=model_id, adam=AdamParams()) for model_id in models]
        self._run(work, recomputed=recomputed)
        self.trainer.optim_step(adam)  # from now on, all that training adds is there
        self._run(work, recomputed=recomputed)
        forget_peak(device)
        passes = seconds(lambda: self._run(work, recomputed=recomputed), device, repeats)
        of_passes = peak_gib(device)
        forget_peak(device)
        steps = seconds(lambda: self.trainer.optim_step(adam), device, repeats)
        of_steps = peak_gib(device)
        costs, per_weight = (self.budget.keeping if keeps else self.budget.costs), ADAPTER_BYTES + PASS_BYTES
        weights = len(models) * adapter_weights(self.budget.shape, self.options.rank)
        there, passing = costs.base + costs.gathered, (per_weight + costs.copies) * weights
        return {
            "tokens": tokens,
            "micro_batches": len(micros),
            "tokens_of_the_largest": largest,
            "recomputed": not keeps,
            "forward_backward_s": passes,
            "optim_step_s": steps,
            "tokens_per_s": tokens / (passes + steps),
            "share_of_matmul_limit": tokens * self.least_s_per_token / passes,
            "plan_gib": (there + passing + costs.micro_batch(largest)) / 2**30,
            "peak_gib": of_passes,
            "plan_of_step_gib": (there + (ADAPTER_BYTES + costs.stepping) * weights) / 2**30,
            "peak_of_step_gib": of_steps,
        }

    def kernels(self, models: Sequence[str]) -> Report:
        """Return where the time of the same forward_backward goes."""
        work = self._work(models, seed=0)
        return by_kind(lambda: self._run(work), self.mesh.device)

    def packings(self, models: Sequence[str]) -> Report:
        """Run batches of ever new lengths. Return how many graphs they compiled, which should be 0."""
        self._run(self._work(models, seed=1))
        number = 1 if self.options.toy else PACKINGS
        before = counters["stats"]["unique_graphs"]
        for seed in range(2, number + 2):
            self._run(self._work(models, seed=seed))
        return {"packings": number, "compiled": counters["stats"]["unique_graphs"] - before}

    def _work(self, models: Sequence[str], *, seed: int) -> list[Segment]:
        return list(segments(operations(models, self.budget.shape.vocab_size, self.options.tokens, seed=seed), LOSSES))

    def _dealt(self, work: Sequence[Segment], models: int, *, recomputed: bool) -> tuple[list[MicroBatch], bool]:
        """Return micro-batches, and whether they keep their activations: as the backend decides with so many models."""
        kept = self.budget.kept_tokens(models * self.budget.adapter)
        tokens = sum(segment.num_tokens for segment in work)
        keeps = not recomputed and kept >= min(tokens, self.budget.worth_keeping)
        return list(deal(work, 1, kept if keeps else tokens)), keeps

    def _run(self, work: Sequence[Segment], *, recomputed: bool = False) -> None:
        models = len({segment.model_id for segment in work})
        micros, keeps = self._dealt(work, models, recomputed=recomputed)
        shares, owned = [micro[0] for micro in micros], [owners(micro) for micro in micros]
        self.trainer.run(shares, owned, True, keeps)
