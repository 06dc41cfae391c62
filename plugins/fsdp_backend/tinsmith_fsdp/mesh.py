"""The process group and the device mesh: replicas of the model, their shards, and parts of each layer's matrices."""

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tinsmith_fsdp.config import FsdpConfig
from tinsmith_workers import Worker
from tinsmith_workers.torch import join_process_group

_AXES = ("replicate", "shard", "tp")  # PyTorch's names


@dataclass(frozen=True, slots=True)
class Mesh:
    """All ranks: rank = (replica * shard_size + shard_rank) * tp_size + tp_rank. So a replica's ranks are neighbours.

    Sequences are dealt out to replicas and shards alike, which together are the data-parallel (dp) ranks.
    """

    device: torch.device
    axes: DeviceMesh

    @property
    def sharding(self) -> DeviceMesh:
        """The mesh for fully_shard: with several replicas, two axes (hybrid sharding)."""
        return self.axes["replicate", "shard"] if self.num_replicas > 1 else self.axes["shard"]

    @property
    def tp(self) -> DeviceMesh:
        return self.axes["tp"]

    @property
    def num_replicas(self) -> int:
        return self.axes.size(0)

    @property
    def shard_size(self) -> int:
        return self.axes.size(1)

    @property
    def tp_size(self) -> int:
        return self.axes.size(2)

    @property
    def dp_size(self) -> int:
        return self.num_replicas * self.shard_size

    @property
    def replica(self) -> int:
        return self.axes.get_local_rank("replicate")

    @property
    def shard_rank(self) -> int:
        return self.axes.get_local_rank("shard")

    @property
    def tp_rank(self) -> int:
        return self.axes.get_local_rank("tp")

    @property
    def dp_rank(self) -> int:
        return self.replica * self.shard_size + self.shard_rank


def join_mesh(worker: Worker, device: torch.device, config: FsdpConfig) -> Mesh:
    """Join the process group of all ranks."""
    join_process_group(worker, device)
    return mesh_of(device, worker.num_workers, config)


def mesh_of(device: torch.device, world: int, config: FsdpConfig) -> Mesh:
    """Divide the ranks of the process group. Raise ValueError if the settings do not divide them."""
    dp, shards = config.data_parallel(world)
    shape = (dp // shards, shards, config.tensor_parallel)
    return Mesh(device, init_device_mesh(device.type, shape, mesh_dim_names=_AXES))
