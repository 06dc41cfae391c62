"""The process group and the device mesh: axes dp (sequences and shards) and tp (parts of each layer's matrices)."""

import os
import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, and not in its __all__
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tinsmith.workers import Worker

_TIMEOUT = timedelta(minutes=30)  # per collective; a dead rank is noticed long before, by its connection


@dataclass(frozen=True, slots=True)
class Mesh:
    """All ranks, numbered dp-major: rank = dp_rank * tp_size + tp_rank."""

    device: torch.device
    dp: DeviceMesh
    tp: DeviceMesh

    @property
    def dp_size(self) -> int:
        return self.dp.size()

    @property
    def tp_size(self) -> int:
        return self.tp.size()

    @property
    def dp_rank(self) -> int:
        return self.dp.get_local_rank()

    @property
    def tp_rank(self) -> int:
        return self.tp.get_local_rank()


def find_device(wanted: str | None, local_rank: int) -> torch.device:
    """Choose this rank's device. Call it before any collective."""
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())  # Ray shows each rank its own GPU alone
    torch.cuda.set_device(device)
    return device


def make_mesh(worker: Worker, device: torch.device, tensor_parallel: int) -> Mesh:
    """Join the process group of all ranks."""
    if worker.local_size == worker.num_workers and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name may resolve to an interface that does not exist
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend, store=_store(worker), rank=worker.rank, world_size=worker.num_workers, timeout=_TIMEOUT
    )
    shape = (worker.num_workers // tensor_parallel, tensor_parallel)
    both = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "tp"))
    return Mesh(device, both["dp"], both["tp"])


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
