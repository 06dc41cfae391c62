"""A rank of the fsdp backend that tells what it compiled and holds, and can be short of memory."""

import gc
from functools import partialmethod
from typing import Any

import attention_on_cpu
import torch
from torch._dynamo.utils import counters

from tinsmith_fsdp import attention
from tinsmith_fsdp.rank import Rank
from tinsmith_workers import Worker


class ObservedRank(Rank):
    def graphs(self) -> tuple[int, int]:
        """Return how many graphs were compiled so far, and how often one broke."""
        return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())

    def reserved(self) -> int:
        """Return the bytes that the allocator has taken of the device."""
        return torch.cuda.memory_reserved()

    def leave_room(self, size: int | None) -> None:
        """Let the allocator take so many bytes more; None: whatever there is."""
        gc.collect()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        share = 1.0 if size is None else (torch.cuda.memory_reserved() + size) / total
        torch.cuda.set_per_process_memory_fraction(share)


class OnCpu(ObservedRank):
    """Takes the GPU's branches. Compiles as a GPU would, except that no code is generated: that takes minutes."""

    def __init__(self, worker: Worker) -> None:
        _attend_as_on_a_gpu()
        torch.nn.Module.compile = partialmethod(torch.nn.Module.compile, backend="aot_eager")  # type: ignore[method-assign,assignment]
        super().__init__(worker)

    def reserved(self) -> int:
        return int(self.device_bytes())


def _attend_as_on_a_gpu() -> None:
    """Take the GPU's branch of the attention in this process, as the tensors do not say that they are on one."""
    attention_on_cpu.register_kernels()
    one_by_one = attention.packed_attention

    def packed(module: Any, query: torch.Tensor, key: Any, value: Any, mask: Any, **given: Any) -> Any:
        if query.dtype != torch.bfloat16:
            return one_by_one(module, query, key, value, mask, **given)
        return attention.attend_varlen(query, key, value, given["stream"], given.get("scaling")), None

    attention.packed_attention = packed
