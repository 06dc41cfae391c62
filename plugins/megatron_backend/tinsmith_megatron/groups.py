"""The ranks as Megatron groups them: the process group, the parallel state, and this rank's place in it."""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, and not in its __all__

from tinsmith.workers import Worker
from tinsmith_megatron.config import MegatronConfig
from tinsmith_megatron.parallel import Place

_TIMEOUT = timedelta(minutes=30)  # per collective; a dead rank is noticed long before, by its connection
_SEED = 1  # of Megatron's generators, which nothing draws from: there is no dropout, and weights are read


def join(worker: Worker, device: torch.device, config: MegatronConfig) -> None:
    """Join the process group of all ranks, and make Megatron's groups."""
    if worker.local_size == worker.num_workers and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name may resolve to an interface that does not exist
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        store=_store(worker),
        rank=worker.rank,
        world_size=worker.num_workers,
        timeout=_TIMEOUT,
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_parallel,
        pipeline_model_parallel_size=config.pipeline_parallel,
        expert_model_parallel_size=config.expert_parallel,
        expert_tensor_parallel_size=1,  # an expert's matrices are small: they stay whole
    )
    model_parallel_cuda_manual_seed(_SEED)


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


def own_place() -> Place:
    return Place(
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
    )


def sum_over_stage_(flat: torch.Tensor) -> torch.Tensor:
    """Sum in place over all ranks of this pipeline stage."""
    return _sum_(flat, parallel_state.get_tensor_and_data_parallel_group())


def sum_over_expert_copies_(flat: torch.Tensor) -> torch.Tensor:
    """Sum in place over the ranks that hold the same experts."""
    return _sum_(flat, parallel_state.get_expert_data_parallel_group())


def _sum_(flat: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    if group.size() > 1 and flat.numel():
        dist.all_reduce(flat, group=group)
    return flat
