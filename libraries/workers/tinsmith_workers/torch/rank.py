"""The program of a worker's process, for every strategy: it finds a device, loads the model, and calls the trainer."""

import gc
import os
import warnings
from abc import abstractmethod
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from tinsmith_workers.launching import DEVICE
from tinsmith_workers.program import LoadingProgram, TrainingProgram, TrainingSetup, WorkerDevice
from tinsmith_workers.serving import Worker
from tinsmith_workers.torch.process_group import find_device, worker_device

Setup = TypeVar("Setup", bound=TrainingSetup[Any, Any])
Loaded = TypeVar("Loaded")
Trainer = TypeVar("Trainer", bound=TrainingProgram)


class TorchRank(LoadingProgram[Setup, Loaded], Generic[Setup, Loaded, Trainer]):
    """The program of the workers. Besides the methods below, it has the trainer's."""

    _trainer: Trainer  # once the model is loaded

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._device = find_device(os.environ.get(DEVICE), worker.local_rank)

    def device(self) -> WorkerDevice:
        return worker_device(self._device)

    def load(self, setup: Setup) -> Loaded:
        if self._device.type == "cpu" or setup.strict:  # elsewhere nothing claims it, and it costs time in many kernels
            torch.use_deterministic_algorithms(mode=True, warn_only=True)
            warnings.filterwarnings("ignore", message=".*deterministic", category=UserWarning)
        if setup.memory_share is not None and self._device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(setup.memory_share, self._device)
        self._trainer, loaded = self._loaded(setup)
        gc.collect()
        gc.freeze()  # what imports and loading made stays: later collections need not look at it
        return loaded

    @abstractmethod
    def _loaded(self, setup: Setup) -> tuple[Trainer, Loaded]:
        """Join the others, and load this rank's part of the model."""

    def _report(self, fraction: float) -> None:
        if self._worker.rank == 0:
            self._worker.report("loading weights", fraction)

    def __getattr__(self, name: str) -> Any:
        if name == "_trainer":
            msg = "the model is not loaded"
            raise AttributeError(msg)
        return getattr(self._trainer, name)

    def close(self) -> None:
        if dist.is_initialized():
            dist.barrier()  # a rank that leaves early would look dead to the others
