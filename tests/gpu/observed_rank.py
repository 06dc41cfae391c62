"""A rank of the fsdp backend that tells what it compiled and holds, and can be short of memory."""

import gc
from functools import partialmethod

import torch
from torch._dynamo.utils import counters

from tinsmith.workers import Worker
from tinsmith_fsdp.rank import Rank


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
        import varlen_on_cpu

        varlen_on_cpu.as_on_a_gpu()
        torch.nn.Module.compile = partialmethod(torch.nn.Module.compile, backend="aot_eager")  # type: ignore[method-assign,assignment]
        super().__init__(worker)

    def reserved(self) -> int:
        return int(self.device_bytes())
