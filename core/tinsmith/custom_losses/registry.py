"""The list of operations, and what their arguments must be. Each raises ValueError or IndexError for others."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature, signature
from types import EllipsisType
from typing import Any, Final, TypeVar

import numpy as np

from tinsmith.custom_losses.tensors import NDArray, Tensor, expect_room


@dataclass(frozen=True, slots=True)
class Dtype:
    """Of torch. Numbers have 64 bits here, so a narrower one changes nothing."""

    name: str

    @property
    def kind(self) -> type:
        return _KINDS[self.name]


_KINDS: Final[Mapping[str, type]] = {
    "float32": np.float64,
    "float64": np.float64,
    "int32": np.int64,
    "int64": np.int64,
    "bool": np.bool_,
}
DTYPES: Final = tuple(_KINDS)


@dataclass(frozen=True, slots=True)
class Device:
    """The one that there is."""


Number = bool | int | float
Value = Tensor | Number | str | tuple[Any, ...] | slice | EllipsisType | Dtype | Device | None
"""What a node may hold or an argument may be. Any: values again."""
Function = TypeVar("Function", bound=Callable[..., Value])


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    compute: Callable[..., Value]
    signature: Signature

    def expect_arguments(self, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Raise ValueError if these are not its parameters."""
        self._bound(args, kwargs)

    def __call__(self, args: Sequence[Value], kwargs: Mapping[str, Value]) -> Value:
        """Raise ValueError or IndexError if the operands do not fit."""
        bound = self._bound(args, kwargs)
        return self.compute(*bound[0], **bound[1])

    def _bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        spelled = {
            f"{name}_" if f"{name}_" in self.signature.parameters else name: each for name, each in kwargs.items()
        }
        try:
            bound = self.signature.bind(*args, **spelled)
        except TypeError as error:
            names = ", ".join(
                "*" * (each.kind is Parameter.VAR_POSITIONAL) + name.rstrip("_")
                for name, each in self.signature.parameters.items()
            )
            reason = str(error).replace("_'", "'")
            msg = f"{reason}; it takes ({names})"
            raise ValueError(msg) from error
        return bound.args, bound.kwargs


FUNCTIONS: Final[dict[str, Operation]] = {}
"""By target of a call_function node."""
METHODS: Final[dict[str, Operation]] = {}
"""By target of a call_method node."""
ATTRIBUTES: Final = ("shape", "ndim", "T", "mT", "dtype", "device", "values", "indices")


def offered(
    *names: str, operators: Sequence[str] = (), targets: Sequence[str] = (), method: bool = True
) -> Callable[[Function], Function]:
    """Offer a function under these names of `torch` and as methods, as operators, and under whole targets."""

    def offer(compute: Function) -> Function:
        made = Operation(compute=compute, signature=signature(compute))
        for name in names:
            FUNCTIONS[f"torch.{name}"] = made
            if method:
                METHODS[name] = made
        FUNCTIONS.update({f"operator.{name}": made for name in operators})
        FUNCTIONS.update(dict.fromkeys(targets, made))
        return compute

    return offer


def offered_as_method(*names: str) -> Callable[[Function], Function]:
    """Offer a function as a method alone."""

    def offer(compute: Function) -> Function:
        METHODS.update({name: Operation(compute=compute, signature=signature(compute)) for name in names})
        return compute

    return offer


# What arguments must be -----------------------------------------------------------------------------------------------


def tensor_of(value: Value, what: str = "input") -> Tensor:
    if not isinstance(value, Tensor):
        raise wrong(what, value, "a tensor")
    return value


def operand_of(value: Value, what: str) -> Tensor:
    """Take a number as a tensor without dimensions."""
    if isinstance(value, bool | int | float):
        return Tensor(np.asarray(value))
    return tensor_of(value, what)


def real_of(value: Value, what: str = "input") -> Tensor:
    """Take a tensor, or a number, as float64."""
    found = operand_of(value, what)
    return found if found.array.dtype == np.float64 else Tensor(found.array.astype(np.float64))


def mask_of(value: Value, what: str) -> NDArray:
    array = tensor_of(value, what).array
    if array.dtype != np.bool_:
        msg = f"{what} must be a tensor of bools; compare it first, as in `{what} != 0`"
        raise ValueError(msg)
    return array


def number_of(value: Value, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong(what, value, "a number")
    return value


def integer_of(value: Value, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong(what, value, "an integer")
    return value


def flag_of(value: Value, what: str) -> bool:
    if not isinstance(value, bool):
        raise wrong(what, value, "true or false")
    return value


def wrong(what: str, value: object, expected: str) -> ValueError:
    shown = "a tensor" if isinstance(value, Tensor) else repr(value)[:100]
    return ValueError(f"{what.rstrip('_')} must be {expected}, not {shown}")


def axis_of(dim: Value, num_dimensions: int) -> int:
    """Return the number of a dimension, counted from the front. As in torch, a scalar has dimension 0."""
    number, room = integer_of(dim, "dim"), max(1, num_dimensions)
    if not -room <= number < room:
        msg = f"dim is {number}; the tensor has {num_dimensions} dimensions"
        raise IndexError(msg)
    return number % room


def axes_of(dim: Value, num_dimensions: int) -> tuple[int, ...]:
    """Return all dimensions for None."""
    if dim is None or dim == ():
        return tuple(range(num_dimensions))
    found = tuple(axis_of(each, num_dimensions) for each in (dim if isinstance(dim, tuple) else (dim,)))
    if len(set(found)) < len(found):
        msg = f"dim {dim} names a dimension twice"
        raise ValueError(msg)
    return found if num_dimensions else ()


def integers_of(values: tuple[Value, ...], what: str) -> tuple[int, ...]:
    """Take integers one by one, or as one list."""
    listed = values[0] if len(values) == 1 and isinstance(values[0], tuple) else values
    return tuple(integer_of(each, what) for each in listed)


def tensors_of(values: Value) -> list[Tensor]:
    if not isinstance(values, tuple) or not values:
        raise wrong("tensors", values, "a list of tensors")
    return [tensor_of(each, "tensors") for each in values]


def pair(first: Value, second: Value) -> tuple[Tensor, Tensor]:
    left, right = operand_of(first, "input"), operand_of(second, "other")
    expect_room(np.broadcast_shapes(left.array.shape, right.array.shape))
    return left, right


def as_operands(result: Tensor, *operands: Value) -> Value:
    """Return a number if all operands are numbers."""
    if any(isinstance(each, Tensor) for each in operands):
        return result
    number: Number = result.array.item()
    return number
