"""Read an optimized program of XLA as text: its instructions, and how often each is run.

The text is what `compiled.as_text()` returns, or what the compiler writes with --xla_dump_hlo_as_text.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

_BITS: Final = {"pred": 8, "token": 0, "f8e4m3fn": 8, "f8e5m2": 8}  # others say so in their names
_ARRAY: Final = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,]*)\](\{[^}]*\})?")
_INSTRUCTION: Final = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = ")
_COMPUTATION: Final = re.compile(r"^(ENTRY )?%?([\w.-]+) .*\{$")
_CALLED: Final = re.compile(r"(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.-]+)")
_BRANCHES: Final = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS: Final = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_SCOPE: Final = re.compile(r'op_name="[^"]*?([\w.-]+)/(?:while|cond)"')
_RUNS_ITS_OPERAND: Final = frozenset({"fusion", "call", "async-start", "conditional"})


Trips = Mapping[str, float]
"""How often is run what only the data decide: loops and conditionals by their named scope, "" for all other loops."""


@dataclass(frozen=True, slots=True)
class Array:
    """An array, or one of a tuple. `on_chip`: the compiler keeps it in memory beside the cores, not in HBM."""

    dtype: str
    dims: tuple[int, ...]
    on_chip: bool = False

    @property
    def num_bytes(self) -> int:
        digits = re.search(r"\d+", self.dtype)
        bits = _BITS[self.dtype] if self.dtype in _BITS else int(digits.group()) if digits else 0
        return math.prod(self.dims) * bits // 8


@dataclass(frozen=True, slots=True)
class Instruction:
    name: str
    opcode: str
    arrays: tuple[Array, ...]  # the result, or its parts
    operands: tuple[str, ...]
    attributes: str
    inputs: str  # what stands in the parentheses
    is_root: bool

    def called(self) -> dict[str, str]:
        """Return the computations that it runs, by their role."""
        found = dict(_CALLED.findall(self.attributes))
        if branches := _BRANCHES.search(self.attributes):
            names = re.findall(r"[\w.-]+", branches.group(1))
            found |= {f"branch {number}": name for number, name in enumerate(names)}
        return found

    @property
    def scope(self) -> str:
        """Return the named scope in which a loop or conditional stands."""
        found = _SCOPE.search(self.attributes)
        return found.group(1) if found else ""


@dataclass(slots=True)
class Computation:
    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @property
    def root(self) -> Instruction:
        return next(each for each in self.instructions.values() if each.is_root)


@dataclass(frozen=True, slots=True)
class Run:
    """An instruction, where it stands, and how often it is run. `fused`: as a part of a larger operation."""

    instruction: Instruction
    computation: Computation
    times: float
    fused: bool

    def operand(self, index: int) -> Instruction:
        return self.computation.instructions[self.instruction.operands[index]]


@dataclass(frozen=True, slots=True)
class Module:
    computations: Mapping[str, Computation]
    entry: Computation
    arguments: tuple[Array, ...]
    results: tuple[Array, ...]
    donated: tuple[int, ...]
    """The results that take the place of an argument."""

    def runs(self, trips: Trips | None = None) -> Iterator[Run]:
        """Yield all instructions. Of a conditional whose scope is not in `trips`, all branches are."""
        yield from self._runs(self.entry, 1, trips or {}, fused=False)

    def _runs(self, computation: Computation, times: float, trips: Trips, *, fused: bool) -> Iterator[Run]:
        for instruction in computation.instructions.values():
            yield Run(instruction, computation, times, fused)
            called = instruction.called()
            if instruction.opcode == "while":
                length = self._trips(instruction)
                if length is None:
                    length = trips.get(instruction.scope, trips.get("", 1))
                yield from self._runs(self.computations[called["body"]], times * length, trips, fused=fused)
            elif instruction.opcode in _RUNS_ITS_OPERAND:
                inside = fused or instruction.opcode == "fusion"
                taken = (
                    trips.get(instruction.scope, 1) if instruction.opcode == "conditional" and instruction.scope else 1
                )
                for name in called.values():
                    yield from self._runs(self.computations[name], times * taken, trips, fused=inside)

    def _trips(self, loop: Instruction) -> float | None:
        """Return the length of a loop that counts from 0 to a constant, or None."""
        if known := _TRIPS.search(loop.attributes):
            return int(known.group(1))
        condition = self.computations[loop.called()["condition"]]
        compare = condition.root
        if compare.opcode != "compare" or "direction=LT" not in compare.attributes:
            return None
        bound = condition.instructions[compare.operands[1]]
        return int(bound.inputs) if bound.opcode == "constant" else None


def is_link_of_chain(instruction: Instruction) -> bool:
    """Return whether it goes on with a collective that was started before, as TPUs do beside their arithmetic.

    Every part of such a chain is written like the whole collective.
    """
    return "chain_id=" in instruction.attributes and '"flag_start":"-1"' not in instruction.attributes


def read_module(text: str) -> Module:
    """Parse a module's text."""
    computations: dict[str, Computation] = {}
    entry = current = None
    for line in text.splitlines():
        if found := _INSTRUCTION.match(line):
            assert current is not None, "instructions stand in computations"
            instruction = _instruction(line[found.end() :], found.group(2), is_root=bool(found.group(1)))
            current.instructions[instruction.name] = instruction
        elif found := _COMPUTATION.match(line):
            current = computations[found.group(2)] = Computation(found.group(2))
            entry = current if found.group(1) else entry
    assert entry is not None, "a module has an entry"
    arguments, results = _entry_arrays(text)
    return Module(computations, entry, arguments, results, _donated(text.splitlines()[0]))


def _donated(head: str) -> tuple[int, ...]:
    start = head.find("input_output_alias={")
    if start < 0:
        return ()
    pairs = head[start : _closing(head, head.index("{", start))]
    return tuple(int(index) for index in re.findall(r"\{(\d*)\}: \(", pairs) if index)


def _entry_arrays(text: str) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    head = text.splitlines()[0]
    layout = head[head.index("entry_computation_layout=") :].split("=", 1)[1]
    end = _closing(layout, 0)
    arguments, _, results = layout[1:end].partition(")->")
    return _arrays(arguments), _arrays(results)


def _instruction(rest: str, name: str, *, is_root: bool) -> Instruction:
    end_of_type = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opcode, _, after = rest[end_of_type:].lstrip().partition("(")
    end = _closing("(" + after, 0) - 1
    inputs = after[:end]
    operands = tuple(re.findall(r"%([\w.-]+)", inputs))
    return Instruction(name, opcode, _arrays(rest[:end_of_type]), operands, after[end + 1 :], inputs, is_root)


def _arrays(text: str) -> tuple[Array, ...]:
    return tuple(
        Array(dtype, tuple(int(size) for size in dims.split(",") if size), "S(1)" in (layout or ""))
        for dtype, dims, layout in _ARRAY.findall(text)
    )


def _closing(text: str, start: int) -> int:
    """Return the index of the bracket that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] in "({[") - (text[index] in ")}]")
        if depth == 0:
            return index
    msg = f"unclosed bracket in {text[:80]!r}"
    raise ValueError(msg)
