"""What the core adds to the result of a pass, whichever backend computed it."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, TypeVar

import numpy as np

from tinsmith import operations as ops
from tinsmith.divergence import NOT_FINITE

Result = TypeVar("Result")

ELEMENTWISE_LOSS: Final = "elementwise_loss"
"""An output of each datum under cross_entropy: `-weights * logprobs`, as hosted Tinker answers it."""

NUM_REPLAYED: Final = "routing_replayed:sum"
"""The metric of a pass: how many of its sequences were computed by the experts that sampled them."""


def completed(operation: ops.Operation, result: Result) -> Result | ops.ForwardBackwardOutput:
    """Add to the result of a pass what follows from its operation. Other results stay as they are."""
    if not isinstance(operation, ops.ForwardBackward) or not isinstance(result, ops.ForwardBackwardOutput):
        return result
    return replace(result, loss_fn_outputs=_outputs(operation, result), metrics=_metrics(operation, result))


def _outputs(operation: ops.ForwardBackward, result: ops.ForwardBackwardOutput) -> tuple[Mapping[str, ops.Array], ...]:
    if operation.loss_fn != "cross_entropy":
        return result.loss_fn_outputs
    with np.errstate(invalid="ignore", over="ignore"):  # of a diverged model, a loss is no number either
        return tuple(
            {**outputs, ELEMENTWISE_LOSS: -datum.loss_inputs["weights"] * outputs["logprobs"]}
            for datum, outputs in zip(operation.data, result.loss_fn_outputs, strict=True)
        )


def _metrics(operation: ops.ForwardBackward, result: ops.ForwardBackwardOutput) -> Mapping[str, float]:
    """Add whether the loss or, as the backend says, the gradient is not finite: always, as the SDK joins chunks."""
    finite = math.isfinite(result.metrics["loss:sum"]) and not result.metrics.get(NOT_FINITE)
    metrics = {**result.metrics, NOT_FINITE: float(not finite)}
    experts = [datum.routed_experts for datum in operation.data if datum.routed_experts is not None]
    if experts:
        metrics[NUM_REPLAYED] = float(sum(len(each) > 0 for each in experts))
    return metrics
