"""The process group and the device mesh: axes dp (sequences and shards) and tp (parts of each layer's matrices)."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

_TIMEOUT = timedelta(minutes=30)  # per collective; a dead rank is noticed long before, by its connection


@dataclass(frozen=True, slots=True)
class Mesh:
    """All ranks, numbered dp-major: rank = dp_rank * tp_size + tp_rank."""

    device: torch.device
    both: DeviceMesh

    @property
    def dp(self) -> DeviceMesh:
        return self.both["dp"]

    @property
    def tp(self) -> DeviceMesh:
        return self.both["tp"]

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


def find_device(wanted: str | None) -> torch.device:
    """Choose this rank's device. Call it before any collective."""
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def make_mesh(device: torch.device, tensor_parallel: int) -> Mesh:
    """Join the process group that the launcher's environment describes."""
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=_TIMEOUT)
    shape = (dist.get_world_size() // tensor_parallel, tensor_parallel)
    return Mesh(device, init_device_mesh(device.type, shape, mesh_dim_names=("dp", "tp")))
