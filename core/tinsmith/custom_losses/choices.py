"""Choosing between elements, bounding them, and kinds of numbers."""

from functools import partial

import numpy as np

from tinsmith.custom_losses.registry import (
    DTYPES,
    Device,
    Dtype,
    Value,
    mask_of,
    number_of,
    offered,
    offered_as_method,
    operand_of,
    tensor_of,
    wrong,
)
from tinsmith.custom_losses.tensors import NDArray, Tensor, computed, expect_room

# Choosing and bounding ------------------------------------------------------------------------------------------------


@offered("where", method=False)
def where(condition: Value, input_: Value, other: Value) -> Value:
    chosen, left, right = mask_of(condition, "condition"), operand_of(input_, "input"), operand_of(other, "other")
    expect_room(np.broadcast_shapes(chosen.shape, left.array.shape, right.array.shape))
    return computed(
        np.where(chosen, left.array, right.array),
        (left, lambda grad: np.where(chosen, grad, 0.0)),
        (right, lambda grad: np.where(chosen, 0.0, grad)),
    )


@offered_as_method("where")
def where_method(input_: Value, condition: Value, other: Value) -> Value:
    return where(condition, input_, other)


@offered("masked_fill")
def masked_fill(input_: Value, mask: Value, value: Value) -> Value:
    filled = operand_of(value, "value")
    if filled.array.ndim:
        msg = f"value must be a number or a scalar, not of shape {list(filled.array.shape)}"
        raise ValueError(msg)
    return where(mask, filled, tensor_of(input_))


@offered("clamp", "clip")
def clamp(input_: Value, min_: Value = None, max_: Value = None) -> Value:
    """At the bounds, the derivative passes. A lower bound above the upper one gives the upper one."""
    operand = tensor_of(input_)
    if min_ is None and max_ is None:
        msg = "min and max are both missing; give at least one"
        raise ValueError(msg)
    low = None if min_ is None else operand_of(min_, "min")
    high = None if max_ is None else operand_of(max_, "max")
    bounds = [each for each in (low, high) if each is not None]
    x = operand.array
    expect_room(np.broadcast_shapes(x.shape, *(each.array.shape for each in bounds)))
    lowest, highest = (-np.inf if low is None else low.array), (np.inf if high is None else high.array)
    result = x if low is None else np.maximum(x, low.array)
    result = result if high is None else np.minimum(result, high.array)

    def pull(inside: NDArray, grad: NDArray) -> NDArray:
        found: NDArray = np.where(inside, grad, 0.0)
        return found

    links = [(operand, partial(pull, (x >= lowest) & (x <= highest)))]
    if low is not None:
        links.append((low, partial(pull, (lowest < highest) & (x < lowest))))
    if high is not None:
        links.append((high, partial(pull, (x > highest) | (highest < lowest))))
    return computed(result, *links)


@offered("clamp_min")
def clamp_min(input_: Value, min_: Value) -> Value:
    return clamp(input_, min_=min_)


@offered("clamp_max")
def clamp_max(input_: Value, max_: Value) -> Value:
    return clamp(input_, max_=max_)


# Kinds of numbers, and constants --------------------------------------------------------------------------------------


@offered("detach")
def detach(input_: Value) -> Value:
    return Tensor(tensor_of(input_).array)


@offered("clone")
def clone(input_: Value) -> Value:
    return tensor_of(input_)


@offered_as_method("contiguous")
def contiguous(input_: Value) -> Value:
    return tensor_of(input_)


def cast(operand: Tensor, kind: type) -> Tensor:
    if operand.array.dtype == kind:
        return operand
    if kind is np.int64:
        whole = np.nan_to_num(np.trunc(operand.array), nan=0.0, posinf=0.0, neginf=0.0)
        return Tensor(np.clip(whole, -(2.0**62), 2.0**62).astype(np.int64))
    return Tensor(operand.array.astype(kind))


@offered_as_method("float", "double")
def to_float(input_: Value) -> Value:
    return cast(tensor_of(input_), np.float64)


@offered_as_method("long", "int")
def to_integer(input_: Value) -> Value:
    return cast(tensor_of(input_), np.int64)


@offered_as_method("bool")
def to_bool(input_: Value) -> Value:
    return cast(tensor_of(input_), np.bool_)


@offered_as_method("to", "type")
def to(input_: Value, *wanted: Value, dtype: Value = None, device: Value = None) -> Value:
    operand = tensor_of(input_)
    for each in (*wanted, dtype, device):
        if isinstance(each, Dtype):
            operand = cast(operand, each.kind)
        elif isinstance(each, Tensor):
            operand = cast(operand, each.array.dtype.type)
        elif each is not None and each != "cpu" and not isinstance(each, Device):
            raise wrong("the target", each, f"a dtype ({', '.join(DTYPES)}), a tensor, or 'cpu'")
    return operand


@offered_as_method("type_as")
def type_as(input_: Value, other: Value) -> Value:
    return to(input_, tensor_of(other, "other"))


@offered("zeros_like", method=False)
def zeros_like(input_: Value, *, dtype: Value = None, device: Value = None) -> Value:
    return to(Tensor(np.zeros_like(tensor_of(input_).array)), dtype=dtype, device=device)


@offered("ones_like", method=False)
def ones_like(input_: Value, *, dtype: Value = None, device: Value = None) -> Value:
    return to(Tensor(np.ones_like(tensor_of(input_).array)), dtype=dtype, device=device)


@offered("full_like", method=False)
def full_like(input_: Value, fill_value: Value, *, dtype: Value = None, device: Value = None) -> Value:
    filled = np.full_like(tensor_of(input_).array, number_of(fill_value, "fill_value"))
    return to(Tensor(filled), dtype=dtype, device=device)
