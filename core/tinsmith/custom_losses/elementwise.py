"""Operations on each element, with operands broadcast."""

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from tinsmith.custom_losses.registry import (
    Value,
    as_operands,
    flag_of,
    mask_of,
    number_of,
    offered,
    operand_of,
    pair,
    real_of,
    tensor_of,
)
from tinsmith.custom_losses.tensors import NDArray, Tensor, computed

Compute = Callable[[NDArray], NDArray]
Slope = Callable[[NDArray, NDArray], NDArray]
"""Returns the derivative, given operand and result."""


# Element by element ---------------------------------------------------------------------------------------------------


def _unary(input_: Value, compute: Compute, slope: Slope) -> Tensor:
    operand = real_of(tensor_of(input_))
    result = compute(operand.array)
    return computed(result, (operand, lambda grad: grad * slope(operand.array, result)))


def _of_one(compute: Compute, slope: Slope) -> Callable[[Value], Value]:
    def function(input_: Value) -> Value:
        return _unary(input_, compute, slope)

    return function


def _logistic(x: NDArray) -> NDArray:
    small = np.exp(-np.abs(x))
    result: NDArray = np.where(x >= 0, 1.0, small) / (1.0 + small)
    return result


_UNARY: Final[Mapping[str, tuple[Compute, Slope]]] = {
    "exp": (np.exp, lambda _, y: y),
    "expm1": (np.expm1, lambda _, y: y + 1.0),
    "log": (np.log, lambda x, _: 1.0 / x),
    "log1p": (np.log1p, lambda x, _: 1.0 / (x + 1.0)),
    "log2": (np.log2, lambda x, _: 1.0 / (x * np.log(2.0))),
    "sqrt": (np.sqrt, lambda _, y: 0.5 / y),
    "rsqrt": (lambda x: 1.0 / np.sqrt(x), lambda _, y: -0.5 * y**3),
    "square": (np.square, lambda x, _: 2.0 * x),
    "reciprocal": (lambda x: 1.0 / x, lambda _, y: -y * y),
    "sigmoid": (_logistic, lambda _, y: y * (1.0 - y)),
    "tanh": (np.tanh, lambda _, y: 1.0 - y * y),
}
for _name, (_compute, _slope) in _UNARY.items():
    offered(_name)(_of_one(_compute, _slope))


@offered("abs", "absolute", operators=("abs",))
def absolute(input_: Value) -> Value:
    operand = operand_of(input_, "input")
    result = computed(np.abs(operand.array), (operand, lambda grad: grad * np.sign(operand.array)))
    return as_operands(result, input_)


@offered("neg", "negative", operators=("neg",))
def negative(input_: Value) -> Value:
    operand = operand_of(input_, "input")
    if operand.array.dtype == np.bool_:
        msg = "a tensor of bools has no negative; use `~`"
        raise ValueError(msg)
    return as_operands(computed(-operand.array, (operand, lambda grad: -grad)), input_)


@offered("relu")
def relu(input_: Value) -> Value:
    operand = tensor_of(input_)
    zero = operand.array.dtype.type(0)
    return computed(np.maximum(operand.array, zero), (operand, lambda grad: grad * (operand.array > 0)))


@offered(targets=("torch.nn.functional.relu",))
def functional_relu(input_: Value, inplace: Value = False) -> Value:
    if flag_of(inplace, "inplace"):
        msg = "inplace is true; values cannot be changed in place"
        raise ValueError(msg)
    return relu(input_)


@offered("sign")
def sign(input_: Value) -> Value:
    operand = real_of(tensor_of(input_))
    return computed(np.sign(operand.array), (operand, np.zeros_like))


@offered(
    targets=(
        "torch._C._nn.log_sigmoid",
        "torch.nn.functional.logsigmoid",
    )
)
def log_sigmoid(input_: Value) -> Value:
    def compute(x: NDArray) -> NDArray:
        found: NDArray = np.minimum(x, 0.0) - np.log1p(np.exp(-np.abs(x)))
        return found

    return _unary(input_, compute, lambda x, _: _logistic(-x))


@offered(
    targets=(
        "torch._C._nn.softplus",
        "torch.nn.functional.softplus",
    )
)
def softplus(input_: Value, beta: Value = 1, threshold: Value = 20) -> Value:
    scale, limit = number_of(beta, "beta"), number_of(threshold, "threshold")
    if scale == 0:
        msg = "beta must not be 0"
        raise ValueError(msg)

    def compute(x: NDArray) -> NDArray:
        found: NDArray = np.where(x * scale > limit, x, np.logaddexp(0.0, x * scale) / scale)
        return found

    def slope(x: NDArray, _: NDArray) -> NDArray:
        found: NDArray = np.where(x * scale > limit, 1.0, _logistic(x * scale))
        return found

    return _unary(input_, compute, slope)


@offered("isnan")
def isnan(input_: Value) -> Value:
    return Tensor(np.isnan(tensor_of(input_).array))


@offered("isinf")
def isinf(input_: Value) -> Value:
    return Tensor(np.isinf(tensor_of(input_).array))


@offered("isfinite")
def isfinite(input_: Value) -> Value:
    return Tensor(np.isfinite(tensor_of(input_).array))


# Two operands, broadcast ----------------------------------------------------------------------------------------------


def _scaled(other: Value, alpha: Value) -> Value:
    return other if alpha == 1 else multiply(other, number_of(alpha, "alpha"))


@offered("add", operators=("add",))
def add(input_: Value, other: Value, *, alpha: Value = 1) -> Value:
    left, right = pair(input_, _scaled(other, alpha))
    result = computed(left.array + right.array, (left, lambda grad: grad), (right, lambda grad: grad))
    return as_operands(result, input_, other)


@offered("sub", "subtract", operators=("sub",))
def subtract(input_: Value, other: Value, *, alpha: Value = 1) -> Value:
    left, right = pair(input_, _scaled(other, alpha))
    if left.array.dtype == right.array.dtype == np.bool_:
        msg = "bools cannot be subtracted; use `^` or `~`"
        raise ValueError(msg)
    result = computed(left.array - right.array, (left, lambda grad: grad), (right, lambda grad: -grad))
    return as_operands(result, input_, other)


@offered("mul", "multiply", operators=("mul",))
def multiply(input_: Value, other: Value) -> Value:
    left, right = pair(input_, other)
    result = computed(
        left.array * right.array, (left, lambda grad: grad * right.array), (right, lambda grad: grad * left.array)
    )
    return as_operands(result, input_, other)


@offered("div", "divide", "true_divide", operators=("truediv",))
def divide(input_: Value, other: Value) -> Value:
    left, right = pair(input_, other)
    ratio = np.true_divide(left.array, right.array)
    result = computed(ratio, (left, lambda grad: grad / right.array), (right, lambda grad: -grad * ratio / right.array))
    return as_operands(result, input_, other)


@offered("pow", operators=("pow",))
def power(input_: Value, exponent: Value) -> Value:
    base, raised = pair(input_, exponent)
    if base.array.dtype.kind in "ib" and raised.array.dtype.kind in "ib" and (raised.array < 0).any():
        msg = "integers have no negative powers; use a float"
        raise ValueError(msg)
    result = np.power(base.array.astype(np.int64) if base.array.dtype == np.bool_ else base.array, raised.array)

    def by_base(grad: NDArray) -> NDArray:
        found: NDArray = np.where(
            raised.array == 0, 0.0, grad * raised.array * np.power(base.array, raised.array - 1.0)
        )
        return found

    def by_exponent(grad: NDArray) -> NDArray:
        none = (base.array == 0) & (raised.array >= 0)
        found: NDArray = np.where(none, 0.0, grad * result * np.log(base.array))
        return found

    return as_operands(computed(result, (base, by_base), (raised, by_exponent)), input_, exponent)


def _chosen(input_: Value, other: Value, choose: Callable[[NDArray, NDArray], NDArray]) -> Tensor:
    """Return the greater or the lesser ones. Where both are equal, each gets half of the derivative."""
    left, right = pair(input_, other)
    result = choose(left.array, right.array)

    def share(own: NDArray, others: NDArray, grad: NDArray) -> NDArray:
        found: NDArray = np.where(own == others, 0.5, own == result) * grad
        return found

    return computed(
        result, (left, partial(share, left.array, right.array)), (right, partial(share, right.array, left.array))
    )


@offered("maximum")
def maximum(input_: Value, other: Value) -> Value:
    return _chosen(tensor_of(input_), tensor_of(other, "other"), np.maximum)


@offered("minimum")
def minimum(input_: Value, other: Value) -> Value:
    return _chosen(tensor_of(input_), tensor_of(other, "other"), np.minimum)


@offered("logaddexp")
def logaddexp(input_: Value, other: Value) -> Value:
    left, right = pair(real_of(tensor_of(input_)), real_of(tensor_of(other, "other")))
    result = np.logaddexp(left.array, right.array)
    return computed(
        result,
        (left, lambda grad: grad * np.exp(left.array - result)),
        (right, lambda grad: grad * np.exp(right.array - result)),
    )


def _compared(compare: Callable[[Any, Any], NDArray], input_: Value, other: Value) -> Value:
    """A float is compared as float32 with a tensor, because this is what the client's tensors hold."""
    either = isinstance(input_, Tensor) or isinstance(other, Tensor)
    left, right = pair(_narrow(input_) if either else input_, _narrow(other) if either else other)
    return as_operands(Tensor(np.asarray(compare(left.array, right.array))), input_, other)


def _of_comparison(compare: Callable[[Any, Any], NDArray]) -> Callable[[Value, Value], Value]:
    def function(input_: Value, other: Value) -> Value:
        return _compared(compare, input_, other)

    return function


def _narrow(value: Value) -> Value:
    return float(np.float32(value)) if isinstance(value, float) else value


_COMPARISONS: Final[Mapping[str, Sequence[str]]] = {
    "eq": (),
    "ne": ("not_equal",),
    "lt": ("less",),
    "le": ("less_equal",),
    "gt": ("greater",),
    "ge": ("greater_equal",),
}
for _name, _aliases in _COMPARISONS.items():
    offered(_name, *_aliases, operators=(_name,))(_of_comparison(getattr(operator, _name)))


def _logical(combine: Callable[[NDArray, NDArray], NDArray], input_: Value, other: Value) -> Value:
    left, right = pair(input_, other)
    return as_operands(Tensor(np.asarray(combine(left.array != 0, right.array != 0))), input_, other)


@offered("logical_and")
def logical_and(input_: Value, other: Value) -> Value:
    return _logical(np.logical_and, tensor_of(input_), tensor_of(other, "other"))


@offered("logical_or")
def logical_or(input_: Value, other: Value) -> Value:
    return _logical(np.logical_or, tensor_of(input_), tensor_of(other, "other"))


@offered("logical_xor")
def logical_xor(input_: Value, other: Value) -> Value:
    return _logical(np.logical_xor, tensor_of(input_), tensor_of(other, "other"))


@offered("logical_not")
def logical_not(input_: Value) -> Value:
    return Tensor(tensor_of(input_).array == 0)


def _bits(value: Value, what: str) -> Value:
    """Bits of bools alone: masks are combined with `&`, `|`, `^` and `~`."""
    return value if isinstance(value, bool) else Tensor(mask_of(value, what))


@offered("bitwise_and", operators=("and_",))
def bitwise_and(input_: Value, other: Value) -> Value:
    return _logical(np.logical_and, _bits(input_, "input"), _bits(other, "other"))


@offered("bitwise_or", operators=("or_",))
def bitwise_or(input_: Value, other: Value) -> Value:
    return _logical(np.logical_or, _bits(input_, "input"), _bits(other, "other"))


@offered("bitwise_xor", operators=("xor",))
def bitwise_xor(input_: Value, other: Value) -> Value:
    return _logical(np.logical_xor, _bits(input_, "input"), _bits(other, "other"))


@offered("bitwise_not", operators=("invert",))
def bitwise_not(input_: Value) -> Value:
    return Tensor(~mask_of(input_, "input"))
