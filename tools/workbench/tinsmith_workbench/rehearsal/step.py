"""One training step of the real program as one of many ranks, without memory, devices or other ranks: what it takes.

Everything is torch's own: fake tensors, which have shapes and no contents, and the fake process group, whose
collectives do nothing (as torchtitan estimates its memory). Not seen: what kernels take while they run, what CUDA, NCCL
and the allocator take for themselves, and the GPU's attention, for which the CPU's attention stands in.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from tinsmith import BUILTIN_LOSSES, AdamParams, LoraConfig
from tinsmith.machine import Scratch
from tinsmith_checkpoints.values import Json
from tinsmith_fsdp.architecture import architecture_of
from tinsmith_fsdp.backend import owners
from tinsmith_fsdp.base_model import BaseModel
from tinsmith_fsdp.causal_lm import Buffer
from tinsmith_fsdp.config import FsdpConfig
from tinsmith_fsdp.costs import Ranks
from tinsmith_fsdp.full_model import FullModel
from tinsmith_fsdp.mesh import Mesh, mesh_of
from tinsmith_fsdp.program import Setup
from tinsmith_fsdp.streams import Stream
from tinsmith_fsdp.trainer import Trainer
from tinsmith_workbench.rehearsal.allocations import Allocations
from tinsmith_workers import AdapterLayout, ModelStep, NotFinite, Segment, deal
from tinsmith_workers.torch import Adapter, LossTable, Scores
from tinsmith_workers.torch.head import GPU_LOGITS

_OPS: Final = {
    "_allgather_base_": "gathered",
    "_reduce_scatter_base_": "reduced",
    "allreduce_": "summed",
    "broadcast_": "broadcast",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """Bytes on rank 0. Both peaks include `resident`, what remains between passes: weights, gradients and moments."""

    resident: int
    peak: int  # of a forward and backward pass
    step: int  # the peak of an optimizer step of all models at once
    gathered: int  # the whole tensors that collectives of the pass and the step had, by kind
    reduced: int
    summed: int
    broadcast: int


def rehearse(
    config: FsdpConfig,
    model: Mapping[str, Json],
    ranks: Ranks,
    loras: Sequence[LoraConfig],
    lengths: Sequence[int],
) -> Rehearsal:
    """Run a forward and backward pass and a step, with sequences of these lengths on every rank, of its models in turn.

    A model of rank 0 is trained fully. The process group is this process's: it must not be in one.
    """
    dist.init_process_group("fake", rank=0, world_size=ranks.dp * ranks.tp, store=FakeStore())
    try:
        mesh = mesh_of(torch.device("cpu"), ranks.dp * ranks.tp, config)
        counted, fake = Allocations(), FakeTensorMode(allow_non_fake_inputs=True)
        with Scratch("tinsmith-rehearsal-") as scratch:
            directory = scratch.path
            kind = str(model["architectures"][0]).removesuffix("ForCausalLM").lower()
            (directory / "config.json").write_text(json.dumps({"model_type": kind, **model}), encoding="utf-8")
            setup = _setup(config, model, ranks, str(directory))
            bases = [_Unreal(setup, mesh, fake, counted, trainable=which) for which in _copies(loras)]
            with fake, counted, _logits_of(on_cpu=ranks.on_cpu):
                run, step = _made(setup, mesh, bases, loras, lengths)
                resident = counted.taken
                counted.sent.clear()
                peak = _peak_of(run, counted)
                stepping = _peak_of(step, counted)
    finally:
        dist.destroy_process_group()
    assert counted.sent.keys() <= _OPS.keys(), counted.sent
    moved = {name: counted.sent.get(operator, 0) for operator, name in _OPS.items()}
    return Rehearsal(resident=resident, peak=peak, step=stepping, **moved)


def _peak_of(work: Callable[[], object], counted: Allocations) -> int:
    counted.peak = counted.taken
    work()
    return counted.peak


def _setup(config: FsdpConfig, model: Mapping[str, Any], ranks: Ranks, directory: str) -> Setup:
    return Setup(
        config=config,
        architecture=architecture_of(model, Path(directory)),
        model_path=directory,
        losses={spec.name: spec for spec in BUILTIN_LOSSES},
        dtype=ranks.dtype,
        strict=ranks.strict,
        checkpointing=ranks.checkpointing,
        prefetch=ranks.prefetch,
        compile=False,
    )


def _logits_of(*, on_cpu: bool) -> AbstractContextManager[object]:
    """Have the head divide its rows as on that device."""
    return nullcontext() if on_cpu else patch("tinsmith_workers.torch.head.CPU_LOGITS", GPU_LOGITS)


class _Rehearsed(Trainer):
    """Returns no scores, and any norms, and finds every gradient finite: fake tensors have no contents."""

    def _norms(self, adapters: Sequence[Adapter], gradients: Sequence[torch.Tensor]) -> list[float]:
        del adapters
        return [1.0] * len(gradients)

    def _not_finite(self, models: Iterable[str]) -> list[NotFinite]:
        del models
        return []

    def _pass(self, streams: Sequence[Stream], *, backward: bool) -> list[Scores]:
        super()._pass(streams, backward=backward)
        return []


class _RehearsedFull(FullModel):
    def _norm(self, gradients: Sequence[torch.Tensor]) -> float:
        del gradients
        return 1.0


class _Unreal(BaseModel):
    """Its weights are fake. All before them is on the meta device, as ever."""

    def __init__(
        self, setup: Setup, mesh: Mesh, fake: FakeTensorMode, counted: Allocations, *, trainable: bool
    ) -> None:
        self._fake, self._counted = fake, counted
        super().__init__(setup, mesh, trainable=trainable)
        self.shortage = None  # ranks that do not exist run out of nothing

    def _allocate(self, rotary: nn.Module, buffers: Mapping[str, Buffer]) -> None:
        with self._fake, self._counted:
            super()._allocate(rotary, buffers)


def _copies(loras: Sequence[LoraConfig]) -> tuple[bool, ...]:
    """List the copies of the base model that there are, by whether they are trained."""
    return (False, True) if loras[0].rank == 0 else (False,)


def _made(
    setup: Setup, mesh: Mesh, bases: Sequence[BaseModel], loras: Sequence[LoraConfig], lengths: Sequence[int]
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Make all models with all that they ever hold. Return what runs the pass, and what runs the step."""
    names = [f"m{number}" for number in range(len(loras))]
    work = [
        _segment(names[turn % len(names)], turn * mesh.dp_size + rank, length)
        for turn, length in enumerate(lengths)
        for rank in range(mesh.dp_size)
    ]
    micros = list(deal(work, mesh.dp_size, sum(lengths)))
    assert len(micros) == 1, "every rank has one micro-batch"
    adam = AdamParams(learning_rate=1e-4)
    if loras[0].rank == 0:
        full = _RehearsedFull(bases[1], mesh, LossTable(setup.losses))
        for part in bases[1].parts:
            part.parameter.grad = torch.zeros_like(part.parameter.detach())
        return lambda: full.run([micros[0][0]], backward=True), lambda: full.optim_step(adam)
    lone = _Rehearsed(bases[0], mesh, setup)
    for name, lora in zip(names, loras, strict=True):
        lone.adapters[name] = _adapter(AdapterLayout(lora, setup.architecture))
    steps = [ModelStep(model_id=name, adam=adam) for name in names]
    return (
        lambda: lone.run([micros[0][0]], [owners(micros[0])], True),  # noqa: FBT003
        lambda: lone.optim_step(steps),
    )


def _adapter(layout: AdapterLayout) -> Adapter:
    weights, m, v, gradients = (torch.zeros(layout.size) for _ in range(4))
    return Adapter(layout, weights, m, v, gradients)


def _segment(model_id: str, number: int, length: int) -> Segment:
    tokens = np.zeros(length, np.int64)
    targets, weights = tokens[:, None], np.ones((length, 1), np.float32)
    return Segment(
        model_id=model_id,
        index=number,
        position=0,
        tokens_T=tokens,
        targets_TK=targets,
        loss_fn="cross_entropy",
        loss_inputs={"weights": weights},
        loss_config={},
    )
