"""Computes custom losses, their metrics and derivatives, from the logprobs of a pass.

The derivative by the logprobs is all that a backend needs: it is the gradient of `cross_entropy` with weights of
-dL/dlogp, which is also what the SDK's `forward_backward_custom` sends.

Array suffixes: T = tokens of one sequence, K = targets per token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tinsmith.custom_losses.graph import Argument, Call, LossGraph, Ref, read_graph
from tinsmith.custom_losses.registry import Value
from tinsmith.custom_losses.tensors import NDArray, Tensor, derivative_of
from tinsmith.errors import UserError
from tinsmith.operations import Array, CustomLoss, Datum, FloatArray, Forward, ForwardBackward

MAX_SEQUENCE_ELEMENTS: Final = 32 << 20
"""Of all results of one sequence, which are kept until its derivative is computed."""
_PASS_ELEMENTS: Final = 32 << 20
_ELEMENTS_PER_TARGET: Final = 1024
_CALL_ELEMENTS: Final = 1024  # what a call costs beside its elements

_Number = bool | int | float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Of a pass: the sum of its sequences' losses, metrics by name, and dloss_dlogp of each sequence."""

    loss: float
    metrics: Mapping[str, float]
    derivatives: tuple[FloatArray, ...]  # of the shape of the targets


def scoring_pass(op: ForwardBackward) -> Forward:
    """Return the pass that computes the logprobs of all targets."""
    data = tuple(replace(datum, loss_inputs=_weighted(datum, 0.0)) for datum in op.data)
    return Forward(model_id=op.model_id, data=data, loss_fn="cross_entropy")


def differentiated_pass(op: ForwardBackward, evaluation: Evaluation) -> ForwardBackward:
    """Return the pass whose gradient is the gradient of the custom loss."""
    data = tuple(
        replace(datum, loss_inputs=_weighted(datum, -each))
        for datum, each in zip(op.data, evaluation.derivatives, strict=True)
    )
    return ForwardBackward(model_id=op.model_id, data=data, loss_fn="cross_entropy")


def _weighted(datum: Datum, weights: float | FloatArray) -> Mapping[str, Array]:
    targets = datum.loss_inputs["target_tokens"]
    return {"target_tokens": targets, "weights": np.broadcast_to(np.float32(weights), targets.shape)}


def evaluate(op: ForwardBackward, logprobs: Sequence[Array], *, largest: float) -> Evaluation:
    """Compute the loss of a pass from the logprobs of its targets.

    Raises UserError if the loss does not fit the data, takes too much work, or has a derivative beyond `largest`.
    """
    assert op.custom_loss is not None
    graph, total, derivatives = read_graph(op.custom_loss), 0.0, []
    sums = dict.fromkeys(graph.metrics, 0.0)
    work = _Work(_PASS_ELEMENTS + _ELEMENTS_PER_TARGET * sum(each.size for each in logprobs))
    for index, (datum, own) in enumerate(zip(op.data, logprobs, strict=True)):
        try:
            found = _of_sequence(graph, _inputs(op.custom_loss, datum, own), work)
            derivatives.append(_narrowed(found.derivative, largest))
        except UserError as error:
            msg = f"data[{index}]: {error}"
            raise UserError(msg) from error
        total += found.loss
        for key, value in found.metrics.items():
            sums[key] += value
    metrics = {key: value / len(op.data) if key.endswith(":mean") else value for key, value in sums.items()}
    return Evaluation(loss=total, metrics=metrics, derivatives=tuple(derivatives))


def check_inputs(loss: CustomLoss, datum: Datum) -> None:
    """Raises UserError if a datum lacks an input, or has it with another rank."""
    for name, rank in loss.inputs:
        key = "target_tokens" if name == "logprobs" else name
        if key not in datum.loss_inputs:
            msg = f"loss_fn_inputs: {key!r} is missing; the custom loss {loss.name!r} takes it"
            raise UserError(msg)
        shape = datum.loss_inputs[key].shape
        if len(shape) != rank and not (rank == 0 and shape == (1,)):  # a scalar arrives as a list of one number
            msg = (
                f"loss_fn_inputs: {key!r} has the shape {list(shape)}; the custom loss {loss.name!r} declared {name!r} "
                f"with rank {rank}"
            )
            raise UserError(msg)


def _inputs(loss: CustomLoss, datum: Datum, logprobs: Array) -> tuple[NDArray, ...]:
    arrays = []
    for name, rank in loss.inputs:
        array = logprobs if name == "logprobs" else datum.loss_inputs[name]
        array = array if array.dtype.kind == "i" else array.astype(np.float64)
        arrays.append(array.reshape(()) if rank == 0 else array)
    return tuple(arrays)


def _narrowed(derivative: NDArray, largest: float) -> FloatArray:
    if not (np.abs(derivative) <= largest).all():  # of NaN too
        msg = f"the derivative of the custom loss by a logprob is not finite, or beyond {largest:g}"
        raise UserError(msg)
    narrow: FloatArray = derivative.astype(np.float32)
    return narrow


# One sequence ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfSequence:
    loss: float
    metrics: Mapping[str, float]
    derivative: NDArray


@dataclass(slots=True)
class _Work:
    """How much the calls of a pass may still do."""

    elements: int  # to read or to compute
    kept: int = 0  # of the sequence at hand

    def spend(self, number: int) -> None:
        """Raise ValueError if there is not so much left."""
        self.elements -= number + _CALL_ELEMENTS
        if self.elements < 0:
            msg = (
                f"the pass takes too much work; allowed: {_PASS_ELEMENTS} elements, and {_ELEMENTS_PER_TARGET} a target"
            )
            raise ValueError(msg)

    def keep(self, number: int) -> None:
        """As `spend`, for elements that are computed."""
        self.spend(number)
        self.kept += number
        if self.kept > MAX_SEQUENCE_ELEMENTS:
            msg = f"the results for one sequence are too large; allowed: {MAX_SEQUENCE_ELEMENTS} elements together"
            raise ValueError(msg)


def _of_sequence(graph: LossGraph, inputs: Sequence[NDArray], work: _Work) -> _OfSequence:
    logprobs = Tensor(inputs[0], is_variable=True)
    values: list[Value] = [logprobs, *map(Tensor, inputs[1:])]
    work.kept = 0
    with np.errstate(all="ignore"):  # what is not finite is reported as such
        for call in graph.calls:
            try:
                values.append(_called(call, values, work))
            except (ValueError, IndexError, OverflowError) as error:
                msg = f"custom loss {graph.name!r}: node {call.name!r} ({call.target}): {error}"
                raise UserError(msg) from error
        loss = values[graph.loss.node]
        if not isinstance(loss, Tensor) or loss.array.ndim:
            shown = f"of shape {list(loss.array.shape)}" if isinstance(loss, Tensor) else repr(loss)[:100]
            msg = f"custom loss {graph.name!r}: the loss is {shown}; it must be a tensor without dimensions"
            raise UserError(msg)
        if not loss.has_derivative:
            msg = f"custom loss {graph.name!r}: the loss has no derivative by any logprob; nothing could be trained"
            raise UserError(msg)
        metrics = {key: _metric(graph, key, values[each.node]) for key, each in graph.metrics.items()}
        return _OfSequence(loss=float(loss.array), metrics=metrics, derivative=derivative_of(loss, logprobs))


def _called(call: Call, values: Sequence[Value], work: _Work) -> Value:
    args = tuple(_resolved(each, values) for each in call.args)
    kwargs = {key: _resolved(each, values) for key, each in call.kwargs.items()}
    work.spend(_num_elements((*args, *kwargs.values())))
    value = call.operation(args, kwargs)
    work.keep(_num_elements((value,)))
    return value


def _resolved(argument: Argument, values: Sequence[Value]) -> Value:
    match argument:
        case Ref(node):
            return values[node]
        case tuple():
            return tuple(_resolved(each, values) for each in argument)
        case slice():
            return slice(*(_resolved(each, values) for each in (argument.start, argument.stop, argument.step)))
        case _:
            return argument


def _num_elements(values: Sequence[Value]) -> int:
    return sum(
        each.array.size if isinstance(each, Tensor) else _num_elements(each) if isinstance(each, tuple) else 0
        for each in values
    )


def _metric(graph: LossGraph, key: str, value: Value) -> float:
    if isinstance(value, _Number):
        return float(value)
    if not isinstance(value, Tensor) or value.array.size != 1:
        msg = f"custom loss {graph.name!r}: the metric {key!r} must be a scalar"
        raise UserError(msg)
    return float(value.array.reshape(()))
