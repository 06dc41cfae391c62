"""One pass of the real program as one of many ranks, without memory, devices or other ranks: what it would take.

Everything is torch's own: fake tensors, which have shapes and no contents, and the fake process group, whose
collectives do nothing (as torchtitan estimates its memory). Not seen: what kernels take while they run, what CUDA, NCCL
and the allocator take for themselves, and the GPU's attention, for which that of the CPU stands.
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tinsmith import BUILTIN_LOSSES, LoraConfig
from tinsmith.workers import AdapterLayout, Segment, deal
from tinsmith_fsdp import head
from tinsmith_fsdp.allocations import Allocations
from tinsmith_fsdp.architecture import architecture_of
from tinsmith_fsdp.base_model import BaseModel
from tinsmith_fsdp.batching import owners
from tinsmith_fsdp.config import FsdpConfig
from tinsmith_fsdp.costs import Ranks
from tinsmith_fsdp.full_model import FullModel
from tinsmith_fsdp.head import Scores
from tinsmith_fsdp.loss_table import LossTable
from tinsmith_fsdp.mesh import Mesh
from tinsmith_fsdp.messages import Setup
from tinsmith_fsdp.streams import Stream
from tinsmith_fsdp.trainer import Trainer, _Adapter

_OPS: Final = {"_allgather_base_": "gathered", "_reduce_scatter_base_": "reduced", "allreduce_": "summed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """Bytes on rank 0. `peak` includes `resident`, what remains between passes: weights, gradients and moments."""

    resident: int
    peak: int
    gathered: int  # what the pass received of layers and gradients, if each rank has an equal part
    reduced: int
    summed: int


def rehearse(
    config: FsdpConfig,
    model: Mapping[str, Any],  # Any: the parsed config.json
    ranks: Ranks,
    loras: Sequence[LoraConfig],
    lengths: Sequence[int],
) -> Rehearsal:
    """Run a forward and backward pass with sequences of these lengths on every rank, of these models in turn.

    A model of rank 0 is trained fully. The process group is this process's: it must not be in one.
    """
    dist.init_process_group("fake", rank=0, world_size=ranks.dp * ranks.tp, store=FakeStore())
    try:
        both = init_device_mesh("cpu", (ranks.dp, ranks.tp), mesh_dim_names=("dp", "tp"))
        mesh = Mesh(torch.device("cpu"), both["dp"], both["tp"])
        counted, fake = Allocations(), FakeTensorMode(allow_non_fake_inputs=True)
        with tempfile.TemporaryDirectory() as directory:
            kind = str(model["architectures"][0]).removesuffix("ForCausalLM").lower()
            (Path(directory) / "config.json").write_text(json.dumps({"model_type": kind, **model}))
            setup = _setup(config, model, ranks, directory)
            bases = [_Unreal(setup, mesh, fake, counted, trainable=which) for which in _copies(loras)]
            with fake, counted, _logits_of(on_cpu=ranks.on_cpu):
                run = _made(setup, mesh, bases, loras, lengths)
                resident = counted.taken
                counted.sent.clear()
                run()
    finally:
        dist.destroy_process_group()
    moved = {name: counted.sent.get(operator, 0) for operator, name in _OPS.items()}
    return Rehearsal(resident=resident, peak=counted.peak, **moved)


def _setup(config: FsdpConfig, model: Mapping[str, Any], ranks: Ranks, directory: str) -> Setup:
    return Setup(
        config=config,
        architecture=architecture_of(model, Path(directory)),
        model_path=directory,
        losses={spec.name: spec for spec in BUILTIN_LOSSES},
        dtype=ranks.dtype,
        strict=ranks.strict,
        checkpointing=ranks.checkpointing,
        compile=False,
    )


@contextmanager
def _logits_of(*, on_cpu: bool) -> Iterator[None]:
    """Have the head divide its rows as on that device."""
    before = head.CPU_LOGITS
    head.CPU_LOGITS = before if on_cpu else head.GPU_LOGITS
    try:
        yield
    finally:
        head.CPU_LOGITS = before


class _Rehearsed(Trainer):
    """Returns no scores: fake tensors have none."""

    def _pass(self, streams: Sequence[Stream], *, backward: bool) -> list[Scores]:
        super()._pass(streams, backward=backward)
        return []


class _Unreal(BaseModel):
    """Its weights are fake. All before them is on the meta device, as ever."""

    def __init__(
        self, setup: Setup, mesh: Mesh, fake: FakeTensorMode, counted: Allocations, *, trainable: bool
    ) -> None:
        self._fake, self._counted = fake, counted
        super().__init__(setup, mesh, trainable=trainable)
        self.shortage = None  # ranks that do not exist run out of nothing

    def _allocate(self, rotary: nn.Module) -> None:
        with self._fake, self._counted:
            super()._allocate(rotary)


def _copies(loras: Sequence[LoraConfig]) -> tuple[bool, ...]:
    """List the copies of the base model that there are, by whether they are trained."""
    return (False, True) if loras[0].rank == 0 else (False,)


def _made(
    setup: Setup, mesh: Mesh, bases: Sequence[BaseModel], loras: Sequence[LoraConfig], lengths: Sequence[int]
) -> Callable[[], object]:
    """Make all models with all that they ever hold. Return what runs the pass."""
    work = [
        _segment(f"m{number % len(loras)}", number, length) for number, length in enumerate([*lengths] * mesh.dp_size)
    ]
    micros = list(deal(work, mesh.dp_size, sum(lengths)))
    assert len(micros) == 1, "every rank has one micro-batch"
    if loras[0].rank == 0:
        full = FullModel(bases[1], mesh, LossTable(setup.losses))
        for part in bases[1].parts:
            part.parameter.grad = torch.zeros_like(part.parameter.detach())
        return lambda: full.run([micros[0][0]], backward=True)
    trainer = _Rehearsed(bases[0], mesh, setup)
    for number, lora in enumerate(loras):
        trainer._adapters[f"m{number}"] = _adapter(AdapterLayout(lora, setup.architecture))  # noqa: SLF001
    return lambda: trainer.run([micros[0][0]], [owners(micros[0])], True)  # noqa: FBT003


def _adapter(layout: AdapterLayout) -> _Adapter:
    weights, m, v, gradients = (torch.zeros(layout.size) for _ in range(4))
    return _Adapter(layout, weights, m, v, gradients)


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
