"""The work of a program on one chip, from its optimized text: arithmetic of matrix products, and traffic of HBM."""

import math
import re
from collections.abc import Mapping
from typing import Final

from tinsmith_workbench.compile_check.hlo import Array, Computation, Instruction, Module, Run, Trips, is_link_of_chain

_LABELS: Final = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_CONTRACTED: Final = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_KERNEL_COST: Final = re.compile(r'"flops":"?(\d+)')
_ALIASED: Final = re.compile(
    r"\{(\d*)\}: \((\d+), \{\}"
)  # in output_to_operand_aliasing={{result}: (operand, {}), ...}
_SLICES: Final = frozenset({"dynamic-slice", "slice", "gather"})
_MOVE_NOTHING: Final = frozenset(
    {
        "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all",
        "async-start", "async-update", "async-done", "copy-done", "all-gather-done", "all-reduce-done",
        "collective-permute-done", "partition-id", "replica-id", "opt-barrier", "custom-call-done",
    }
)  # fmt: skip


def product_flops(module: Module, trips: Trips | None = None) -> float:
    """Count two per multiplication in matrix products, and what kernels say of themselves."""
    return sum(run.times * _flops(run) for run in module.runs(trips))


def _flops(run: Run) -> float:
    match run.instruction.opcode:
        case "dot":
            return _dot_flops(run)
        case "convolution":
            return _convolution_flops(run)
        case "custom-call":
            cost = _KERNEL_COST.search(run.instruction.attributes)
            return float(cost.group(1)) if cost else 0
        case _:
            return 0


def _dot_flops(run: Run) -> float:
    contracted = _CONTRACTED.search(run.instruction.attributes)
    left = run.operand(0).arrays[0].dims
    dims = [int(i) for i in contracted.group(1).split(",") if i] if contracted else []
    return 2.0 * math.prod(run.instruction.arrays[0].dims) * math.prod(left[i] for i in dims)


def _convolution_flops(run: Run) -> float:
    """TPUs run every matrix product as a convolution, and the batch of a product as a dilated window."""
    labels = _LABELS.search(run.instruction.attributes)
    assert labels is not None, "a convolution labels its dimensions"
    left, right, out = (
        dict(zip(names, array.dims, strict=True))
        for names, array in zip(
            labels.groups(),
            (run.operand(0).arrays[0], run.operand(1).arrays[0], run.instruction.arrays[0]),
            strict=True,
        )
    )
    spatial = sorted(name for name in out if name.isdecimal())
    window = _Window(run.instruction.attributes, len(spatial))
    positions = math.prod(
        window.positions(number, left[name], right[name], out[name]) for number, name in enumerate(spatial)
    )
    return float(2 * positions * out["b"] * right["i"] * out["f"])


class _Window:
    """The window={...} of a convolution."""

    def __init__(self, attributes: str, num_dims: int) -> None:
        found = re.search(r"window=\{([^}]*)\}", attributes)
        given = dict(part.split("=") for part in found.group(1).split()) if found else {}

        def each(name: str, default: str) -> list[str]:
            return given[name].split("x") if name in given else [default] * num_dims

        self.strides = [int(x) for x in each("stride", "1")]
        self.low = [int(x.split("_")[0]) for x in each("pad", "0_0")]
        self.left_dilation = [int(x) for x in each("lhs_dilate", "1")]
        self.right_dilation = [int(x) for x in each("rhs_dilate", "1")]

    def positions(self, number: int, left: int, right: int, out: int) -> int:
        """Count the pairs of an output and a kernel position that meet a value, neither padding nor a gap."""
        stride, low = self.strides[number], self.low[number]
        gap, reach = self.left_dilation[number], self.right_dilation[number]
        places = (o * stride + k * reach - low for o in range(out) for k in range(right))
        return sum(place % gap == 0 and 0 <= place // gap < left for place in places)


def hbm_bytes(module: Module, trips: Trips | None = None) -> float:
    """Count what operations read from HBM and write to it. What stays on the chip, or inside an operation, is free."""
    return sum(
        run.times * _moved(run, module)
        for run in module.runs(trips)
        if not run.fused and run.instruction.opcode not in _MOVE_NOTHING
    )


def _moved(run: Run, module: Module) -> int:
    instruction = run.instruction
    operands = [run.computation.instructions[name] for name in instruction.operands]
    if instruction.opcode in _SLICES:
        read = _size(instruction.arrays) if _in_hbm(operands[0].arrays) else 0
        return read + _in_hbm(instruction.arrays)
    if instruction.opcode == "copy-start":  # yields the copy, its source and a flag
        return _in_hbm(instruction.arrays)
    if instruction.opcode == "dynamic-update-slice":
        return 2 * _in_hbm(operands[1].arrays)
    if instruction.opcode != "fusion":
        return _in_hbm(instruction.arrays) + sum(_in_hbm(each.arrays) for each in operands)
    inside = module.computations[instruction.called()["calls"]]
    passed_on = _passed_on(inside, instruction)
    read = sum(
        min(_in_hbm(each.arrays), _read_by_fusion(module, inside, index))
        for index, each in enumerate(operands)
        if _in_hbm(each.arrays) and index not in passed_on.values()
    )
    return read + _written_by_fusion(inside, instruction, passed_on)


def _passed_on(inside: Computation, fusion: Instruction) -> Mapping[int, int]:
    """Return the results of a link of a collective's chain that are its operands: the data of the collective."""
    if not any(is_link_of_chain(each) for each in inside.instructions.values()):
        return {}
    return {int(result or 0): int(operand) for result, operand in _ALIASED.findall(fusion.attributes)}


def _read_by_fusion(module: Module, inside: Computation, index: int) -> int:
    """Return how much of an operand is read: only a slice, if only that is used."""
    parameter = next(
        each for each in inside.instructions.values() if each.opcode == "parameter" and each.inputs == str(index)
    )
    return _read_of(module, inside, parameter)


def _read_of(module: Module, inside: Computation, value: Instruction) -> int:
    whole = _size(value.arrays)
    read = 0
    for user in inside.instructions.values():
        if value.name not in user.operands:
            continue
        if user.opcode in _SLICES:
            read += _size(user.arrays)
        elif user.opcode == "bitcast":
            read += _read_of(module, inside, user)
        elif user.opcode == "fusion":
            nested = module.computations[user.called()["calls"]]
            read += _read_by_fusion(module, nested, user.operands.index(value.name))
        elif user.opcode != "dynamic-update-slice" or user.operands[0] != value.name:
            return whole
    return min(read, whole)


def _written_by_fusion(inside: Computation, fusion: Instruction, passed_on: Mapping[int, int]) -> int:
    root = inside.root
    parts = [inside.instructions[name] for name in root.operands] if root.opcode == "tuple" else [root]
    if len(parts) != len(fusion.arrays):  # one operation with several results
        return sum(_in_hbm((array,)) for index, array in enumerate(fusion.arrays) if index not in passed_on)
    written = 0
    for index, (part, array) in enumerate(zip(parts, fusion.arrays, strict=True)):
        if index in passed_on:
            continue
        source = inside.instructions[part.operands[1]].arrays if part.opcode == "dynamic-update-slice" else (array,)
        written += 0 if array.on_chip else _size(source)
    return written


def _in_hbm(arrays: tuple[Array, ...]) -> int:
    return sum(array.num_bytes for array in arrays if not array.on_chip)


def _size(arrays: tuple[Array, ...]) -> int:
    return sum(array.num_bytes for array in arrays)
