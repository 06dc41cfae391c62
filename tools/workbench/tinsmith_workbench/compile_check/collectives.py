"""The collectives of a program: what is sent along which axis of the mesh, how often and how much."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tinsmith_workbench.compile_check.hlo import Array, Instruction, Module, Trips, is_link_of_chain

KINDS: Final = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_LISTED: Final = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_COMPUTED: Final = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED: Final = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_AXES: Final = ("data", "fsdp", "tensor")


@dataclass(frozen=True, slots=True)
class Traffic:
    """All collectives of one kind over one axis, on one chip."""

    kind: str
    axis: str
    count: int  # arrays; the compiler may send several in one operation
    num_bytes: int  # of the whole arrays: those gathered, or those to be summed
    received: float  # bytes that a chip receives, if the chips of a group pass them on in a ring


def traffic(module: Module, mesh: Mapping[str, int], trips: Trips | None = None) -> list[Traffic]:
    """Count the collectives. `mesh`: the sizes of the axes, in the order in which devices are numbered."""
    names = _group_names(mesh)
    counts: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0, 0])
    for run in module.runs(trips):
        kind = run.instruction.opcode.removesuffix("-start")
        if kind not in KINDS or run.instruction.opcode.endswith("-done") or is_link_of_chain(run.instruction):
            continue
        group = _first_group(run.instruction) or tuple(range(math.prod(mesh.values())))
        sent = _sent(run.instruction)
        total = counts[kind, names.get(group, f"chips {group}")]
        num_bytes = sum(array.num_bytes for array in sent)
        count = len(sent) if kind != "all-to-all" else 1  # some compilers write it with an array for each chip
        for index, more in enumerate((count, num_bytes, num_bytes * _share_received(kind, len(group)))):
            total[index] += run.times * more
    return [
        Traffic(kind, axis, round(count), round(num_bytes), received)
        for (kind, axis), (count, num_bytes, received) in sorted(counts.items())
    ]


def _sent(instruction: Instruction) -> tuple[Array, ...]:
    """Return the whole arrays. The start of an asynchronous gather yields its operands before its results."""
    arrays = instruction.arrays
    if instruction.opcode in ("all-gather-start", "collective-permute-start"):
        return arrays[len(instruction.operands) : 2 * len(instruction.operands)]
    return arrays


def first_groups(ids: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
    """Return the groups that the first of an array [data, fsdp, tensor] belongs to, single axes last."""
    return {
        "all chips": ids,
        "streams": ids[:, :, 0],
        "data": ids[:, 0, 0],
        "fsdp": ids[0, :, 0],
        "tensor": ids[0, 0, :],
    }


def _share_received(kind: str, chips: int) -> float:
    share = (chips - 1) / chips
    match kind:
        case "all-reduce":
            return 2 * share  # a reduce-scatter, then an all-gather
        case "reduce-scatter":
            return chips - 1  # the array here is the part that remains
        case "collective-permute":
            return 1
        case _:
            return share


def _group_names(mesh: Mapping[str, int]) -> dict[tuple[int, ...], str]:
    """Name the groups of the first device; over an axis of size 1 there are none."""
    ids = np.arange(np.prod([mesh[axis] for axis in _AXES])).reshape([mesh[axis] for axis in _AXES])
    return {tuple(int(i) for i in members.ravel()): name for name, members in first_groups(ids).items()}


def _first_group(instruction: Instruction) -> tuple[int, ...]:
    """Return the devices that the first one exchanges data with, in whichever form the compiler writes them."""
    text = instruction.attributes
    if listed := _LISTED.search(text):
        return tuple(sorted(int(i) for i in listed.group(1).split(",") if i))
    if computed := _COMPUTED.search(text):
        groups, size, dims, order = computed.groups()
        ids = np.arange(int(groups) * int(size)).reshape([int(d) for d in dims.split(",")])
        if order:
            ids = ids.transpose([int(d) for d in order.split(",")])
        return tuple(sorted(int(i) for i in ids.reshape(int(groups), int(size))[0]))
    if named := _NAMED.search(text):
        sizes = {axis: int(size) for axis, size in re.findall(r"'([^']*)'=(\d+)", named.group(1))}
        chosen = set(re.findall(r"'([^']*)'", named.group(2)))
        ids = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
        return tuple(int(i) for i in ids[tuple(slice(None) if axis in chosen else 0 for axis in sizes)].ravel())
    return ()  # all devices, or the pairs of a permutation
