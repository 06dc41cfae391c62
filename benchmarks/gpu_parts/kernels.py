"""The time of a step by kind of kernel, as the GPU tells it."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import torch
from torch.profiler import ProfilerActivity, profile

from gpu_parts.common import Report

KINDS: Final = (  # the first that is found in a kernel's name
    ("rest", re.compile("^triton_(poi|red|per)")),  # named after all that is fused into them
    ("grouped products", re.compile("GroupProblem|group(ed)?_?(mm|gemm)", re.IGNORECASE)),
    ("attention", re.compile("flash|fmha|attention", re.IGNORECASE)),
    ("matmul", re.compile("gemm|gemv|nvjet|cutlass|xmma|splitK", re.IGNORECASE)),
    ("copies", re.compile("^Mem(cpy|set)")),
)
OF_THE_PROFILER: Final = re.compile("Buffer|Module Loading|Resource|Lazy|Overhead")
LONGEST: Final = 12


@dataclass(frozen=True, slots=True)
class Ran:
    """A kernel's run."""

    name: str
    start_us: float
    end_us: float


def by_kind(work: Callable[[], object], device: torch.device) -> Report:
    """Run the work once, warmed up. Seconds of the GPU by kind of kernel, and those in which it had nothing to do.

    The CPU is not observed: that costs minutes. On a CPU it stands in for the GPU.
    """
    on_cpu = device.type == "cpu"
    with profile(activities=[ProfilerActivity.CPU if on_cpu else ProfilerActivity.CUDA]) as profiled:
        work()
        if not on_cpu:
            torch.cuda.synchronize(device)
    wanted = "CPU" if on_cpu else "CUDA"
    return summary(
        Ran(event.name, event.time_range.start, event.time_range.end)
        for event in profiled.events() or ()
        if event.device_type.name == wanted and not OF_THE_PROFILER.search(event.name) and not event.is_user_annotation
    )


def summary(ran: Iterable[Ran]) -> Report:
    ordered = sorted(ran, key=lambda each: each.start_us)
    if not ordered:
        return {"kernels": 0}
    kinds, names = dict[str, float](), dict[str, list[float]]()
    busy, until = 0.0, ordered[0].start_us
    for each in ordered:
        took = each.end_us - each.start_us
        kind = kind_of(each.name)
        kinds[kind] = kinds.get(kind, 0.0) + took / 1e6
        names.setdefault(each.name, []).append(took)
        busy += max(0.0, each.end_us - max(until, each.start_us))
        until = max(until, each.end_us)
    span = until - ordered[0].start_us
    longest = sorted(names, key=lambda name: -sum(names[name]))[:LONGEST]
    return {
        "span_s": span / 1e6,
        "by_kind_s": {**kinds, "idle": (span - busy) / 1e6},
        "kernels": len(ordered),
        "longest": [{"name": name[:120], "runs": len(names[name]), "s": sum(names[name]) / 1e6} for name in longest],
    }


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS if pattern.search(name)), "rest")
