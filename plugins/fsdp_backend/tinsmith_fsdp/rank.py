"""What runs in the process of one rank: loads its part of the model, and calls the trainer."""

import gc
import os
import warnings
from typing import Any

import torch
import torch.distributed as dist

from tinsmith.torch_workers import find_device, worker_device
from tinsmith.workers import LoadingProgram, Worker, WorkerDevice
from tinsmith_fsdp.base_model import BaseModel
from tinsmith_fsdp.environment import DEVICE
from tinsmith_fsdp.mesh import join_mesh
from tinsmith_fsdp.messages import Loaded, Setup
from tinsmith_fsdp.trainer import Trainer


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
        mesh = join_mesh(self._worker, self._device, setup.config)

        def report(fraction: float) -> None:
            if self._worker.rank == 0:
                self._worker.report("loading weights", fraction)

        base = BaseModel(setup, mesh)
        base.load(report)
        self._trainer = Trainer(base, mesh, setup)
        gc.collect()
        gc.freeze()  # what imports and loading made stays: later collections need not look at it
        return base.loaded()

    def __getattr__(self, name: str) -> Any:  # Any: the trainer's methods
        return getattr(self._trainer, name)

    def close(self) -> None:
        if dist.is_initialized():
            dist.barrier()  # a rank that leaves early would look dead to the others
