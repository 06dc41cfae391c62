"""Reads and checks the graph of a custom loss. A graph that passes holds nothing but operations of the fixed list.

What an operation makes of its operands is known only once there are sequences: `evaluation.py`.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, Final

from tinsmith.custom_losses.functions import FUNCTIONS, METHODS
from tinsmith.custom_losses.registry import DTYPES, Device, Dtype, Operation
from tinsmith.errors import UnsupportedError, UserError
from tinsmith.operations import CustomLoss

MAX_GRAPH_BYTES: Final = 64 << 10
"""Of its nodes as JSON."""
MAX_NODES: Final = 512
MAX_ARGUMENTS: Final = 64
"""Of one node, those in lists included."""
MAX_METRICS: Final = 64
MAX_INPUTS: Final = 16
_MAX_DEPTH: Final = 4
_INT64: Final = 1 << 63

_INPUT_NAME: Final = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_NODE_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_METRIC: Final = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_TEXT: Final = re.compile(r"[A-Za-z0-9_:]{0,32}")
_CONSTANTS: Final = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands for what an earlier node has computed."""

    node: int


Argument = Ref | bool | int | float | str | tuple[Any, ...] | slice | EllipsisType | Dtype | Device | None
"""Any: arguments again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A node that computes something. `node` is its number; inputs have the first ones."""

    name: str
    target: str
    operation: Operation
    args: tuple[Argument, ...]
    kwargs: Mapping[str, Argument]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossGraph:
    """Inputs, then calls in order; each refers to what is before it, so a graph has no circles."""

    name: str
    calls: tuple[Call, ...]
    loss: Ref
    metrics: Mapping[str, Ref]


def read_graph(loss: CustomLoss) -> LossGraph:
    """Raises UserError, naming node and operation, if the graph is not one that this server computes."""
    _check_inputs(loss)
    if len(loss.nodes) > MAX_GRAPH_BYTES:
        msg = f"graph: {len(loss.nodes)} bytes are too many; allowed: {MAX_GRAPH_BYTES}"
        raise UserError(msg)
    return _Reader(loss).read(json.loads(loss.nodes))


def _check_inputs(loss: CustomLoss) -> None:
    names = [name for name, _ in loss.inputs]
    if not 1 <= len(names) <= MAX_INPUTS:
        msg = f"inputs: there are {len(names)}; allowed: 1 to {MAX_INPUTS}"
        raise UserError(msg)
    for index, (name, rank) in enumerate(loss.inputs):
        if not _INPUT_NAME.fullmatch(name):
            msg = f"inputs[{index}]: {name[:100]!r} is not a name of lower-case letters, digits and underscores"
            raise UserError(msg)
        if not 0 <= rank <= 2:
            msg = f"inputs[{index}]: the rank of {name!r} is {rank}; allowed: 0 (a scalar), 1 ([T]) and 2 ([T, K])"
            raise UserError(msg)
    if len(set(names)) < len(names):
        msg = f"inputs: {next(each for each in names if names.count(each) > 1)!r} is named twice"
        raise UserError(msg)
    if loss.inputs[0][0] != "logprobs" or loss.inputs[0][1] == 0:
        msg = f"inputs[0] is {loss.inputs[0][0]!r} of rank {loss.inputs[0][1]}; it must be 'logprobs', of rank 1 or 2"
        raise UserError(msg)


class _Reader:
    def __init__(self, loss: CustomLoss) -> None:
        self._loss = loss
        self._numbers: dict[str, int] = {}  # by name of node
        self._depends: list[bool] = []  # by number of node: on logprobs
        self._calls: list[Call] = []

    def read(self, nodes: Sequence[Mapping[str, Any]]) -> LossGraph:
        if not 1 <= len(nodes) <= MAX_NODES:
            msg = f"graph: there are {len(nodes)} nodes; allowed: 1 to {MAX_NODES}"
            raise UserError(msg)
        *body, last = nodes
        for index, node in enumerate(body):
            self._add(index, node)
        if len(self._numbers) < len(self._loss.inputs):
            missing = self._loss.inputs[len(self._numbers)][0]
            msg = f"graph: the input {missing!r} has no placeholder; there is one for each input, in their order"
            raise UserError(msg)
        return self._output(last)

    def _add(self, index: int, node: Mapping[str, Any]) -> None:
        op, name, inputs = node["op"], node["name"], self._loss.inputs
        where = f"graph: node {index} {name[:100]!r} ({op} {node['target'][:100]!r})"
        if not _NODE_NAME.fullmatch(name) or name in self._numbers:
            reason = "has the name of an earlier one" if name in self._numbers else "has a name that is no identifier"
            msg = f"{where} {reason}"
            raise UserError(msg)
        if op == "placeholder":
            if index >= len(inputs) or node["target"] != inputs[index][0] or node["args"] or node["kwargs"]:
                msg = f"{where} is not the placeholder of an input; they come first, in the order of the inputs"
                raise UserError(msg)
            self._depends.append(index == 0)
        elif index < len(inputs):
            msg = f"{where} stands where the placeholder of the input {inputs[index][0]!r} belongs"
            raise UserError(msg)
        elif op in {"call_function", "call_method"}:
            self._add_call(where, node)
        else:
            msg = f"{where} is not offered; allowed: placeholder, call_function, call_method, and one output at the end"
            raise UnsupportedError(msg)
        self._numbers[name] = index

    def _add_call(self, where: str, node: Mapping[str, Any]) -> None:
        operation = (FUNCTIONS if node["op"] == "call_function" else METHODS).get(node["target"])
        if operation is None:
            msg = (
                f"{where} is not offered; docs/reference/protocol.md lists the operations of custom losses. "
                "forward_backward_custom runs any function in the client"
            )
            raise UnsupportedError(msg)
        args = tuple(self._argument(where, each, _MAX_DEPTH) for each in node["args"])
        kwargs = {key: self._argument(where, each, _MAX_DEPTH) for key, each in node["kwargs"].items()}
        number = sum(1 for _ in _flat((*args, *kwargs.values())))
        if number > MAX_ARGUMENTS:
            msg = f"{where} has {number} arguments; allowed: {MAX_ARGUMENTS}"
            raise UserError(msg)
        try:
            operation.expect_arguments(args, kwargs)
        except ValueError as error:
            msg = f"{where}: {error}"
            raise UserError(msg) from error
        refs = [each for each in _flat((*args, *kwargs.values())) if isinstance(each, Ref)]
        self._depends.append(any(self._depends[each.node] for each in refs))
        self._calls.append(
            Call(name=node["name"], target=node["target"], operation=operation, args=args, kwargs=kwargs)
        )

    def _output(self, node: Mapping[str, Any]) -> LossGraph:
        where = "graph: the last node"
        if node["op"] != "output" or len(node["args"]) != 1 or node["kwargs"]:
            msg = f"{where} is {node['name'][:100]!r} ({node['op']}); it must be the output, with one argument"
            raise UserError(msg)
        returned = node["args"][0]
        if isinstance(returned, dict) and returned.keys() == {"tuple"}:
            returned = returned["tuple"]
        if not isinstance(returned, list) or len(returned) != 2:
            msg = f"{where} returns no pair of loss and metrics"
            raise UserError(msg)
        loss = self._argument(where, returned[0], _MAX_DEPTH)
        if not isinstance(loss, Ref) or not self._depends[loss.node]:
            msg = f"{where} returns a loss that no logprob has a part in; nothing could be trained with it"
            raise UserError(msg)
        return LossGraph(
            name=self._loss.name, calls=tuple(self._calls), loss=loss, metrics=self._metrics(where, returned[1])
        )

    def _metrics(self, where: str, returned: object) -> Mapping[str, Ref]:
        metrics = returned.get("dict") if isinstance(returned, dict) and len(returned) == 1 else None
        if not isinstance(metrics, dict) or len(metrics) > MAX_METRICS:
            msg = f"{where} returns metrics that are no dict of at most {MAX_METRICS}"
            raise UserError(msg)
        found = {}
        for key, each in metrics.items():
            value = self._argument(where, each, _MAX_DEPTH)
            if not _METRIC.fullmatch(key) or not isinstance(value, Ref):
                msg = (
                    f"{where} returns the metric {key[:100]!r}; name it custom/<name>:sum or custom/<name>:mean, in "
                    "lower case, and give it the result of a node"
                )
                raise UserError(msg)
            found[key] = value
        return found

    def _argument(self, where: str, value: Any, levels: int) -> Argument:  # Any: JSON
        if levels == 0:
            msg = f"{where}: an argument is nested deeper than {_MAX_DEPTH} levels"
            raise UserError(msg)
        if isinstance(value, list):
            return tuple(self._argument(where, each, levels - 1) for each in value)
        if isinstance(value, dict):
            return self._encoded(where, value, levels)
        if isinstance(value, int) and not -_INT64 < value < _INT64:
            msg = f"{where}: an integer of {value.bit_length()} bits is too large; allowed: 64"
            raise UserError(msg)
        if isinstance(value, str) and not _TEXT.fullmatch(value):
            msg = f"{where}: the text {value[:100]!r} is not offered as an argument"
            raise UnsupportedError(msg)
        argument: Argument = value
        return argument

    def _encoded(self, where: str, value: Mapping[str, Any], levels: int) -> Argument:
        """Read what is encoded as an object of one key."""
        match value:
            case {"ref": str(name)} if len(value) == 1:
                if name not in self._numbers:
                    msg = f"{where} refers to {name[:100]!r}, which is no node before it"
                    raise UserError(msg)
                return Ref(self._numbers[name])
            case {"tuple": list(items)} if len(value) == 1:
                return tuple(self._argument(where, each, levels - 1) for each in items)
            case {"slice": [start, stop, step]} if len(value) == 1:
                return slice(*(self._argument(where, each, levels - 1) for each in (start, stop, step)))
            case {"ellipsis": True} if len(value) == 1:
                return Ellipsis
            case {"float": ("inf" | "-inf" | "nan") as text} if len(value) == 1:
                return _CONSTANTS[text]
            case {"dtype": str(name)} if len(value) == 1 and name in DTYPES:
                return Dtype(name)
            case {"device": "cpu"} if len(value) == 1:
                return Device()
            case _:
                msg = (
                    f"{where}: an argument {str(value)[:100]} is not offered; allowed as objects: ref, tuple, slice, "
                    f"ellipsis, float (inf, -inf, nan), dtype ({', '.join(DTYPES)}) and device (cpu)"
                )
                raise UnsupportedError(msg)


def _flat(arguments: Sequence[Argument]) -> Iterator[Argument]:
    for each in arguments:
        if isinstance(each, tuple):
            yield from _flat(each)
        elif isinstance(each, slice):
            yield from (each.start, each.stop, each.step)
        else:
            yield each
