"""The ranks as Megatron groups them: the process group, the parallel state, and this rank's coordinates in it."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from tinsmith_megatron.config import MegatronConfig
from tinsmith_megatron.parallel import Coordinates
from tinsmith_workers import Worker
from tinsmith_workers.torch import join_process_group

_SEED = 1  # of Megatron's generators, which nothing draws from: there is no dropout, and weights are read


def join(worker: Worker, device: torch.device, config: MegatronConfig) -> None:
    """Join the process group of all ranks, and make Megatron's groups."""
    join_process_group(worker, device)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_parallel,
        pipeline_model_parallel_size=config.pipeline_parallel,
        expert_model_parallel_size=config.expert_parallel,
        expert_tensor_parallel_size=1,  # an expert's matrices are small: they stay whole
    )
    model_parallel_cuda_manual_seed(_SEED)


def own_coordinates() -> Coordinates:
    return Coordinates(
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
