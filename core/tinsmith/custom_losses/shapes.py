"""Shapes, joining and indexing."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from tinsmith.custom_losses.places import taken
from tinsmith.custom_losses.registry import (
    ATTRIBUTES,
    Device,
    Dtype,
    Value,
    axes_of,
    axis_of,
    integer_of,
    integers_of,
    offered,
    offered_as_method,
    tensor_of,
    tensors_of,
)
from tinsmith.custom_losses.tensors import NDArray, Tensor, computed, expect_room


def _reshaped(operand: Tensor, shape: Sequence[int]) -> Tensor:
    expect_room((1,) * len(shape))
    return computed(operand.array.reshape(shape), (operand, lambda grad: grad.reshape(operand.array.shape)))


@offered("reshape")
def reshape(input_: Value, *shape: Value) -> Value:
    return _reshaped(tensor_of(input_), integers_of(shape, "shape"))


@offered_as_method("view")
def view(input_: Value, *shape: Value) -> Value:
    return _reshaped(tensor_of(input_), integers_of(shape, "shape"))


@offered("flatten", "ravel")
def flatten(input_: Value) -> Value:
    return _reshaped(tensor_of(input_), (-1,))


@offered("unsqueeze")
def unsqueeze(input_: Value, dim: Value) -> Value:
    operand = tensor_of(input_)
    axis = axis_of(dim, operand.array.ndim + 1)
    shape = list(operand.array.shape)
    shape.insert(axis, 1)
    expect_room(shape)
    return _reshaped(operand, shape)


@offered("squeeze")
def squeeze(input_: Value, dim: Value = None) -> Value:
    operand = tensor_of(input_)
    axes = axes_of(dim, operand.array.ndim)
    kept = [size for axis, size in enumerate(operand.array.shape) if axis not in axes or size != 1]
    return _reshaped(operand, kept)


@offered("permute")
def permute(input_: Value, *dims: Value) -> Value:
    operand = tensor_of(input_)
    order = axes_of(integers_of(dims, "dims"), operand.array.ndim)
    if len(order) != operand.array.ndim:
        msg = f"dims {order} do not name all {operand.array.ndim} dimensions"
        raise ValueError(msg)
    return computed(operand.array.transpose(order), (operand, lambda grad: grad.transpose(np.argsort(order))))


@offered("transpose")
def transpose(input_: Value, dim0: Value, dim1: Value) -> Value:
    operand = tensor_of(input_)
    first, second = axis_of(dim0, operand.array.ndim), axis_of(dim1, operand.array.ndim)
    if operand.array.ndim == 0:
        return operand
    return computed(np.swapaxes(operand.array, first, second), (operand, lambda grad: np.swapaxes(grad, first, second)))


@offered("t")
def transposed(input_: Value) -> Value:
    operand = tensor_of(input_)
    if operand.array.ndim > 2:
        msg = f"t takes at most two dimensions, not {operand.array.ndim}"
        raise ValueError(msg)
    return computed(operand.array.T, (operand, lambda grad: grad.T))


@offered_as_method("expand")
def expand(input_: Value, *sizes: Value) -> Value:
    operand, wanted = tensor_of(input_), integers_of(sizes, "sizes")
    own = operand.array.shape
    extra = len(wanted) - len(own)
    shape = tuple(own[at - extra] if size == -1 and at >= extra else size for at, size in enumerate(wanted))
    if extra < 0 or any(size < 0 for size in shape):
        msg = f"{list(own)} cannot be expanded to {list(wanted)}"
        raise ValueError(msg)
    return _expanded(operand, shape)


@offered_as_method("expand_as")
def expand_as(input_: Value, other: Value) -> Value:
    return _expanded(tensor_of(input_), tensor_of(other, "other").array.shape)


@offered("broadcast_to")
def broadcast_to(input_: Value, size: Value) -> Value:
    return expand(input_, size)


def _expanded(operand: Tensor, shape: tuple[int, ...]) -> Tensor:
    expect_room(shape)
    return computed(np.broadcast_to(operand.array, shape), (operand, lambda grad: grad))


@offered("cat", "concat", "concatenate", method=False)
def cat(tensors: Value, dim: Value = 0) -> Value:
    joined = tensors_of(tensors)
    axis = axis_of(dim, joined[0].array.ndim)
    expect_room((sum(each.array.size for each in joined),))
    arrays = [each.array for each in joined]
    if len({array.ndim for array in arrays} | {0}) != 2:
        numbers = ", ".join(str(array.ndim) for array in arrays)
        msg = f"the tensors have {numbers} dimensions; they must agree, and be at least 1"
        raise ValueError(msg)
    ends = np.cumsum([array.shape[axis] for array in arrays])
    result = np.concatenate(arrays, axis=axis)
    pulls = [
        partial(_part, axis, end - array.shape[axis], end) for end, array in zip(ends.tolist(), arrays, strict=True)
    ]
    return computed(result, *zip(joined, pulls, strict=True))


def _part(axis: int, start: int, end: int, grad: NDArray) -> NDArray:
    part: NDArray = grad[(slice(None),) * axis + (slice(start, end),)]
    return part


@offered("stack", method=False)
def stack(tensors: Value, dim: Value = 0) -> Value:
    joined = tensors_of(tensors)
    shapes = {each.array.shape for each in joined}
    if len(shapes) > 1:
        msg = f"the tensors have the shapes {', '.join(str(list(shape)) for shape in sorted(shapes))}; they must agree"
        raise ValueError(msg)
    return cat(tuple(unsqueeze(each, dim) for each in joined), dim)


@offered(operators=("getitem",))
def getitem(input_: Value, index: Value) -> Value:
    if isinstance(input_, tuple):
        if not isinstance(index, slice):
            return _one_of(input_, integer_of(index, "index"))
        return input_[_slice(index)]
    operand = tensor_of(input_)
    wanted = index if isinstance(index, tuple) else (index,)
    cells = tuple(_cell(each) for each in wanted)
    arrays = [each for each in cells if isinstance(each, np.ndarray)]
    if len(arrays) > 1:
        msg = "an index may hold one tensor at most"
        raise ValueError(msg)
    expect_room((*(1 for each in cells if each is None), *operand.array.shape))
    for array in arrays:
        if array.dtype != np.bool_:  # each of its elements takes everything along the other dimensions
            axis = _indexed_axis(cells, operand.array.ndim)
            others = operand.array.shape[:axis] + operand.array.shape[axis + 1 :]
            expect_room((array.size, *others))
    return taken(operand, cells)


def _indexed_axis(cells: Sequence[Any], num_dimensions: int) -> int:
    """Return the dimension that the tensor in an index is for."""
    at = next(place for place, each in enumerate(cells) if isinstance(each, np.ndarray))
    before = [each for each in cells[:at] if each is not None]
    if any(each is Ellipsis for each in before):
        return num_dimensions - sum(each is not None for each in cells[at:])
    return len(before)


def _one_of(values: tuple[Value, ...], at: int) -> Value:
    if not -len(values) <= at < len(values):
        msg = f"index is {at}; there are {len(values)} values"
        raise IndexError(msg)
    return values[at]


def _cell(index: Value) -> Any:  # Any: part of an index of NumPy's
    if isinstance(index, slice):
        return _slice(index)
    if isinstance(index, Tensor):
        if index.array.dtype == np.float64:
            msg = "an index must be a tensor of integers or bools"
            raise ValueError(msg)
        return index.array
    return index if index is None or index is Ellipsis else integer_of(index, "index")


def _slice(index: slice) -> slice:
    bounds = [None if each is None else integer_of(each, "slice") for each in (index.start, index.stop, index.step)]
    if bounds[2] is not None and bounds[2] < 1:
        msg = f"the step of a slice is {bounds[2]}; allowed: 1 or more; use flip"
        raise ValueError(msg)
    return slice(*bounds)


@offered_as_method("size")
def size(input_: Value, dim: Value = None) -> Value:
    shape = tensor_of(input_).array.shape
    return shape if dim is None else _one_of(shape, integer_of(dim, "dim"))


@offered("numel")
def numel(input_: Value) -> Value:
    return tensor_of(input_).array.size


@offered_as_method("dim", "ndimension")
def dim_(input_: Value) -> Value:
    return tensor_of(input_).array.ndim


@offered(targets=("getattr",))
def attribute(input_: Value, name: Value) -> Value:
    if isinstance(input_, tuple) and len(input_) == 2 and name in {"values", "indices"}:
        value: Value = input_[name == "indices"]
        return value
    operand = tensor_of(input_)
    match name:
        case "shape":
            return operand.array.shape
        case "ndim":
            return operand.array.ndim
        case "dtype":
            return Dtype({"f": "float32", "i": "int64", "b": "bool"}[operand.array.dtype.kind])
        case "device":
            return Device()
        case "T":
            return transposed(operand)
        case "mT":
            return transpose(operand, -2, -1)
        case _:
            msg = f"attribute {name!r} is not offered; allowed: {', '.join(ATTRIBUTES)}"
            raise ValueError(msg)
