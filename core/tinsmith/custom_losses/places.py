"""Taking elements, and putting them in another order."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tinsmith.custom_losses.registry import (
    Value,
    axes_of,
    axis_of,
    flag_of,
    integer_of,
    integers_of,
    offered,
    tensor_of,
)
from tinsmith.custom_losses.tensors import NDArray, Tensor, computed, expect_room


@offered("gather")
def gather(input_: Value, dim: Value, index: Value) -> Value:
    operand, places = tensor_of(input_), tensor_of(index, "index").array
    if places.dtype != np.int64:
        msg = "index must be a tensor of integers"
        raise ValueError(msg)
    shape, axis = operand.array.shape, axis_of(dim, operand.array.ndim)
    fits = places.ndim == len(shape) and all(
        own <= ours for at, (own, ours) in enumerate(zip(places.shape, shape, strict=True)) if at != axis
    )
    if not fits or not shape:
        msg = f"index has the shape {list(places.shape)}, and the input {list(shape)}; only dim {dim} may be larger"
        raise ValueError(msg)
    expect_room(places.shape)
    if places.size and not (places.min() >= 0 and places.max() < shape[axis]):
        msg = f"index goes from {places.min()} to {places.max()}; allowed: 0 to {shape[axis] - 1}"
        raise IndexError(msg)
    cells = list(np.indices(places.shape, sparse=True))
    cells[axis] = places
    return taken(operand, tuple(cells))


def taken(operand: Tensor, cells: Any) -> Tensor:  # Any: an index of NumPy's
    def pull(grad: NDArray) -> NDArray:
        spread = np.zeros(operand.array.shape)
        np.add.at(spread, cells, grad)
        return spread

    return computed(operand.array[cells], (operand, pull))


@offered("sort")
def sort(input_: Value, dim: Value = -1, descending: Value = False, *, stable: Value = False) -> Value:
    """Always stable."""
    operand, falling = tensor_of(input_), flag_of(descending, "descending")
    flag_of(stable, "stable")
    if operand.array.ndim == 0:
        return operand, Tensor(np.asarray(0))
    axis = axis_of(dim, operand.array.ndim)
    array = np.flip(operand.array, axis) if falling else operand.array
    places = np.argsort(array, axis=axis, kind="stable")
    if falling:  # of equal ones, the first comes first
        places = operand.array.shape[axis] - 1 - np.flip(places, axis)
    return gather(operand, axis, Tensor(places)), Tensor(places)


@offered("flip")
def flip(input_: Value, *dims: Value) -> Value:
    operand = tensor_of(input_)
    axes = axes_of(integers_of(dims, "dims"), operand.array.ndim) if dims else ()
    return computed(np.flip(operand.array, axes), (operand, lambda grad: np.flip(grad, axes)))


@offered("tril")
def tril(input_: Value, diagonal: Value = 0) -> Value:
    return _triangle(np.tril, input_, diagonal)


@offered("triu")
def triu(input_: Value, diagonal: Value = 0) -> Value:
    return _triangle(np.triu, input_, diagonal)


def _triangle(cut: Callable[[NDArray, int], NDArray], input_: Value, diagonal: Value) -> Value:
    operand, at = tensor_of(input_), integer_of(diagonal, "diagonal")
    if operand.array.ndim < 2:
        msg = f"a triangle needs a matrix, not a tensor of shape {list(operand.array.shape)}"
        raise ValueError(msg)
    return computed(cut(operand.array, at), (operand, lambda grad: cut(grad, at)))
