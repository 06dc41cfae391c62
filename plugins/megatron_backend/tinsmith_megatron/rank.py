"""What runs in the process of one rank: loads its part of the model, and calls the trainer."""

import gc
import os
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tinsmith.torch_workers import find_device, worker_device
from tinsmith.workers import LoadingProgram, Worker, WorkerDevice, holders
from tinsmith_megatron.environment import DEVICE
from tinsmith_megatron.messages import Loaded, Setup
from tinsmith_megatron.parallel import part_of

if TYPE_CHECKING:
    from tinsmith_megatron.megatron_here import Trainer


class Rank(LoadingProgram[Setup, Loaded]):
    """The program of the workers. Besides the methods below, it has the trainer's."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._device = find_device(os.environ.get(DEVICE), worker.local_rank)
        self._trainer: Trainer | None = None

    def device(self) -> WorkerDevice:
        return worker_device(self._device)

    def load(self, setup: Setup) -> Loaded:
        if self._device.type == "cpu" or setup.strict:  # elsewhere nothing claims it, and it costs time in many kernels
            torch.use_deterministic_algorithms(mode=True, warn_only=True)
            warnings.filterwarnings("ignore", message=".*deterministic", category=UserWarning)
        if setup.memory_share is not None and self._device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(setup.memory_share, self._device)
        from tinsmith_megatron.megatron_here import LossTable, Stage, Trainer, WeightReader, groups

        groups.join(self._worker, self._device, setup.config)
        place, losses = groups.own_place(), LossTable(setup.losses)
        part = part_of(place, setup.config, setup.architecture.shape)
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, part)
        stage, reader = None, WeightReader(setup, place)
        if setup.config.max_lora_rank:
            stage = Stage(setup, losses).to(self._device)
            reader.fill(stage, self._report)
        is_holder = self._worker.rank == holders(everyones)[part]
        self._trainer = Trainer(stage, setup, losses, place, part, self._device, is_holder=is_holder)
        gc.collect()
        gc.freeze()  # what imports and loading made stays: later collections need not look at it
        size = sum(parameter.numel() * parameter.element_size() for parameter in (stage.parameters() if stage else ()))
        return Loaded(place=place, parameter_bytes=size, read_bytes=reader.read_bytes)

    def _report(self, fraction: float) -> None:
        if self._worker.rank == 0:
            self._worker.report("loading weights", fraction)

    def __getattr__(self, name: str) -> Any:  # Any: the trainer's methods
        return getattr(self._trainer, name)

    def close(self) -> None:
        if dist.is_initialized():
            dist.barrier()  # a rank that leaves early would look dead to the others
