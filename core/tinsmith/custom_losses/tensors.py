"""Tensors that know how to pass a derivative on, in reverse, to those they were computed from.

Values are float64, int64 or bool. Only float64 tensors have derivatives.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

NDArray = npt.NDArray[Any]  # Any: float64, int64 or bool
Pullback = Callable[[NDArray], NDArray]
"""Turns the loss's derivative by a result into its derivative by an operand, of the result's or the operand's shape."""

MAX_ELEMENTS: Final = 8 << 20
"""Of one tensor."""
MAX_DIMENSIONS: Final = 8

_numbers = count()


@dataclass(slots=True, eq=False)
class Tensor:
    """`links`: the operands on which the derivative depends. None of `array` is ever written to."""

    array: NDArray
    links: tuple[tuple["Tensor", Pullback], ...] = ()
    is_variable: bool = False
    number: int = field(default_factory=lambda: next(_numbers))  # operands have lower ones

    @property
    def has_derivative(self) -> bool:
        return self.is_variable or bool(self.links)


def computed(array: NDArray, *links: tuple[Tensor, Pullback]) -> Tensor:
    """Return the result of an operation."""
    return Tensor(np.asarray(array), tuple(link for link in links if link[0].has_derivative))


def expect_room(shape: Iterable[int]) -> None:
    """Raise ValueError if a tensor of this shape would be too large."""
    shape = tuple(shape)
    if len(shape) > MAX_DIMENSIONS or prod(shape) > MAX_ELEMENTS:
        allowed = f"{MAX_DIMENSIONS} dimensions, {MAX_ELEMENTS} elements"
        msg = f"the result would have the shape {list(shape)}; allowed: {allowed}"
        raise ValueError(msg)


def derivative_of(result: Tensor, variable: Tensor) -> NDArray:
    """Return the derivative of a scalar by a variable: zeros where nothing depends on it."""
    derivatives = {result.number: np.ones_like(result.array)}
    for each in sorted(_behind(result), key=lambda tensor: -tensor.number):
        ours = derivatives[each.number] if each is variable else derivatives.pop(each.number)
        for operand, pull in each.links:
            theirs = to_shape(pull(ours), operand.array.shape)
            known = derivatives.get(operand.number)
            derivatives[operand.number] = theirs if known is None else known + theirs
    return derivatives.get(variable.number, np.zeros_like(variable.array))


def _behind(result: Tensor) -> list[Tensor]:
    """Return the tensor and all that its derivative passes through."""
    found, waiting = {result.number: result}, [result]
    while waiting:
        for operand, _ in waiting.pop().links:
            if operand.number not in found:
                found[operand.number] = operand
                waiting.append(operand)
    return list(found.values())


def to_shape(array: NDArray, shape: tuple[int, ...]) -> NDArray:
    """Undo broadcasting: add up what belongs to one element of the operand."""
    if array.shape == shape:
        return array
    extra = array.ndim - len(shape)
    if extra < 0:
        return np.broadcast_to(array, shape)
    repeated = tuple(axis for axis, size in enumerate(shape, extra) if size == 1 and array.shape[axis] != 1)
    summed: NDArray = array.sum(axis=(*range(extra), *repeated), keepdims=True)
    return summed.reshape(shape)
