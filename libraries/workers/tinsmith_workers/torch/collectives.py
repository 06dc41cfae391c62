"""Collectives under the names that torch gives them since 2.13. Earlier releases have them under others."""

from typing import Any, Final

import torch.distributed as dist


def _either(name: str, earlier: str) -> Any:
    return getattr(dist, name, None) or getattr(dist, earlier)


all_gather_single: Final = _either("all_gather_single", "all_gather_into_tensor")
"""(whole, part, group): put all ranks' parts into one tensor, by rank."""

reduce_scatter_single: Final = _either("reduce_scatter_single", "reduce_scatter_tensor")
"""(part, whole, group): add up the ranks' tensors, and leave each rank its part of the sum."""
