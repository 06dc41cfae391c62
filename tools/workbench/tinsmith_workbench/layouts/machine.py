"""The GPUs that layouts are compared on."""

from dataclasses import dataclass
from typing import Final

GB: Final = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The GPUs' rates: by default from an H100's data sheet, with two assumptions."""

    memory_gb: float = 80  # 10^9 bytes of one GPU
    reserve_gb: float = 6  # assumed: for CUDA, NCCL and fragments, of which the formula does not know
    gpus_per_node: int = 8
    tflops: float = 989  # peak of a GPU in bfloat16
    efficiency: float = 0.4  # assumed: the share of it that is achieved
    node_gb_s: float = 450  # that a GPU receives from its own machine: NVLink 4, one direction
    network_gb_s: float = 50  # and from others: a network card of 400 Gbit/s for each GPU
