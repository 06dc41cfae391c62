"""Sums and other reductions, and what is computed along a dimension."""

from collections.abc import Callable

import numpy as np

from tinsmith.custom_losses.elementwise import divide, maximum, minimum, multiply, subtract
from tinsmith.custom_losses.places import gather
from tinsmith.custom_losses.registry import (
    Dtype,
    Value,
    axes_of,
    axis_of,
    flag_of,
    number_of,
    offered,
    real_of,
    tensor_of,
    wrong,
)
from tinsmith.custom_losses.shapes import squeeze
from tinsmith.custom_losses.tensors import NDArray, Tensor, computed


def _kept(array: NDArray, axes: tuple[int, ...], *, keepdim: bool) -> NDArray:
    """Return a reduction without the dimensions that it went over, or with them as 1."""
    return array if keepdim or not axes else np.squeeze(array, axes)


def _open(array: NDArray, axes: tuple[int, ...], *, keepdim: bool) -> NDArray:
    """Undo `_kept`."""
    return array if keepdim or not axes else np.expand_dims(array, axes)


@offered("sum")
def sum_(input_: Value, dim: Value = None, keepdim: Value = False) -> Value:
    operand, keep = tensor_of(input_), flag_of(keepdim, "keepdim")
    axes, shape = axes_of(dim, operand.array.ndim), operand.array.shape
    return computed(
        operand.array.sum(axis=axes, keepdims=keep),
        (operand, lambda grad: np.broadcast_to(_open(grad, axes, keepdim=keep), shape)),
    )


@offered("mean")
def mean(input_: Value, dim: Value = None, keepdim: Value = False) -> Value:
    operand = real_of(tensor_of(input_))
    axes = axes_of(dim, operand.array.ndim)
    total = sum_(operand, axes, keepdim) if axes else operand
    return divide(total, int(np.prod([operand.array.shape[axis] for axis in axes], dtype=np.int64)))


@offered("var")
def var(
    input_: Value,
    dim: Value = None,
    unbiased: Value = True,
    keepdim: Value = False,
    *,
    correction: Value = None,
) -> Value:
    operand = real_of(tensor_of(input_))
    axes = axes_of(dim, operand.array.ndim)
    less = int(flag_of(unbiased, "unbiased")) if correction is None else number_of(correction, "correction")
    number = max(0, int(np.prod([operand.array.shape[axis] for axis in axes], dtype=np.int64)) - less)
    apart = subtract(operand, mean(operand, axes, True))
    return divide(sum_(multiply(apart, apart), axes, keepdim) if axes else multiply(apart, apart), number)


@offered("std")
def std(
    input_: Value,
    dim: Value = None,
    unbiased: Value = True,
    keepdim: Value = False,
    *,
    correction: Value = None,
) -> Value:
    """If all are equal, there is no derivative."""
    spread = tensor_of(var(input_, dim, unbiased, keepdim, correction=correction))
    result = np.sqrt(spread.array)
    return computed(result, (spread, lambda grad: np.where(result == 0, 0.0, grad / (2.0 * result))))


def _extreme(input_: Value, dim: Value, keepdim: Value, choose: Callable[..., NDArray]) -> Tensor:
    """Return greatest or least elements. Those that are equal share the derivative."""
    operand, keep = tensor_of(input_), flag_of(keepdim, "keepdim")
    axes = axes_of(dim, operand.array.ndim)
    if not operand.array.size:
        msg = "the tensor is empty"
        raise ValueError(msg)
    result = choose(operand.array, axis=axes, keepdims=True)

    def pull(grad: NDArray) -> NDArray:
        equal = operand.array == result
        found: NDArray = equal * (_open(grad, axes, keepdim=keep) / equal.sum(axis=axes, keepdims=True))
        return found

    return computed(_kept(result, axes, keepdim=keep), (operand, pull))


@offered("amax")
def amax(input_: Value, dim: Value = (), keepdim: Value = False) -> Value:
    return _extreme(input_, dim, keepdim, np.max)


@offered("amin")
def amin(input_: Value, dim: Value = (), keepdim: Value = False) -> Value:
    return _extreme(input_, dim, keepdim, np.min)


def _along(input_: Value, dim: Value, keepdim: Value, choose: Callable[..., NDArray]) -> Value:
    """Return the greatest or least elements along a dimension, and their places."""
    operand, keep = tensor_of(input_), flag_of(keepdim, "keepdim")
    if operand.array.ndim == 0:
        return operand, Tensor(np.asarray(0))
    axis = axis_of(dim, operand.array.ndim)
    if operand.array.shape[axis] == 0:
        msg = f"dimension {axis} is empty"
        raise ValueError(msg)
    places = Tensor(np.expand_dims(choose(operand.array, axis=axis), axis))
    found = tensor_of(gather(operand, axis, places))
    if keep:
        return found, places
    return squeeze(found, axis), squeeze(places, axis)


@offered("max")
def max_(input_: Value, dim: Value = None, keepdim: Value = False) -> Value:
    if isinstance(dim, Tensor):
        return maximum(input_, dim)
    return _extreme(input_, None, False, np.max) if dim is None else _along(input_, dim, keepdim, np.argmax)


@offered("min")
def min_(input_: Value, dim: Value = None, keepdim: Value = False) -> Value:
    if isinstance(dim, Tensor):
        return minimum(input_, dim)
    return _extreme(input_, None, False, np.min) if dim is None else _along(input_, dim, keepdim, np.argmin)


def _exp_sum(array: NDArray, axes: tuple[int, ...]) -> NDArray:
    """Return the logarithm of the sum of exponentials, with the dimensions kept."""
    if not array.size:
        msg = "the tensor is empty"
        raise ValueError(msg)
    greatest = array.max(axis=axes, keepdims=True)
    greatest = np.where(np.isfinite(greatest), greatest, 0.0)
    found: NDArray = np.log(np.exp(array - greatest).sum(axis=axes, keepdims=True)) + greatest
    return found


@offered("logsumexp")
def logsumexp(input_: Value, dim: Value, keepdim: Value = False) -> Value:
    operand, keep = real_of(tensor_of(input_)), flag_of(keepdim, "keepdim")
    axes = axes_of(dim, operand.array.ndim)
    result = _exp_sum(operand.array, axes)
    return computed(
        _kept(result, axes, keepdim=keep),
        (operand, lambda grad: _open(grad, axes, keepdim=keep) * np.exp(operand.array - result)),
    )


@offered("softmax")
def softmax(input_: Value, dim: Value) -> Value:
    operand = real_of(tensor_of(input_))
    axes = (axis_of(dim, operand.array.ndim),) if operand.array.ndim else ()
    result = np.exp(operand.array - _exp_sum(operand.array, axes))
    return computed(result, (operand, lambda grad: result * (grad - (grad * result).sum(axis=axes, keepdims=True))))


@offered("log_softmax")
def log_softmax(input_: Value, dim: Value) -> Value:
    operand = real_of(tensor_of(input_))
    axes = (axis_of(dim, operand.array.ndim),) if operand.array.ndim else ()
    result = operand.array - _exp_sum(operand.array, axes)
    return computed(result, (operand, lambda grad: grad - np.exp(result) * grad.sum(axis=axes, keepdims=True)))


@offered(targets=("torch.nn.functional.softmax",))
def functional_softmax(input_: Value, dim: Value = None, _stacklevel: Value = 3, dtype: Value = None) -> Value:
    _as_float(dtype)
    return softmax(input_, dim)


@offered(targets=("torch.nn.functional.log_softmax",))
def functional_log_softmax(input_: Value, dim: Value = None, _stacklevel: Value = 3, dtype: Value = None) -> Value:
    _as_float(dtype)
    return log_softmax(input_, dim)


def _as_float(dtype: Value) -> None:
    if dtype is not None and not (isinstance(dtype, Dtype) and dtype.kind is np.float64):
        raise wrong("dtype", dtype, "of floats")


@offered("cumsum")
def cumsum(input_: Value, dim: Value) -> Value:
    operand = tensor_of(input_)
    if operand.array.ndim == 0:
        return operand
    axis = axis_of(dim, operand.array.ndim)
    return computed(
        operand.array.cumsum(axis=axis), (operand, lambda grad: np.flip(np.flip(grad, axis).cumsum(axis=axis), axis))
    )


@offered("any")
def any_(input_: Value, dim: Value = None, keepdim: Value = False) -> Value:
    array = tensor_of(input_).array
    return Tensor(np.asarray((array != 0).any(axis=axes_of(dim, array.ndim), keepdims=flag_of(keepdim, "keepdim"))))


@offered("all")
def all_(input_: Value, dim: Value = None, keepdim: Value = False) -> Value:
    array = tensor_of(input_).array
    return Tensor(np.asarray((array != 0).all(axis=axes_of(dim, array.ndim), keepdims=flag_of(keepdim, "keepdim"))))


@offered("dot")
def dot(input_: Value, tensor: Value) -> Value:
    left, right = tensor_of(input_), tensor_of(tensor, "tensor")
    if left.array.ndim != 1 or left.array.shape != right.array.shape:
        msg = f"dot takes two vectors of one length, not {list(left.array.shape)} and {list(right.array.shape)}"
        raise ValueError(msg)
    return sum_(multiply(left, right))
