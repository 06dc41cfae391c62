"""A worker's device, the process group of all workers, and its collectives."""

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, and not in its __all__

from tinsmith.backend import Device
from tinsmith.machine import count_gpus, lacks_gpus
from tinsmith_workers import WorkerDevice
from tinsmith_workers.serving import Worker


def _either(name: str, earlier: str) -> Any:
    """Return what torch has under its name since 2.13, or the one of earlier releases."""
    return getattr(dist, name, None) or getattr(dist, earlier)


all_gather_single: Final = _either("all_gather_single", "all_gather_into_tensor")
"""(whole, part, group): put all ranks' parts into one tensor, by rank."""

reduce_scatter_single: Final = _either("reduce_scatter_single", "reduce_scatter_tensor")
"""(part, whole, group): add up the ranks' tensors, and leave each rank its part of the sum."""

_TIMEOUT = timedelta(minutes=30)  # per collective; a dead rank is noticed long before, by its connection
_REMEDY: Final = (
    "install a driver that is new enough for this torch, or a torch that is built for CUDA and this driver "
    "(https://pytorch.org/get-started/locally); `device: cpu` computes on the CPU"
)


def local_devices(wanted: str | None = None) -> Sequence[Device]:
    """Return this node's GPUs, or its CPU. Raise ConfigError as `find_device` does."""
    if not _computes_on_gpus(wanted):
        return [Device(name="cpu")]
    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return [Device(name=gpu.name, memory_bytes=gpu.total_memory) for gpu in gpus]


def find_device(wanted: str | None, local_rank: int) -> torch.device:
    """Choose a worker's device: what is `wanted`, else a GPU if this machine offers one. Call it before any collective.

    Raise ConfigError if torch cannot use the GPU.
    """
    if not _computes_on_gpus(wanted):
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())  # Ray shows each rank its own GPU alone
    torch.cuda.set_device(device)
    return device


def _computes_on_gpus(wanted: str | None) -> bool:
    if wanted == "cpu":
        return False
    if not torch.cuda.is_available() and (wanted == "cuda" or count_gpus()):
        raise lacks_gpus(f"torch {torch.__version__}", _reason(), _REMEDY)
    return torch.cuda.is_available()


def _reason() -> str:
    """Return why torch sees no GPU: its driver is too old, or it was built for CPUs."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().rstrip(".")
    return "torch.cuda.is_available() is False"


def worker_device(device: torch.device) -> WorkerDevice:
    """Describe a worker's device to the engine."""
    if device.type == "cpu":
        return WorkerDevice(type="cpu", name="CPU rank")
    found = torch.cuda.get_device_properties(device)
    return WorkerDevice(type="cuda", name=found.name, memory_bytes=found.total_memory)


def join_process_group(worker: Worker, device: torch.device) -> None:
    """Join the default process group of all workers: gloo, and NCCL between GPUs."""
    if worker.local_size == worker.num_workers and sys.platform == "linux":
        # both would listen where other machines may reach them
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        store=_store(worker),
        rank=worker.rank,
        world_size=worker.num_workers,
        timeout=_TIMEOUT,
    )


def _store(worker: Worker) -> TCPStore:
    host, port = worker.meeting
    if worker.meeting_socket is None:
        return TCPStore(host, port, worker.num_workers, is_master=False, timeout=_TIMEOUT)
    worker.meeting_socket.listen()
    return TCPStore(
        host,
        port,
        worker.num_workers,
        is_master=True,
        timeout=_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=os.dup(worker.meeting_socket.fileno()),
    )
