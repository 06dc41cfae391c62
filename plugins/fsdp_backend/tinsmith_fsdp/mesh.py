"""The process group and the device mesh: axes dp (sequences and shards) and tp (parts of each layer's matrices)."""

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tinsmith.torch_workers import join_process_group
from tinsmith.workers import Worker


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


def make_mesh(worker: Worker, device: torch.device, tensor_parallel: int) -> Mesh:
    """Join the process group of all ranks."""
    join_process_group(worker, device)
    shape = (worker.num_workers // tensor_parallel, tensor_parallel)
    both = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "tp"))
    return Mesh(device, both["dp"], both["tp"])
